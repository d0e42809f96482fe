"""An engine without a KV cache that plays every step. Tests compare the simulator, which jumps over steps, with it."""

from __future__ import annotations

import heapq
import itertools
from dataclasses import dataclass, replace

from weft.core.accounts import Attained
from weft.core.policies import Call, Policy, ProgramView, StepCosts
from weft.core.policies.steps import FIT_STEPS
from weft.core.policies.view import ProgramChanged, ProgramEnded
from weft.core.sim import ProgramResult, SimSettings, TraceCall, TraceProgram


@dataclass(eq=False)
class _Entry:
    """A call in progress. Tokens are counted as in `SimCall`."""

    spec: TraceCall
    program: str
    call: Call
    inherited: Attained
    queued_since_s: float
    prefill_left: int = 0
    generated: int = 0
    computed: int = 0
    generated_at_start: int = -1  # when it last entered the batch
    stalled: bool = False  # it runs without tokens
    starts: int = 0  # times that it has entered the batch
    wait_s: float = 0.0
    service_s: float = 0.0


class _TokenRoom:
    """Whether a step has tokens for the calls that would start, added up for each from the start."""

    def __init__(self, engine: NaiveEngine) -> None:
        self.engine = engine
        self.batch = list(engine.batch)
        self.started: list[_Entry] = []

    def offer(self, call: Call) -> bool:
        self.offered = self.engine.entries[call]
        decoding = sum(entry.prefill_left == 0 for entry in self.batch)
        prompts = sum(entry.prefill_left for entry in self.batch if entry.call.rank < call.rank)
        return self.engine.settings.chunk_tokens - decoding - prompts - sum(map(self.needed, self.started)) > 0

    def needed(self, entry: _Entry) -> int:
        return 0 if self.engine.settings.unit_steps else max(1, entry.spec.prompt_tokens + entry.generated)

    def fits(self) -> bool:
        return True

    def start(self) -> None:
        self.started.append(self.offered)

    def preempt(self, call: Call) -> None:
        self.batch.remove(self.engine.entries[call])

    def keep(self, call: Call) -> None:
        self.batch.append(self.engine.entries[call])


