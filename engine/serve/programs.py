"""The programs of clients over HTTP, from their first call to their end."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import islice
from typing import Any, Final

from weft.core.errors import KeyLimitError
from weft.core.identity import Identity
from weft.core.ids import CallId, IdSource, ProgramId, SessionId, ThreadId, check_id
from weft.core.prediction.times import IdleTimes
from weft.core.process_rows import CallIdentity, ProgramState
from weft.core.program import Program
from weft.engine.multi import AsyncMultiLLMEngine
from weft.engine.wire.control import EventKind, ProgramEvent, ProgramEvents, ProgramsEnded, decode_control
from weft.engine.wire.values import strings

MOST_PROGRAMS: Final = 10_000  # open at once; beyond them the longest idle ones end. And ended ones that are remembered
_RETRY_S: Final = 1.0


class OpenPrograms:
    """Keeps the programs that are open. Use it on the engine's event loop."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._times = IdleTimes()
        self._left_s: OrderedDict[ProgramId, float] = OrderedDict()  # the last call, also of programs given up
        self._open: dict[ProgramId, Program] = {}
        self._of_scope: dict[str, OrderedDict[ProgramId, None]] = {}  # the open ones of a key, the longest unused first
        self._calls: dict[ProgramId, int] = {}  # in flight
        self._ending: set[ProgramId] = set()  # with their calls in flight
        # The threads whose last call has no final answer, with it, all that came after it, and their openings.
        self._unanswered: dict[ProgramId, dict[ThreadId, tuple[set[CallId], bytes]]] = {}

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, program_id: ProgramId) -> bool:
        return program_id in self._open

    def of(self, scope: str) -> list[Program]:
        """The programs of a key, the longest unused first."""
        return [self._open[program_id] for program_id in self._of_scope.get(scope, ())]

    def check_room(self, identity: Identity, limit: int | None) -> None:
        """Raise KeyLimitError unless a program may be opened if it is not open: one of the same key that is idle makes
        room."""
        others = self._of_scope.get(_scope_of(identity.program_id), ())
        if limit is None or identity.program_id in self._open or len(others) < limit:
            return
        if all(each in self._calls for each in others):
            raise KeyLimitError("max_programs", limit, _RETRY_S)

    def touch(self, program_id: ProgramId) -> bool:
        """Hear that a program goes on. Returns whether it is open."""
        program = self._open.get(program_id)
        if program is not None:
            program.reports.note_alive()
            self._goes_on(program)
        return program is not None

    def enter(
        self, identity: Identity, limit: int | None = None, deadline_s: float | None = None, *, traceparent: str = ""
    ) -> Program:
        """The program of a call that arrives; `leave` follows. A new one if it is not open, which should have ended
        after `deadline_s` seconds, and whose span has the client's as its parent. `limit` is how many programs the key
        may have open; None allows as many as there may be in all. Raises KeyLimitError as `check_room` does."""
        self.check_room(identity, limit)
        program_id = identity.program_id
        program = self._open.get(program_id)
        scope = _scope_of(program_id)
        kind = f"{scope}/{identity.program_name or identity.source}"
        left_s = self._left_s.pop(program_id, None)
        if left_s is not None:
            self._times.note(kind, self._clock() - left_s)
        if program is None:
            name, ids = identity.program_name or "program", _GivenIds(program_id, identity.session_id)
            metadata = {"traceparent": traceparent} if traceparent else None
            program = Program(name, tenant=identity.tenant, deadline_s=deadline_s, metadata=metadata, ids=ids)
            if identity.parent_program_id is not None:
                program.reports.note_parent(identity.parent_program_id)
            program.reports.end_when_idle(
                self._times.timeout_s(kind), partial(self.forget, program_id), partial(self._has_answered, program_id)
            )
            if limit is not None and len(self._of_scope.get(scope, ())) >= limit:
                self._end_unused(scope)
            self._open[program_id] = program
            self._of_scope.setdefault(scope, OrderedDict())[program_id] = None
            if len(self._open) > MOST_PROGRAMS:  # those of the key that has the most, so that no key ends another's
                self._end_unused(max(self._of_scope, key=lambda each: len(self._of_scope[each])))
        self._of_scope[scope].move_to_end(program_id)
        self._calls[program_id] = self._calls.get(program_id, 0) + 1
        return program

    def asked(self, identity: CallIdentity, opening: bytes = b"", ended: Iterable[ThreadId] = ()) -> None:
        """Note that a call has begun, and that its client waits for the answer. Who had to answer before it, in a
        conversation with the same opening, has handed it on, and waits for nothing. Nor do threads that have ended."""
        waiting = self._unanswered.setdefault(identity.program_id, {})
        for thread_id in ended:
            waiting.pop(thread_id, None)
        for thread_id, (calls, began) in list(waiting.items()):
            if not calls.isdisjoint(identity.parents):
                calls.add(identity.call_id)
                if opening and began == opening:
                    del waiting[thread_id]
        waiting[identity.thread_id] = {identity.call_id}, opening

    def answered(self, identity: CallIdentity) -> None:
        """The client has the whole answer of a call, which asks for no tool. If no thread waits for one, the program
        may be over."""
        unanswered = self._unanswered.get(identity.program_id)
        if unanswered is not None:
            unanswered.pop(identity.thread_id, None)
        program = self._open.get(identity.program_id)
        if program is not None and (row := program.row) is not None and self._has_answered(identity.program_id):
            row.answered_s = self._clock()

    @staticmethod
    def _goes_on(program: Program) -> None:
        if (row := program.row) is not None:  # once: another thread may end the program
            row.answered_s = math.nan

    def _has_answered(self, program_id: ProgramId) -> bool:
        return self._unanswered.get(program_id) == {}

    def leave(self, program: Program) -> None:
        """Note that a call has left, or was refused."""
        program_id = program.program_id
        if self._open.get(program_id) is not program:  # it has ended meanwhile
            return
        self._calls[program_id] -= 1
        if not self._calls[program_id]:
            del self._calls[program_id]
            self._left_s[program_id] = self._clock()
            if len(self._left_s) > MOST_PROGRAMS:
                self._left_s.popitem(last=False)
            if program_id in self._ending:
                self.end(program_id)

    def end_after_calls(self, program_id: ProgramId) -> None:
        """End a program when it has no call in flight."""
        if program_id in self._calls:
            self._ending.add(program_id)
        else:
            self.end(program_id)

    def end(self, program_id: ProgramId, state: ProgramState = ProgramState.FINISHED) -> bool:
        """End a program; its calls in flight are aborted. Returns whether it was open."""
        program = self._open.get(program_id)
        self.forget(program_id)
        self._left_s.pop(program_id, None)
        if program is not None:
            self._goes_on(program)  # until now, whatever its last answer was
            program.end(state)
        return program is not None

    def end_all(self) -> None:
        """End all programs, because the server stops."""
        for program_id in list(self._open):
            self.end(program_id, ProgramState.FINISHED if self._has_answered(program_id) else ProgramState.CANCELLED)

    def forget(self, program_id: ProgramId) -> None:
        """Note that a program has ended, such as because it was idle for its time."""
        self._calls.pop(program_id, None)
        self._ending.discard(program_id)
        self._unanswered.pop(program_id, None)
        scope = _scope_of(program_id)
        of_scope = self._of_scope.get(scope)
        if of_scope is not None:
            of_scope.pop(program_id, None)
            if not of_scope:
                del self._of_scope[scope]
        self._open.pop(program_id, None)

    def _end_unused(self, scope: str) -> None:
        """End the longest idle program of a key, if one is idle. The calls in flight bound the number of the others."""
        idle = next((each for each in self._of_scope[scope] if each not in self._calls), None)
        if idle is not None:
            self.end(idle, ProgramState.FINISHED if self._has_answered(idle) else ProgramState.ABANDONED)


