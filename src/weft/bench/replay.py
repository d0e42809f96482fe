"""Serves the programs of a trace on one baseline's engine, open-loop: arrivals do not wait for the engine."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from weft.bench.load import Prompts
from weft.bench.results.records import Outcome
from weft.core.accounts import Account
from weft.core.ids import CallId, EngineId, ProgramId, SessionId, ThreadId
from weft.core.process_rows import CallIdentity, CallRow, ProgramInfo, ProgramState
from weft.core.process_table import ProcessTable
from weft.core.trace.format import TraceCall, TraceProgram, path_tokens
from weft.engine.wire.call_header import CallHeader, encode_call
from weft.engine.wire.reports import read_report

if TYPE_CHECKING:
    from weft.bench.stepper import Stepper


class EngineCall(NamedTuple):
    request_id: str
    prompt: list[int]
    output_tokens: int
    arrival_rank: int  # the position of the call's program in the order of arrival, from 0
    number: int  # increases with every call; vLLM breaks ties by it, as by a time of arrival


@dataclass
class _ActiveProgram:
    """A program between its arrival and its end."""

    spec: TraceProgram
    arrival_rank: int  # the position in the order of arrival, from 0
    arrived_steps: int
    arrived_s: float
    calls: dict[str, TraceCall] = field(default_factory=dict)
    histories: dict[str, list[int]] = field(default_factory=dict)  # by call: its prompt and, after its end, its output
    missing_parents: dict[str, int] = field(default_factory=dict)  # by call: the parents that have not ended
    children: dict[str, list[str]] = field(default_factory=dict)
    calls_left: int = 0


class Replay:
    """The replay of all programs of a round on one engine, from the first arrival to the last end.

    Args:
        engine: an idle engine whose clock is at 0.
        programs: programs that fit the engine; times are seconds of its clock.
        unloaded_steps: the steps that each program takes when it is alone, by the program's id.
    """

    def __init__(
        self, engine: Stepper, programs: Sequence[TraceProgram], unloaded_steps: Mapping[str, int], prompts: Prompts
    ) -> None:
        self._engine = engine
        self._programs = programs
        self._unloaded_steps = unloaded_steps
        self._prompts = prompts
        self._table = ProcessTable()
        self._numbers = itertools.count()
        # Heap of: due time, tie breaker, program's index, call to send (None: the program arrives).
        self._due: list[tuple[float, int, int, str | None]] = []
        self._active: dict[int, _ActiveProgram] = {}
        self._in_flight: dict[str, tuple[int, str, CallRow | None]] = {}  # by request: program's index, call, row
        self._arrival_ranks = itertools.count()
        self.outcomes: list[Outcome] = []
        self.swapped_tokens = 0

    def steps(self) -> Iterator[int]:
        """Serve all programs. Yields after every engine step, with the number of programs that have ended."""
        clock = self._engine.clock
        for index, program in enumerate(self._programs):
            self._schedule(program.arrival_s, index, None)
        while self._due or self._in_flight:
            self._engine.activate()
            until_s = clock.now_s
            if not self._in_flight:
                until_s = max(until_s, self._due[0][0])
                clock.skip_to(until_s)
            while self._due and self._due[0][0] <= until_s:
                _, _, index, call_id = heapq.heappop(self._due)
                if call_id is None:
                    self._start_program(index)
                else:
                    self._send(index, call_id)
            if self._in_flight:
                for output in self._engine.step():
                    self._end_call(output)
            yield len(self.outcomes)

    def _schedule(self, due_s: float, index: int, call_id: str | None) -> None:
        heapq.heappush(self._due, (due_s, next(self._numbers), index, call_id))

    def _start_program(self, index: int) -> None:
        spec, clock = self._programs[index], self._engine.clock
        # On a clock of seconds, a program may arrive during a step, after which it is started.
        arrived_s = clock.seconds if clock.counts_steps else spec.arrival_s
        program = _ActiveProgram(spec, next(self._arrival_ranks), clock.steps, arrived_s, calls_left=len(spec.calls))
        self._active[index] = program
        program.calls = {call.call_id: call for call in spec.calls}
        program.missing_parents = {call.call_id: len(call.parents) for call in spec.calls}
        for call in spec.calls:
            for parent in call.parents:
                program.children.setdefault(parent, []).append(call.call_id)
        self._table.open(
            ProgramInfo(_program_id(index), SessionId(_program_id(index)), spec.name or spec.program), clock.now_s
        )
        for call in spec.calls:
            if not call.parents:
                self._send_after_gap(index, call, spec.arrival_s)

    def _send_after_gap(self, index: int, call: TraceCall, ready_s: float) -> None:
        """Send a call, once its gap after `ready_s`, when its last parent ended, is over."""
        if call.gap_s:
            self._schedule(ready_s + call.gap_s, index, call.call_id)
        else:
            self._send(index, call.call_id)

    def _send(self, index: int, call_id: str) -> None:
        program, clock = self._active[index], self._engine.clock
        call = program.calls[call_id]
        history = program.histories[call.parents[0]] if call.parents else []
        program.histories[call_id] = prompt = self._prompts.make(program.spec, call, history)
        number = next(self._numbers)
        request_id = f"{index}-{call_id}"
        row, extra_args = None, None
        if self._engine.is_program_aware:
            identity = CallIdentity(_program_id(index), ThreadId(_program_id(index)), CallId(f"c{number}"))
            row, attained = self._table.arrive(identity, EngineId("engine"), clock.now_s)
            row_of_program = self._table.get(identity.program_id)
            header = CallHeader(
                identity,
                attained,
                program_name=program.spec.name or "",
                fingerprint=program.spec.fingerprint,
                tenant=program.spec.tenant,
                program_calls=row_of_program.calls if row_of_program is not None else 0,
                tool_started=next((program.calls[each].tool for each in program.children.get(call_id, ())), None) or "",
            )
            extra_args = encode_call(header)
        self._engine.send(EngineCall(request_id, prompt, call.output_tokens, program.arrival_rank, number), extra_args)
        self._in_flight[request_id] = index, call_id, row

    def _end_call(self, output: Any) -> None:
        index, call_id, row = self._in_flight.pop(output.request_id)
        program, clock = self._active[index], self._engine.clock
        program.histories[call_id] = program.histories[call_id] + list(output.outputs[0].token_ids)
        if row is not None:
            found = read_report(output.kv_transfer_params).account
            if found is None:
                raise AssertionError("Weft's scheduler attaches an account to the last output")
            account = row.account = Account(**found)
            self.swapped_tokens += account.swapped_tokens
            self._table.leave(row, clock.now_s)
        program.calls_left -= 1
        if not program.calls_left:
            self._end_program(index)
        children = program.children.get(call_id, ())
        for child in children:
            program.missing_parents[child] -= 1
            if not program.missing_parents[child]:
                self._send_after_gap(index, program.calls[child], clock.now_s)

    def _end_program(self, index: int) -> None:
        program, clock = self._active.pop(index), self._engine.clock
        self._table.close(_program_id(index), ProgramState.FINISHED, clock.now_s)
        if self._engine.is_program_aware:
            self._engine.end_program(_program_id(index))
        self.outcomes.append(
            Outcome(
                program=program.spec.program,
                kind=program.spec.name,
                steps=clock.steps - program.arrived_steps,
                seconds=clock.seconds - program.arrived_s,
                tokens=sum(call.output_tokens for call in program.spec.calls),
                path_tokens=path_tokens(program.spec.calls),
                unloaded_steps=self._unloaded_steps[program.spec.program],
                tenant=program.spec.tenant,
            )
        )


def _program_id(index: int) -> ProgramId:
    return ProgramId(f"p{index}")
