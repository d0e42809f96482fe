"""The programs and calls of one engine, as far as its scheduler knows them."""

from __future__ import annotations

import itertools
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

from weft.core.ids import CallId, ProgramId
from weft.core.log import get_logger
from weft.core.policies import Call, Policy, ProgramChanged, ProgramEnded, ProgramView
from weft.engine.scheduler.ledger import Entry, Ledger, ProgramEntry
from weft.engine.vllm_compat.names import Request
from weft.engine.wire.call_header import CallHeader, decode_call, figures_of, program_of_request


class HeaderReader:
    """Reads the header of each request that arrives, and warns once of figures that it does not believe.

    Args:
        trusts_clients: Whether figures, such as a program's service, are taken from every client.
    """

    def __init__(self, *, trusts_clients: bool) -> None:
        self._trusts_clients = trusts_clients
        self._has_warned = False

    def read(self, request: Request) -> CallHeader:
        """A request's header. A request that names no program is a program of its own."""
        params = request.sampling_params
        extra_args = params.extra_args if params is not None else None
        self._warn_of_figures(extra_args)
        return decode_call(extra_args, request.request_id, request.session_id, is_trusted=self._trusts_clients)

    def _warn_of_figures(self, extra_args: object) -> None:
        if not self._trusts_clients and not self._has_warned and (figures := figures_of(extra_args)):
            self._has_warned = True
            get_logger().warning(
                "a client sent figures, and they were ignored, because clients are not trusted here; to trust all "
                'clients, add "trust_clients": true to "weft" in additional_config. This is logged once',
                figures=", ".join(figures),
            )


# How many programs without a request are remembered, the latest used: clients may send ids and no figures.
_REMEMBERED_PROGRAMS: Final = 10_000
# After the message that a program has ended, a call that was aborted with it may still come for so long.
_LATE_S: Final = 10.0


class _Idle(NamedTuple):
    """A program without a request."""

    view: ProgramView
    since_s: float


