"""The discrete-event simulation of engines that serve programs, with the policies and balancers of the real engines."""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Final, NamedTuple, TypeAlias, cast

from weft.core.errors import SimulationError
from weft.core.ids import EngineId, ProgramId, SessionId
from weft.core.policies import ProgramChanged, registration
from weft.core.policies.fair_shares.fair import EPOCH_S
from weft.core.policies.fair_shares.stride import OverEngines
from weft.core.prediction.times import IdleTimes
from weft.core.routing.balancer import Arrival, Loads
from weft.core.routing.stealing import EngineQueue, Stealing
from weft.core.sim.kv_cache.blocks import block_ends, share_full_blocks
from weft.core.sim.replica import SimReplica
from weft.core.sim.result import Batch, Counts, Execution, ProgramResult, SimResult
from weft.core.sim.settings import SimSettings
from weft.core.sim.sim_programs import SimCall, SimProgram
from weft.core.trace.format import TraceProgram

# The order of events at one time: calls end, programs and calls arrive, idle programs count as ended, waiting calls
# move, batches are formed.
_END, _ARRIVE, _ABANDON, _LOOK, _SCHEDULE = range(5)
_REPORT_EVERY: Final = 64  # programs that end between two reports of progress

# The subject of an event: a replica, a program that arrives, a call that arrives, by its program and its index there,
# or a program that may still be idle, with the number of its pauses. None: look at the queues.
_Subject: TypeAlias = SimReplica | SimProgram | tuple[SimProgram, int] | None


class _Event(NamedTuple):
    """Events are compared by the first four fields, so subjects are never compared."""

    time_s: float
    kind: int
    replica: int  # its number, so that jumps do not change the order of the replicas; 0 for an arrival
    sequence: int
    subject: _Subject


def simulate(
    programs: Sequence[TraceProgram],
    settings: SimSettings | None = None,
    *,
    names: Mapping[str, str] | None = None,
    progress: Callable[[int], object] | None = None,
    runs: bool = False,
    batches: bool = False,
    jump: bool = True,
) -> SimResult:
    """Serve programs until all have ended. Nothing is random: the same arguments give the same result.

    Args:
        programs: At least one program. Their ids must be unique.
        settings: The settings. Default: one engine with the default policy and made-up step times.
        names: The names that policies see, by program id. Without one, policies see the program's own name. The names
            do not change which programs share a prompt.
        progress: Called from time to time with the number of programs that have ended.
        runs: Whether to record each call's executions, in `SimResult.runs`.
        batches: Whether to record the batches, in `SimResult.batches`.
        jump: False plays every step. This takes long and changes nothing (for tests).

    Raises:
        SimulationError: There are no programs, two have the same id, or a call is larger than the KV cache.
    """
    simulation = _Simulation(
        programs, settings or SimSettings(), progress, names or {}, runs=runs, batches=batches, jump=jump
    )
    simulation.run()
    return simulation.result()