def _scope_of(program_id: ProgramId) -> str:
    return program_id.partition("/")[0]


class _GivenIds(IdSource):
    """Ids of a program and a session that a client chose, and random ids for the rest."""

    def __init__(self, program_id: ProgramId, session_id: SessionId | None) -> None:
        super().__init__()
        self._program_id = program_id
        self._session_id = session_id
        self.scope = f"{_scope_of(program_id)}/"

    def program(self) -> ProgramId:
        return self._program_id

    def session(self) -> SessionId:
        return self._session_id or super().session()


MOST_ITEMS: Final = 10_000  # of a message; what comes after them is lost, which costs a guess or a time-out
_OPEN: Final = "programs_open"


def note_events(engine: AsyncMultiLLMEngine, programs: OpenPrograms, scope: str, message: Mapping[str, Any]) -> None:
    """Take a message of a client. Programs that are not open, and what is no event, change nothing.

    Args:
        scope: The scope of the client's key, in which its ids are.
        message: A `ProgramEvents` or a `ProgramsEnded`, as `encode_control` writes it, or the ids of programs that go
            on without a call.

    Raises:
        InvalidIdError: The name of a tool is malformed. Then nothing in the message counts.
    """
    if message.get("type") == _OPEN:
        for program_id in islice(strings(message.get("program_ids")), MOST_ITEMS):
            programs.touch(ProgramId(f"{scope}/{program_id}"))
        return
    found = decode_control(message)
    if isinstance(found, ProgramsEnded):
        states = (
            (found.failed, ProgramState.FAILED),  # these two also are among all that have ended
            (found.cancelled, ProgramState.CANCELLED),
            (found.program_ids, ProgramState.FINISHED),
            (found.abandoned, ProgramState.ABANDONED),
        )
        for ids, state in states:
            for program_id in ids[:MOST_ITEMS]:
                programs.end(ProgramId(f"{scope}/{program_id}"), state)
    elif isinstance(found, ProgramEvents):
        events = found.events[:MOST_ITEMS]
        for event in events:
            if event.tool:
                check_id(event.tool, "each tool's name")
        for event in events:
            _happened(engine, programs, event, scope)


def _happened(engine: AsyncMultiLLMEngine, programs: OpenPrograms, event: ProgramEvent, scope: str) -> None:
    program_id = ProgramId(f"{scope}/{event.program_id}")
    if not programs.touch(program_id):
        return
    if event.kind is EventKind.TOOL_STARTED:
        engine.programs.tool_started(program_id, event.run, event.tool)
    elif event.kind is EventKind.TOOL_ENDED:
        engine.programs.tools_ended(program_id, (event.run,))
    else:
        engine.programs.call_announced(program_id)
