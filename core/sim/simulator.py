"""A discrete-event simulation of engines that serve programs. The same policies and balancers as the real ones."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple, cast

from weft.core.errors import SimulationError
from weft.core.ids import EngineId, ProgramId, SessionId
from weft.core.policies import registration
from weft.core.process_table import Account
from weft.core.routing.balancer import Arrival, EngineLoad
from weft.core.sim.calls import SimCall, SimProgram
from weft.core.sim.records import Batch, Counts, Execution
from weft.core.sim.replica import Replica
from weft.core.sim.settings import SimSettings
from weft.core.trace.format import TraceProgram

# What goes first at one instant: calls end, then new ones arrive, then batches are formed.
_END, _ARRIVE, _SCHEDULE = range(3)
_REPORT_EVERY: Final = 64  # programs that end


def percentile(values: Iterable[float], percent: float) -> float:
    """The value that so many percent of at least one do not exceed, interpolated."""
    ranked = sorted(values)
    place = (len(ranked) - 1) * percent / 100
    low = ranked[math.floor(place)]
    return low + (ranked[math.ceil(place)] - low) * (place % 1)


class ProgramResult(NamedTuple):
    """How it went for a program, in seconds (in units of time with `unit_steps`)."""

    arrival: float
    finish: float
    wait: float  # in queues, summed over its calls
    service: float  # in batches, summed over its calls
    calls: int

    @property
    def latency(self) -> float:
        return self.finish - self.arrival


@dataclass(frozen=True, slots=True)
class SimResult:
    """How it went."""

    policy: str
    programs: dict[str, ProgramResult]  # in the order of the trace
    counts: Counts
    runs: tuple[Execution, ...] = field(default=(), repr=False)  # who ran when; only if asked for
    batches: tuple[Batch, ...] = field(default=(), repr=False)  # what was in the steps; only if asked for

    @property
    def makespan(self) -> float:
        """From the first arrival to the last end."""
        rows = self.programs.values()
        return max(row.finish for row in rows) - min(row.arrival for row in rows)

    @property
    def total_wait(self) -> float:
        return sum(row.wait for row in self.programs.values())

    @property
    def mean_latency(self) -> float:
        """Of programs, from arrival to end: the average job completion time."""
        return sum(row.latency for row in self.programs.values()) / len(self.programs)

    def latency(self, percent: float) -> float:
        """The latency that so many percent of the programs do not exceed, interpolated."""
        return percentile([row.latency for row in self.programs.values()], percent)

    @property
    def prefix_hit_rate(self) -> float:
        """Of the prompt tokens, the part found in the prefix cache when a call first started; 0 without prompts."""
        return self.counts.prefix_hits / self.counts.prompt if self.counts.prompt else 0.0

    def to_dict(self) -> dict[str, object]:
        """For JSON."""
        return {
            "policy": self.policy,
            "makespan": self.makespan,
            "total_wait": self.total_wait,
            "mean_latency": self.mean_latency,
            "p95_latency": self.latency(95),
            "p99_latency": self.latency(99),
            "prefix_hit_rate": self.prefix_hit_rate,
            "recomputed_tokens": self.counts.recomputed,
            "swapped_tokens": self.counts.swapped,
            "preemptions": self.counts.preemptions,
            "programs": {name: row._asdict() for name, row in self.programs.items()},
        }


def simulate(
    programs: Sequence[TraceProgram],
    settings: SimSettings | None = None,
    *,
    progress: Callable[[int], object] | None = None,
    runs: bool = False,
    batches: bool = False,
    jump: bool = True,
) -> SimResult:
    """Serve programs to their end. Nothing is random: the same programs and settings give the same result.

    Args:
        programs: at least one, their ids unique.
        settings: the engines. Default: one, of made-up speed, under ATLAS.
        progress: told now and then how many programs have ended.
        runs: note who ran when (`SimResult.runs`).
        batches: note what was in the steps (`SimResult.batches`).
        jump: False plays every step one by one, which takes long and changes nothing (for tests).

    Raises:
        SimulationError: no programs, two of one id, or a call that no KV cache of that size can hold.
    """
    simulation = _Simulation(programs, settings or SimSettings(), progress, runs=runs, batches=batches, jump=jump)
    simulation.run()
    return simulation.result()


class _Simulation:
    def __init__(
        self,
        programs: Sequence[TraceProgram],
        settings: SimSettings,
        progress: Callable[[int], object] | None,
        *,
        runs: bool,
        batches: bool,
        jump: bool,
    ) -> None:
        _check(programs, settings)
        self._settings = settings
        self._progress = progress
        self._counts = Counts()
        self._runs: list[Execution] = []
        self._batches: list[Batch] = []
        record, note = self._runs.append if runs else None, self._batches.append if batches else None
        numbers = range(settings.replicas)
        self._replicas = [
            Replica(n, settings.policy.make(), settings, self._counts, record=record, note=note, jump=jump)
            for n in numbers
        ]
        self._balancer = settings.balancer.make()
        self._engine_ids = [EngineId(f"engine-{number}") for number in numbers]
        self._loads = [EngineLoad(engine_id, 0) for engine_id in self._engine_ids]
        self._number_of = {engine_id: number for number, engine_id in enumerate(self._engine_ids)}
        self._to_schedule: set[int] = set()  # replicas with such an event in the queue
        self._jump_of: list[int] = [-1] * settings.replicas  # the event at which the jump under way ends
        self._opened = self._ended = 0
        self._foresees = registration(settings.policy.name).simulation_only
        self._programs = [SimProgram(program, number) for number, program in enumerate(programs)]
        # What a program has cost beside what policies read of it.
        self._waits = [0.0] * len(programs)
        self._services = [0.0] * len(programs)
        self._sequence = itertools.count()
        # When, of which kind, the engine's number (so that jumping changes no order) or 0, a running number, whose.
        self._events: list[tuple[float, int, int, int, Replica | SimProgram | tuple[SimProgram, int]]] = [
            (program.spec.arrival_s, _ARRIVE, 0, next(self._sequence), program) for program in self._programs
        ]
        heapq.heapify(self._events)

    def run(self) -> None:
        events = self._events
        while events:
            now_s, kind, _, sequence, what = heapq.heappop(events)
            if kind == _ARRIVE:
                if isinstance(what, SimProgram):
                    self._open(what, now_s)
                else:
                    self._arrive(*cast("tuple[SimProgram, int]", what), now_s)
                continue
            replica = cast("Replica", what)
            if kind == _SCHEDULE:
                self._to_schedule.discard(replica.number)
                self._schedule(replica, now_s)
            elif self._jump_of[replica.number] == sequence:  # else the jump was cut short
                self._to_schedule.add(replica.number)  # once, after all of them
                for call in replica.end_jump(now_s):
                    self._end(call, replica, now_s)
                if events and events[0][0] <= now_s:
                    heapq.heappush(events, (now_s, _SCHEDULE, replica.number, next(self._sequence), replica))
                else:
                    self._to_schedule.discard(replica.number)
                    self._schedule(replica, now_s)

    def _open(self, program: SimProgram, now_s: float) -> None:
        program.open(now_s, self._opened)
        self._opened += 1
        if self._foresees:
            timing = self._settings.timing
            program.foresee(timing.prefill_token_s / (timing.fixed_s + timing.decode_token_s))
        for index, missing in enumerate(list(program.missing)):
            if not missing:
                self._follow(program, index, now_s)

    def _follow(self, program: SimProgram, index: int, now_s: float) -> None:
        """All that a call waited for has ended; it arrives after its gap."""
        gap_s = program.spec.calls[index].gap_s
        if gap_s:
            heapq.heappush(self._events, (now_s + gap_s, _ARRIVE, 0, next(self._sequence), (program, index)))
        else:
            self._arrive(program, index, now_s)

    def _arrive(self, program: SimProgram, index: int, now_s: float) -> None:
        spec, view = program.spec.calls[index], program.view
        view.calls += 1
        call = SimCall(
            spec.call_id,
            view,
            prompt_tokens=spec.prompt_tokens,
            predicted_path_tokens=program.paths[index] if program.paths else math.nan,
            spec=spec,
            owner=program,
            index=index,
            inherited=replace(view.attained),
        )
        replica = self._replicas[self._choose(program, spec.prompt_tokens)]
        if replica.arrive(call, now_s):
            self._note_jump(replica)
        elif replica.jump is None and replica.number not in self._to_schedule:
            self._to_schedule.add(replica.number)
            heapq.heappush(self._events, (now_s, _SCHEDULE, replica.number, next(self._sequence), replica))

    def _choose(self, program: SimProgram, prompt_tokens: int) -> int:
        if len(self._replicas) == 1:
            return 0
        name = program.spec.program
        arrival = Arrival(ProgramId(name), SessionId(name), prompt_tokens)
        number = self._number_of[self._balancer.choose(arrival, self._loads)]
        self._loads[number] = EngineLoad(self._engine_ids[number], self._loads[number].calls + 1)
        return number

    def _end(self, call: SimCall, replica: Replica, now_s: float) -> None:
        program, number = call.owner, replica.number
        program.view.attained.fold(call.inherited, Account(call.ran_s, call.queued_s))
        replica.policy.program_changed(program.view)
        self._waits[program.number] += call.queued_s
        self._services[program.number] += call.ran_s
        self._loads[number] = EngineLoad(self._engine_ids[number], self._loads[number].calls - 1)
        program.left -= 1
        for child in program.children[call.index]:
            program.missing[child] -= 1
            if not program.missing[child]:
                self._follow(program, child, now_s)
        if not program.left:
            program.close(now_s)
            for each in self._replicas:
                each.policy.program_ended(program.view)
            self._balancer.end_program(ProgramId(program.spec.program))
            self._balancer.end_session(SessionId(program.spec.program))
            self._ended += 1
            if self._progress is not None and self._ended % _REPORT_EVERY == 0:
                self._progress(self._ended)

    def _schedule(self, replica: Replica, now_s: float) -> None:
        if replica.schedule(now_s) is not None:
            self._note_jump(replica)

    def _note_jump(self, replica: Replica) -> None:
        jump = replica.jump
        if jump is not None:
            sequence = self._jump_of[replica.number] = next(self._sequence)
            end_s = jump.began_s + jump.lasts_s(jump.steps)
            heapq.heappush(self._events, (end_s, _END, replica.number, sequence, replica))

    def result(self) -> SimResult:
        for replica in self._replicas:
            replica.check_integrity()
        rows = {
            program.spec.program: ProgramResult(
                program.spec.arrival_s,
                program.finish_s,
                self._waits[program.number],
                self._services[program.number],
                len(program.spec.calls),
            )
            for program in self._programs
        }
        return SimResult(self._settings.policy.name, rows, self._counts, tuple(self._runs), tuple(self._batches))


def _check(programs: Sequence[TraceProgram], settings: SimSettings) -> None:
    if not programs:
        raise SimulationError("there is no program to simulate; give at least one.")
    if len({program.program for program in programs}) < len(programs):
        raise SimulationError("two programs have the same id; give each its own.")
    for program in programs:
        for call in program.calls:
            tokens = call.prompt_tokens + call.output_tokens
            if tokens > settings.kv_capacity:
                raise SimulationError(
                    f"call {call.call_id!r} of program {program.program!r} has {tokens} tokens, and the KV cache of a "
                    f"replica holds {settings.kv_tokens}; give the replicas more (kv_tokens)."
                )