class CallTable:
    """Keeps a program entry for each program, a ledger for each call and an entry for each request.

    Args:
        on_gone: Called with each program that has no request, and of which no request is expected.
        idle_s: A program without a request for so long is forgotten, because nobody may ever say that it has ended.
    """

    def __init__(
        self, policy: Policy, on_gone: Callable[[ProgramView], None] = lambda _program: None, idle_s: float = math.inf
    ) -> None:
        self.entries: dict[str, Entry] = {}  # by request
        self._policy = policy
        self._programs: dict[ProgramId, ProgramEntry] = {}  # with requests under way
        self._idle: OrderedDict[ProgramId, _Idle] = OrderedDict()  # without, the latest used last
        self._ended: OrderedDict[ProgramId, float] = OrderedDict()  # when; a call of it may still be on its way here
        self._on_gone = on_gone
        self._idle_s = idle_s
        # Clients choose call ids, and two programs may choose the same.
        self._ledgers: dict[tuple[ProgramId, CallId], Ledger] = {}
        self._arrivals = itertools.count()

    def open(self, request_id: str, header: CallHeader, prompt_tokens: int, now_s: float) -> Entry:
        """Note a request that arrives. Returns its entry, with the call that the policy ranks."""
        identity = header.identity
        while self._idle and next(iter(self._idle.values())).since_s < now_s - self._idle_s:
            self._forget_first()
        program = self._program(header, now_s)
        program.requests += 1
        program.has_ended = False
        key = identity.program_id, identity.call_id
        ledger = self._ledgers.get(key)
        if ledger is None:
            view = program.view
            view.calls = max(view.calls, header.program_calls) if header.program_calls else view.calls + 1
            ledger = self._ledgers[key] = Ledger(
                identity.call_id, identity.program_id, view.attained.copy(), now_s - header.waited_s
            )
        ledger.ends_program |= header.ends_program
        ledger.sequences += 1
        call = Call(
            request_id, program.view, prompt_tokens, deadline_s=now_s + header.time_left_s, wait_s=header.waited_s
        )
        entry = self.entries[request_id] = Entry(call, ledger)
        return entry

    def _program(self, header: CallHeader, now_s: float) -> ProgramEntry:
        program_id = header.identity.program_id
        program = self._programs.get(program_id)
        if program is None:
            idle = self._idle.pop(program_id, None)
            if idle is not None:
                view = idle.view
            else:
                view = ProgramView(program_id, arrival_s=now_s, arrival_order=next(self._arrivals))
            program = self._programs[program_id] = ProgramEntry(view)
        view = program.view
        view.name = view.name or header.program_name
        view.fingerprint = view.fingerprint or header.fingerprint
        view.tenant = view.tenant or header.tenant
        view.session_id = view.session_id or header.session_id
        view.deadline_s = min(view.deadline_s, now_s + header.program_time_left_s)  # messages only delay it
        view.attained.merge(header.attained)
        self._policy.on_event(ProgramChanged(view))
        return program

    def close(self, request_id: str, now_s: float, *, is_aborted: bool = False) -> Ledger | None:
        """Note a request that leaves, finished or aborted. Returns the ledger of its call, which is over when no
        sequence is left; None if the request is unknown."""
        entry = self.entries.pop(request_id, None)
        if entry is None:
            return None
        ledger = entry.ledger
        if entry.running and not entry.stalled:
            ledger.stop(now_s)
        elif ledger.running == 0:  # aborted, or finished while it was preempted: its last wait counts too
            ledger.wait_s += now_s - ledger.waiting_since_s
            ledger.waiting_since_s = now_s
        self._policy.leave(entry.call)
        program = self._programs[ledger.program_id]
        ledger.sequences -= 1
        if ledger.sequences == 0:
            del self._ledgers[ledger.program_id, ledger.call_id]
            program.view.attained.fold(ledger.inherited, ledger.service_s, ledger.wait_s)
            self._policy.on_event(ProgramChanged(program.view))
        program.requests -= 1
        if program.requests == 0:
            self._remember(ledger.program_id, program, request_id, now_s, is_aborted=is_aborted)
        if ledger.sequences == 0 and ledger.ends_program:
            self.end_program(ledger.program_id, now_s)
        return ledger

    def set_stalled(self, entry: Entry, now_s: float, *, stalled: bool) -> None:
        """Note that a running request gets no tokens in the coming step, and therefore waits, or that it goes on."""
        if stalled and not entry.stalled:
            entry.ledger.stop(now_s)
            self._policy.stall(entry.call, now_s)
        elif entry.stalled and not stalled:
            entry.ledger.start(now_s)
            self._policy.go_on(entry.call, now_s)
        entry.stalled = stalled

    def _remember(
        self, program_id: ProgramId, program: ProgramEntry, request_id: str, now_s: float, *, is_aborted: bool
    ) -> None:
        del self._programs[program_id]
        if program.has_ended:
            self._on_gone(program.view)
        elif program_id == program_of_request(request_id):
            self._policy.on_event(ProgramEnded(program.view))
            self._on_gone(program.view)
        elif is_aborted and now_s < self._ended.get(program_id, -math.inf) + _LATE_S:
            self._policy.on_event(ProgramEnded(program.view, is_known=False))
            self._on_gone(program.view)
        else:
            self._ended.pop(program_id, None)  # its client goes on after all
            self._idle[program_id] = _Idle(program.view, now_s)
            if len(self._idle) > _REMEMBERED_PROGRAMS:
                self._forget_first()

    def _forget_first(self) -> None:
        _, forgotten = self._idle.popitem(last=False)
        self._policy.on_event(ProgramEnded(forgotten.view, is_known=False))
        self._on_gone(forgotten.view)

    def end_program(self, program_id: ProgramId, now_s: float, *, is_abandoned: bool = False) -> bool:
        """A program has ended: forget it now, or with its last request. `is_abandoned`: nobody has said that it ended,
        but no request of it is expected. Returns whether the program was known."""
        self._ended[program_id] = now_s
        if len(self._ended) > _REMEMBERED_PROGRAMS:
            self._ended.popitem(last=False)
        idle = self._idle.pop(program_id, None)
        if idle is not None:
            self._policy.on_event(ProgramEnded(idle.view, is_known=not is_abandoned))
            self._on_gone(idle.view)
            return True
        program = self._programs.get(program_id)
        if program is None or program.has_ended:
            return False
        program.has_ended = True
        self._policy.on_event(ProgramEnded(program.view, is_known=not is_abandoned))
        return True

    def view(self, program_id: ProgramId) -> ProgramView | None:
        """A program that is known; None if it is not."""
        program = self._programs.get(program_id)
        idle = self._idle.get(program_id)
        return program.view if program is not None else idle.view if idle is not None else None

    def idle_programs(self) -> Iterator[ProgramView]:
        """The programs without a request, those that were used last first."""
        return (idle.view for idle in reversed(self._idle.values()))

    @property
    def is_empty(self) -> bool:
        """Whether no program is known, with or without a request."""
        return not self._programs and not self._idle

    def knows(self, program_id: ProgramId) -> bool:
        """Whether a program has had a call here and, as far as is known, has not ended."""
        program = self._programs.get(program_id)
        return program_id in self._idle if program is None else not program.has_ended

    def check_integrity(self, running: set[str]) -> None:
        """Assert that the sums over programs, calls and requests agree. For tests."""
        entries = self.entries.values()
        checks = {
            "a running mark is wrong": running == {key for key, entry in self.entries.items() if entry.running},
            "a rank is taken twice": len({entry.call.rank for entry in entries}) == len(entries),
            "a level has no queue": all(0 <= entry.call.rank.level < self._policy.levels for entry in entries),
            "a quantum was used up": all(entry.call.quantum_s > 0 for entry in entries),
            "a program's requests do not add up": sum(p.requests for p in self._programs.values()) == len(entries),
            "a call's sequences do not add up": sum(x.sequences for x in self._ledgers.values()) == len(entries),
            "a call stalls and does not run": all(entry.running for entry in entries if entry.stalled),
            "a ledger's running count is wrong": sum(x.running for x in self._ledgers.values())
            == sum(entry.running and not entry.stalled for entry in entries),
            "a program is both idle and busy": not (self._programs.keys() & self._idle.keys()),
        }
        failed = [what for what, holds in checks.items() if not holds]
        if failed:
            raise AssertionError("; ".join(failed))
        self._policy.waiting.check_integrity()
        self._policy.held.check_integrity()
