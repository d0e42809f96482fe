"""Programs of a trace, played open-loop on one baseline's engine."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from weft.bench.clock import Clock
from weft.bench.load import Prompts
from weft.bench.records import Outcome
from weft.core.ids import CallId, EngineId, ProgramId, SessionId, ThreadId
from weft.core.process_table import CallIdentity, CallRow, ProcessTable, ProgramInfo, ProgramState
from weft.core.trace.format import TraceCall, TraceProgram, path_tokens
from weft.engine.wire import decode_account, encode_call


class SentCall(NamedTuple):
    """A call on its way to an engine."""

    request_id: str
    prompt: list[int]
    output_tokens: int
    place: int  # its program's, in the order of arrival
    number: int  # counts up: it stands for the time of arrival where vLLM breaks ties by it


class Playable(Protocol):
    """What a play needs of an engine (`weft.bench.stepper.Stepper`)."""

    clock: Clock
    tells_programs: bool

    def take_turn(self) -> None: ...

    def send(self, call: SentCall, extra: dict[str, Any] | None) -> None: ...

    def step(self) -> list[Any]: ...


@dataclass
class _Live:
    """A program under way."""

    spec: TraceProgram
    place: int  # in the order of arrival
    arrived_steps: int
    arrived_s: float
    calls: dict[str, TraceCall] = field(default_factory=dict)
    histories: dict[str, list[int]] = field(default_factory=dict)  # prompt and, once ended, output of each call
    missing: dict[str, int] = field(default_factory=dict)  # parents that have not ended
    children: dict[str, list[str]] = field(default_factory=dict)
    left: int = 0


class Play:
    """All programs of a round, from the first arrival to the last end.

    Args:
        stepper: an engine that is idle, its clock at 0.
        programs: fitted to the engine; times in seconds of its clock.
        unloaded_steps: of each program, by id.
    """

    def __init__(
        self, stepper: Playable, programs: Sequence[TraceProgram], unloaded_steps: dict[str, int], prompts: Prompts
    ) -> None:
        self._stepper = stepper
        self._programs = programs
        self._unloaded_steps = unloaded_steps
        self._prompts = prompts
        self._table = ProcessTable()
        self._numbers = itertools.count()
        self._due: list[tuple[float, int, int, str | None]] = []  # when, tie breaker, program, call (None: all of it)
        self._live: dict[int, _Live] = {}
        self._in_flight: dict[str, tuple[int, str, CallRow | None]] = {}
        self._places = itertools.count()
        self.outcomes: list[Outcome] = []
        self.swapped_tokens = 0

    def run(self) -> Iterator[int]:
        """Play, one engine step after another; yields how many programs have ended."""
        clock = self._stepper.clock
        for index, program in enumerate(self._programs):
            self._plan(program.arrival_s, index, None)
        while self._due or self._in_flight:
            self._stepper.take_turn()
            until_s = clock.now_s
            if not self._in_flight:
                until_s = max(until_s, self._due[0][0])
                clock.skip_to(until_s)
            while self._due and self._due[0][0] <= until_s:
                _, _, index, call_id = heapq.heappop(self._due)
                if call_id is None:
                    self._open(index)
                else:
                    self._send(index, call_id)
            if self._in_flight:
                for output in self._stepper.step():
                    self._end_call(output)
            yield len(self.outcomes)

    def _plan(self, due_s: float, index: int, call_id: str | None) -> None:
        heapq.heappush(self._due, (due_s, next(self._numbers), index, call_id))

    def _open(self, index: int) -> None:
        spec, clock = self._programs[index], self._stepper.clock
        # On a clock of seconds it arrives during a step, and is looked at after it.
        arrived_s = clock.seconds if clock.counts_steps else spec.arrival_s
        live = self._live[index] = _Live(spec, next(self._places), clock.steps, arrived_s, left=len(spec.calls))
        live.calls = {call.call_id: call for call in spec.calls}
        live.missing = {call.call_id: len(call.parents) for call in spec.calls}
        for call in spec.calls:
            for parent in call.parents:
                live.children.setdefault(parent, []).append(call.call_id)
        self._table.open(ProgramInfo(_id(index), SessionId(_id(index)), spec.name or spec.program), clock.now_s)
        for call in spec.calls:
            if not call.parents:
                self._follow(index, call, spec.arrival_s)

    def _follow(self, index: int, call: TraceCall, from_s: float) -> None:
        """All that a call waited for has ended."""
        if call.gap_s:
            self._plan(from_s + call.gap_s, index, call.call_id)
        else:
            self._send(index, call.call_id)

    def _send(self, index: int, call_id: str) -> None:
        live, clock = self._live[index], self._stepper.clock
        call = live.calls[call_id]
        history = live.histories[call.parents[0]] if call.parents else []
        live.histories[call_id] = prompt = self._prompts.make(live.spec, call, history)
        number = next(self._numbers)
        request_id = f"{index}-{call_id}"
        row, extra = None, None
        if self._stepper.tells_programs:
            identity = CallIdentity(_id(index), ThreadId(_id(index)), CallId(f"c{number}"))
            row, attained = self._table.arrive(identity, EngineId("engine"), clock.now_s)
            extra = encode_call(identity, attained)
        self._stepper.send(SentCall(request_id, prompt, call.output_tokens, live.place, number), extra)
        self._in_flight[request_id] = index, call_id, row

    def _end_call(self, output: Any) -> None:
        index, call_id, row = self._in_flight.pop(output.request_id)
        live, clock = self._live[index], self._stepper.clock
        live.histories[call_id] = live.histories[call_id] + list(output.outputs[0].token_ids)
        if row is not None:
            account = decode_account(output.kv_transfer_params, 0, 0, 0)
            if account is None:
                raise AssertionError("Weft's scheduler attaches an account to every output")
            row.account = account
            self.swapped_tokens += account.swapped_tokens
            self._table.leave(row, clock.now_s)
        live.left -= 1
        if not live.left:
            self._close(index)
        for child in live.children.get(call_id, ()):
            live.missing[child] -= 1
            if not live.missing[child]:
                self._follow(index, live.calls[child], clock.now_s)

    def _close(self, index: int) -> None:
        live, clock = self._live.pop(index), self._stepper.clock
        self._table.close(_id(index), ProgramState.FINISHED, clock.now_s)
        self.outcomes.append(
            Outcome(
                program=live.spec.program,
                kind=live.spec.name,
                steps=clock.steps - live.arrived_steps,
                seconds=clock.seconds - live.arrived_s,
                tokens=sum(call.output_tokens for call in live.spec.calls),
                path_tokens=path_tokens(live.spec.calls),
                unloaded_steps=self._unloaded_steps[live.spec.program],
            )
        )


def _id(index: int) -> ProgramId:
    return ProgramId(f"p{index}")