class NaiveEngine:
    """Serves programs on one engine until all have ended.

    Attributes:
        results: The result of each program.
        steps: The start of each step in seconds, and the names of its calls.
        preemptions: The number of preemptions.
    """

    def __init__(self, programs: list[TraceProgram], settings: SimSettings, policy: Policy) -> None:
        self.settings, self.policy = settings, policy
        self.token_s, self.decide_every = settings.policy.token_s, settings.policy.decide_every
        self.now = 0.0
        self.steps: list[tuple[float, tuple[str, ...]]] = []
        self.preemptions = 0
        self.slots = 1
        self.programs = {program.program: program for program in programs}
        self.views = {
            name: ProgramView(name, each.name or "", fingerprint=each.fingerprint)
            for name, each in self.programs.items()
        }
        self.arrived = itertools.count()
        self.ended: dict[str, set[str]] = {name: set() for name in self.programs}
        self.wait_s, self.service_s = dict.fromkeys(self.programs, 0.0), dict.fromkeys(self.programs, 0.0)
        self.results: dict[str, ProgramResult] = {}
        self.sequence = itertools.count()
        self.arrivals: list[tuple[float, int, str, TraceCall | None]] = []
        for program in programs:
            heapq.heappush(self.arrivals, (program.arrival_s, next(self.sequence), program.program, None))
        self.entries: dict[Call, _Entry] = {}
        self.batch: list[_Entry] = []
        while self.arrivals or self.batch or len(policy.waiting):
            if not self.batch and not len(policy.waiting):
                self.now = max(self.now, self.arrivals[0][0])
            self._deliver(self.now, inclusive=True)
            if self.batch or len(policy.waiting):
                self._step()

    def _deliver(self, until_s: float, *, inclusive: bool) -> None:
        """Let the programs and calls arrive whose time is before `until_s`, or, with `inclusive`, equal to it."""
        while self.arrivals and (self.arrivals[0][0] < until_s or (inclusive and self.arrivals[0][0] == until_s)):
            at_s, _, name, spec = heapq.heappop(self.arrivals)
            if spec is not None:
                self._arrive(name, spec, at_s)
                continue
            view = self.views[name]
            view.arrival_s, view.arrival_order = at_s, next(self.arrived)
            for first in self.programs[name].calls:
                if not first.parents:
                    self._start_gap(name, first, at_s)

    def _start_gap(self, name: str, spec: TraceCall, now_s: float) -> None:
        if spec.gap_s:
            heapq.heappush(self.arrivals, (now_s + spec.gap_s, next(self.sequence), name, spec))
        else:
            self._arrive(name, spec, now_s)

    def _arrive(self, name: str, spec: TraceCall, now_s: float) -> None:
        view = self.views[name]
        view.calls += 1
        self.policy.on_event(ProgramChanged(view))
        call = Call(f"{name}/{spec.call_id}", view, spec.prompt_tokens)
        self.entries[call] = _Entry(spec, name, call, replace(view.attained), now_s)
        self.policy.arrive(call, now_s)

    def _is_resuming(self, entry: _Entry) -> bool:
        return not self.settings.unit_steps and entry.starts > 1 and entry.generated <= entry.generated_at_start

    def _form_batch(self) -> dict[_Entry, int]:
        """Preempt and admit calls, and return the tokens to compute for each call of the batch."""
        self.admitted: list[_Entry] = []
        if len(self.steps) % self.decide_every == 0:
            self.policy.decide(self.now)
            running = [entry.call for entry in self.batch if not self._is_resuming(entry)]
            free_slots = self.settings.batch_size - len(self.batch)
            for call in self.policy.victims(running, free_slots, room=_TokenRoom(self)):
                victim = self.entries[call]
                self.batch.remove(victim)
                self._set_stalled(victim, stalled=False)
                victim.queued_since_s = self.now
                self.policy.preempt(call, self.now)
                self.preemptions += 1
        tokens = {entry: 1 for entry in self.batch if entry.prefill_left == 0}
        budget = self.settings.chunk_tokens - len(tokens)
        prompts = sorted((entry for entry in self.batch if entry.prefill_left), key=lambda entry: entry.call.rank)
        while True:
            first = None
            if budget > 0 and len(self.batch) < self.settings.batch_size and len(self.policy.waiting):
                first = self.policy.waiting.peek()
            if prompts and (first is None or not self.policy.preempts or prompts[0].call.rank < first.rank):
                entry = prompts.pop(0)
                tokens[entry] = min(entry.prefill_left, budget)
                budget -= tokens[entry]
                self._set_stalled(entry, stalled=tokens[entry] == 0)
                continue
            if first is None:
                return tokens
            entry = self.entries[first]
            self.policy.start(entry.call, self.now)
            entry.wait_s += self.now - entry.queued_since_s
            entry.starts += 1
            entry.generated_at_start = entry.generated
            entry.prefill_left = 0 if self.settings.unit_steps else max(1, entry.spec.prompt_tokens + entry.generated)
            tokens[entry] = min(entry.prefill_left, budget) if entry.prefill_left else 1
            budget -= tokens[entry] if entry.prefill_left else 0
            self.admitted.append(entry)
            self.batch.append(entry)

    def _set_stalled(self, entry: _Entry, *, stalled: bool) -> None:
        """A running call gets no tokens in this step, or gets some again; its time without tokens is wait."""
        if stalled and not entry.stalled:
            entry.queued_since_s = self.now
            self.policy.stall(entry.call, self.now)
        elif entry.stalled and not stalled:
            entry.wait_s += self.now - entry.queued_since_s
            self.policy.go_on(entry.call, self.now)
        entry.stalled = stalled

    def _step(self) -> None:
        tokens = self._form_batch()
        # vLLM sorts its batch before it admits calls.
        stayed = [entry for entry in self.batch if entry not in self.admitted]
        in_order = sorted(stayed, key=lambda entry: entry.call.rank) + self.admitted
        decoding = [entry for entry in self.batch if entry.prefill_left == 0]
        served = [entry for entry in self.batch if tokens[entry]]
        context = sum(entry.spec.prompt_tokens + entry.generated - entry.prefill_left for entry in served)
        prefill = sum(tokens[entry] for entry in self.batch if entry.prefill_left)
        step_s = self.settings.timing.step_s(len(decoding), prefill, context)
        self.steps.append((self.now, tuple(sorted(entry.call.key for entry in self.batch))))
        self.slots = max(self.slots, len(decoding))
        if len(self.steps) % FIT_STEPS == 0:
            timing = self.settings.timing
            costs = StepCosts(timing.fixed_s, timing.decode_token_s, timing.prefill_token_s, self.slots)
            self.policy.on_event(costs)
        self._deliver(self.now + step_s, inclusive=False)
        self.now += step_s
        for entry in in_order:
            if tokens[entry]:
                self._charge(entry, tokens[entry], step_s)
        ended = [entry for entry in in_order if entry.generated == entry.spec.output_tokens]
        for entry in ended:
            self._end(entry)
        for entry in ended:
            self._start_children(entry)

    def _charge(self, entry: _Entry, tokens: int, step_s: float) -> None:
        resuming = self._is_resuming(entry)
        if entry.prefill_left:
            entry.prefill_left -= tokens
            computed = max(0, entry.spec.prompt_tokens + entry.generated - entry.prefill_left)
            new = max(0, min(tokens, computed - entry.computed))
            entry.computed = max(entry.computed, computed)
            prompt = entry.spec.prompt_tokens
            entry.call.computed_tokens += max(0, min(computed, prompt) - min(computed - new, prompt))
        else:
            new = 1
            entry.computed += 1
            entry.call.output_tokens = entry.generated + 1
        entry.generated += entry.prefill_left == 0
        charge_s = step_s if self.token_s is None else new * self.token_s
        entry.service_s += charge_s
        self.policy.charge(entry.call, charge_s, self.now, recomputed=resuming)
        entry.call.output_tokens = entry.generated

    def _end(self, entry: _Entry) -> None:
        name = entry.program
        self.batch.remove(entry)
        self.policy.leave(entry.call)
        self.views[name].attained.fold(entry.inherited, entry.service_s, entry.wait_s)
        self.policy.on_event(ProgramChanged(self.views[name]))
        self.wait_s[name] += entry.wait_s
        self.service_s[name] += entry.service_s

    def _start_children(self, entry: _Entry) -> None:
        name = entry.program
        ended, program = self.ended[name], self.programs[name]
        ended.add(entry.spec.call_id)
        for child in program.calls:
            if entry.spec.call_id in child.parents and ended.issuperset(child.parents):
                self._start_gap(name, child, self.now)
        if len(ended) == len(program.calls):
            arrival_s, count = program.arrival_s, len(program.calls)
            self.policy.on_event(ProgramEnded(self.views[name]))
            self.results[name] = ProgramResult(arrival_s, self.now, self.wait_s[name], self.service_s[name], count)