class _Simulation:
    def __init__(
        self,
        programs: Sequence[TraceProgram],
        settings: SimSettings,
        progress: Callable[[int], object] | None,
        names: Mapping[str, str],
        *,
        runs: bool,
        batches: bool,
        jump: bool,
    ) -> None:
        _check(programs, settings)
        self._settings = settings
        self._progress = progress
        self._counts = Counts()
        self._executions: list[Execution] = []
        self._batches: list[Batch] = []
        numbers = range(settings.replicas)
        self._replicas = [
            SimReplica(
                number,
                settings.policy.make(),
                settings,
                self._counts,
                on_execution=self._executions.append if runs else None,
                on_batch=self._batches.append if batches else None,
                jump=jump,
            )
            for number in numbers
        ]
        self._balancer = settings.balancer.make()
        self._engine_ids = [EngineId(f"engine-{number}") for number in numbers]
        self._loads = Loads(settings.batch_size)
        tiers = settings.evicts_by if settings.host_kv_tokens else None
        self._loads.moves_kv = settings.moves_kv and tiers is not None and not tiers.follows_use
        self._number_of = {engine_id: number for number, engine_id in enumerate(self._engine_ids)}
        for engine_id, number in self._number_of.items():
            self._loads.open(engine_id, number)
        self._shares = OverEngines()
        self._shares.keep(self._engine_ids)
        self._next_exchange_s = [0.0 if settings.replicas > 1 else math.inf] * settings.replicas
        self._stealing = Stealing(settings.stealing) if settings.stealing is not None else None
        self._look_is_planned = False  # whether there is a _LOOK event
        self._to_schedule: set[int] = set()  # the replicas that have a _SCHEDULE event
        self._end_event_of: list[int] = [-1] * settings.replicas  # sequence of the event that ends the present jump
        self._idle_times = IdleTimes()  # of programs whose end nobody tells
        self._predicts = registration(settings.policy.name).simulation_only
        self._programs = [
            SimProgram(share_full_blocks(program, settings.block_tokens), number, names.get(program.program), ends)
            for number, (program, ends) in enumerate(zip(programs, block_ends(programs), strict=True))
        ]
        self._arrived = self._ended = 0  # numbers of programs
        # The account of each program, over all of its calls. Policies do not read it.
        self._waits_s = [0.0] * len(programs)
        self._services_s = [0.0] * len(programs)
        self._sequence = itertools.count()
        self._events: list[_Event] = []
        self._next = iter(self._programs) if settings.concurrency is not None else iter(())  # in a closed loop
        for program in itertools.islice(self._next, settings.concurrency):
            self._add_event(0.0, _ARRIVE, 0, program)
        for program in self._programs if settings.concurrency is None else ():
            self._add_event(program.spec.arrival_s, _ARRIVE, 0, program)

    def run(self) -> None:
        events = self._events
        while events:
            now_s, kind, _, sequence, subject = heapq.heappop(events)
            if kind == _ARRIVE:
                if isinstance(subject, SimProgram):
                    self._program_arrives(subject, now_s)
                else:
                    self._call_arrives(*cast("tuple[SimProgram, int]", subject), now_s)
                continue
            if kind == _LOOK:
                self._look_at_queues(now_s)
                continue
            if kind == _ABANDON:
                self._abandon(*cast("tuple[SimProgram, int]", subject), now_s)
                continue
            replica = cast("SimReplica", subject)
            if kind == _SCHEDULE:
                self._schedule(replica, now_s)
            elif self._end_event_of[replica.number] == sequence:  # otherwise an arrival has made the jump shorter
                self._jump_ends(replica, now_s)

    def result(self) -> SimResult:
        for replica in self._replicas:
            replica.check_integrity()
        rows = {
            program.spec.program: ProgramResult(
                program.start_s,
                program.finish_s,
                self._waits_s[program.number],
                self._services_s[program.number],
                len(program.spec.calls),
            )
            for program in self._programs
        }
        return SimResult(self._settings.policy.name, rows, self._counts, tuple(self._executions), tuple(self._batches))

    def _add_event(self, time_s: float, kind: int, replica: int, subject: _Subject) -> int:
        """Add an event and return its sequence number."""
        sequence = next(self._sequence)
        heapq.heappush(self._events, _Event(time_s, kind, replica, sequence, subject))
        return sequence

    # -- programs and calls

    def _program_arrives(self, program: SimProgram, now_s: float) -> None:
        program.open(now_s, self._arrived)
        self._arrived += 1
        if self._predicts:
            timing = self._settings.timing
            program.predict_work(timing.prefill_token_s / (timing.fixed_s + timing.decode_token_s))
        for index, parents in enumerate(list(program.unfinished_parents)):
            if not parents:
                self._start_gap(program, index, now_s)

    def _start_gap(self, program: SimProgram, index: int, now_s: float) -> None:
        """The parents of a call have ended. The call arrives after its gap."""
        gap_s = program.spec.calls[index].gap_s
        if gap_s:
            self._add_event(now_s + gap_s, _ARRIVE, 0, (program, index))
        else:
            self._call_arrives(program, index, now_s)

    def _call_arrives(self, program: SimProgram, index: int, now_s: float) -> None:
        spec, view = program.spec.calls[index], program.view
        if not program.spec.end_known:
            if program.pauses and not program.calls_in_flight:
                self._idle_times.note(view.name, now_s - program.idle_since_s)
            if not view.calls:
                view.arrival_s = now_s if program.abandoned else program.start_s
                program.idle_timeout_s = self._idle_times.timeout_s(view.name)
        view.calls += 1
        program.calls_in_flight += 1
        call = SimCall(
            spec.call_id,
            view,
            prompt_tokens=spec.prompt_tokens,
            predicted_path_tokens=program.path_work[index] if program.path_work else math.nan,
            predicted_own_tokens=spec.output_tokens + program.prefill_work(spec) if self._predicts else math.nan,
            spec=spec,
            owner=program,
            index=index,
            inherited=replace(view.attained),
            end_node=program.end_nodes[index] if program.end_nodes else None,
        )
        self._give(call, self._replicas[self._choose_replica(program, spec.prompt_tokens)], now_s)
        self._look_later(now_s)

    def _give(self, call: SimCall, replica: SimReplica, now_s: float) -> None:
        latest, call.owner.replica = call.owner.replica, replica.number
        if self._settings.moves_kv and latest is not None and latest != replica.number:
            call.elsewhere = self._replicas[latest].move_out(call, now_s)
        if replica.arrive(call, now_s):
            self._add_jump_end(replica)
        elif replica.jump is None and replica.number not in self._to_schedule:
            self._to_schedule.add(replica.number)
            self._add_event(now_s, _SCHEDULE, replica.number, replica)

    def _choose_replica(self, program: SimProgram, prompt_tokens: int) -> int:
        if len(self._replicas) == 1:
            return 0
        name = program.spec.program
        arrival = Arrival(ProgramId(name), SessionId(name), prompt_tokens)
        engine_id = self._balancer.choose(arrival, self._loads)
        self._loads.add(engine_id, is_choice=True)
        return self._number_of[engine_id]

    def _call_ends(self, call: SimCall, replica: SimReplica) -> None:
        program, number = call.owner, replica.number
        program.calls_in_flight -= 1
        program.view.attained.fold(call.inherited, call.total_service_s, call.total_wait_s)
        replica.policy.on_event(ProgramChanged(program.view))
        self._waits_s[program.number] += call.total_wait_s
        self._services_s[program.number] += call.total_service_s
        self._loads.add(self._engine_ids[number], -1)

    def _start_children(self, call: SimCall, now_s: float) -> None:
        program = call.owner
        program.unfinished_calls -= 1
        for child in program.children[call.index]:
            program.unfinished_parents[child] -= 1
            if not program.unfinished_parents[child]:
                self._start_gap(program, child, now_s)
        if not program.unfinished_calls:
            self._program_ends(program, now_s)
        elif not (program.spec.end_known or program.calls_in_flight):
            self._pause(program, now_s)

    def _program_ends(self, program: SimProgram, now_s: float) -> None:
        program.close(now_s)
        if program.spec.end_known:
            self._end(program, now_s)
        else:
            self._pause(program, now_s)
        self._ended += 1
        if self._progress is not None and self._ended % _REPORT_EVERY == 0:
            self._progress(self._ended)
        following = next(self._next, None)
        if following is not None:
            self._add_event(now_s, _ARRIVE, 0, following)

    def _pause(self, program: SimProgram, now_s: float) -> None:
        """A program whose end nobody tells has no call in flight. It is taken to have ended if that stays so."""
        program.pauses += 1
        program.idle_since_s = now_s
        self._add_event(now_s + program.idle_timeout_s, _ABANDON, 0, (program, program.pauses))

    def _abandon(self, program: SimProgram, pauses: int, now_s: float) -> None:
        if program.calls_in_flight or program.pauses != pauses:
            return
        self._end(program, now_s)
        program.abandon()

    def _end(self, program: SimProgram, now_s: float) -> None:
        """Tell all replicas that a program has ended."""
        for replica in self._replicas:
            if replica.end_program(program, now_s):
                self._add_jump_end(replica)
        self._balancer.end_program(ProgramId(program.spec.program))
        self._balancer.end_session(SessionId(program.spec.program))

    # -- stealing

    def _look_later(self, now_s: float) -> None:
        """If the loads are uneven, plan to look at the queues after a while."""
        if self._stealing is not None and not self._look_is_planned and self._stealing.is_uneven(self._loads):
            self._look_is_planned = True
            self._add_event(now_s + self._stealing.config.look_every_s, _LOOK, 0, None)

    def _look_at_queues(self, now_s: float) -> None:
        stealing = cast("Stealing", self._stealing)
        self._look_is_planned = False
        if not stealing.is_uneven(self._loads):
            return
        waiting = {engine_id: self._replicas[number].waiting_count for engine_id, number in self._number_of.items()}
        queues = [EngineQueue(load, waiting[load.engine_id]) for load in self._loads.all()]
        steal = stealing.decide(queues, now_s)
        if steal is not None:
            victim, thief = (self._replicas[self._number_of[each]] for each in (steal.victim, steal.thief))
            movable = [
                call
                for call in victim.not_begun()
                if stealing.may_move(call.program.program_id, now_s) and victim.cached_tokens(call) <= steal.most_cached
            ]
            for call in movable[: steal.most]:
                self._move(call, victim, thief, now_s)
                stealing.moved(call.program.program_id, steal.thief, now_s)
        self._look_later(now_s)

    def _move(self, call: SimCall, victim: SimReplica, thief: SimReplica, now_s: float) -> None:
        if victim.take_back(call, now_s):
            self._add_jump_end(victim)
        self._loads.add(self._engine_ids[victim.number], -1)
        self._loads.add(self._engine_ids[thief.number])
        self._counts.moved += 1
        self._give(call, thief, now_s)

    # -- replicas

    def _schedule(self, replica: SimReplica, now_s: float) -> None:
        self._to_schedule.discard(replica.number)
        if replica.policy.has_shares and now_s >= self._next_exchange_s[replica.number]:
            self._next_exchange_s[replica.number] = now_s + EPOCH_S
            engine_id = self._engine_ids[replica.number]
            self._shares.add(engine_id, replica.policy.exchange(self._shares.take(engine_id)))
        if replica.schedule(now_s) is not None:
            self._add_jump_end(replica)

    def _add_jump_end(self, replica: SimReplica) -> None:
        """Add the event that ends the replica's jump. An earlier such event is then ignored."""
        jump = replica.jump
        if jump is not None:
            self._end_event_of[replica.number] = self._add_event(jump.end_s, _END, replica.number, replica)

    def _jump_ends(self, replica: SimReplica, now_s: float) -> None:
        self._to_schedule.add(replica.number)  # so that the calls that arrive now are scheduled once, together
        ended = replica.end_jump(now_s)
        for call in ended:
            self._call_ends(call, replica)
        for call in ended:  # children inherit the service of all calls that end with the step
            self._start_children(call, now_s)
        if self._events and self._events[0].time_s <= now_s:  # more calls may arrive at this time
            self._add_event(now_s, _SCHEDULE, replica.number, replica)
        else:
            self._schedule(replica, now_s)


def _check(programs: Sequence[TraceProgram], settings: SimSettings) -> None:
    if not programs:
        raise SimulationError("there is no program to simulate; give at least one.")
    program_id, count = Counter(program.program for program in programs).most_common(1)[0]
    if count > 1:
        raise SimulationError(f"{count} programs have the id {program_id!r}; give each its own id.")
    for program in programs:
        for call in program.calls:
            tokens = call.prompt_tokens + call.output_tokens
            if tokens > settings.kv_capacity:
                raise SimulationError(
                    f"call {call.call_id!r} of program {program.program!r} has {tokens} tokens, and the KV cache of a "
                    f"replica holds {settings.kv_capacity}; raise kv_tokens, or import the trace with --max-context."
                )
