"""One engine, played step by step: what the simulator, which jumps, is compared with. No KV cache, no prefix cache."""

from __future__ import annotations

import heapq
import itertools
from dataclasses import dataclass, replace

from weft.core.policies import Call, Policy, ProgramView
from weft.core.process_table import Account, Attained
from weft.core.sim import ProgramResult, SimSettings, TraceCall, TraceProgram


@dataclass(eq=False)
class _Call:
    spec: TraceCall
    program: str
    call: Call
    inherited: Attained
    since_s: float
    prefill: int = 0  # tokens still to compute
    given: int = 0
    computed: int = 0
    given_at_start: int = -1
    started: int = 0
    wait_s: float = 0.0
    service_s: float = 0.0


class NaiveEngine:
    """Serves programs on one engine and keeps the results in `results`, and who ran in each step in `steps`."""

    def __init__(self, programs: list[TraceProgram], settings: SimSettings, policy: Policy) -> None:
        self.settings, self.policy = settings, policy
        self.token_s, self.decide_every = settings.policy.token_s, settings.policy.decide_every
        self.now = 0.0
        self.steps: list[tuple[float, tuple[str, ...]]] = []
        self.preemptions = 0
        self.programs = {program.program: program for program in programs}
        self.views = {name: ProgramView(name) for name in self.programs}
        self.ended: dict[str, set[str]] = {name: set() for name in self.programs}
        self.wait_s, self.service_s = dict.fromkeys(self.programs, 0.0), dict.fromkeys(self.programs, 0.0)
        self.results: dict[str, ProgramResult] = {}
        self.sequence = itertools.count()
        self.to_come: list[tuple[float, int, str, TraceCall | None]] = []
        for program in programs:
            heapq.heappush(self.to_come, (program.arrival_s, next(self.sequence), program.program, None))
        self.by_call: dict[Call, _Call] = {}
        self.batch: list[_Call] = []
        while self.to_come or self.batch or len(policy.waiting):
            if not self.batch and not len(policy.waiting):
                self.now = max(self.now, self.to_come[0][0])
            self._deliver(self.now, inclusive=True)
            if self.batch or len(policy.waiting):
                self._step()

    def _deliver(self, until_s: float, *, inclusive: bool) -> None:
        while self.to_come and (self.to_come[0][0] < until_s or (inclusive and self.to_come[0][0] == until_s)):
            at_s, _, name, spec = heapq.heappop(self.to_come)
            if spec is not None:
                self._arrive(name, spec, at_s)
                continue
            for each in self.programs[name].calls:
                if not each.parents:
                    self._follow(name, each, at_s)

    def _follow(self, name: str, spec: TraceCall, now_s: float) -> None:
        if spec.gap_s:
            heapq.heappush(self.to_come, (now_s + spec.gap_s, next(self.sequence), name, spec))
        else:
            self._arrive(name, spec, now_s)

    def _arrive(self, name: str, spec: TraceCall, now_s: float) -> None:
        view = self.views[name]
        self.policy.program_changed(view)
        call = Call(f"{name}/{spec.call_id}", view)
        self.by_call[call] = _Call(spec, name, call, replace(view.attained), now_s)
        self.policy.arrive(call, now_s)

    def _is_resuming(self, each: _Call) -> bool:
        return not self.settings.unit_steps and each.started > 1 and each.given <= each.given_at_start

    def _form_batch(self) -> dict[_Call, int]:
        """Returns: tokens to compute for each call of the batch."""
        if len(self.steps) % self.decide_every == 0:
            self.policy.decide(self.now)
            running = [each.call for each in self.batch if not self._is_resuming(each)]
            for call in self.policy.victims(running, self.settings.batch_size - len(self.batch)):
                victim = self.by_call[call]
                self.batch.remove(victim)
                victim.since_s = self.now
                self.policy.preempt(call, self.now)
                self.preemptions += 1
        budget = self.settings.chunk_tokens - sum(each.prefill == 0 for each in self.batch)
        tokens = {}
        for each in sorted(self.batch, key=lambda each: each.call.rank):
            tokens[each] = 1 if each.prefill == 0 else min(each.prefill, budget)
            budget -= tokens[each] if each.prefill else 0
        while budget > 0 and len(self.batch) < self.settings.batch_size and len(self.policy.waiting):
            each = self.by_call[self.policy.waiting.peek()]
            self.policy.start(each.call, self.now)
            each.wait_s += self.now - each.since_s
            each.started += 1
            each.given_at_start = each.given
            each.prefill = 0 if self.settings.unit_steps else max(1, each.spec.prompt_tokens + each.given)
            tokens[each] = min(each.prefill, budget) if each.prefill else 1
            budget -= tokens[each] if each.prefill else 0
            self.batch.append(each)
        return tokens

    def _step(self) -> None:
        tokens = self._form_batch()
        in_order = sorted(self.batch, key=lambda each: each.call.rank)
        decoding = [each for each in self.batch if each.prefill == 0]
        context = sum(each.spec.prompt_tokens + each.given - each.prefill for each in self.batch)
        prefill = sum(tokens[each] for each in self.batch if each.prefill)
        step_s = self.settings.timing.step_s(len(decoding), prefill, context)
        self.steps.append((self.now, tuple(sorted(each.call.key for each in self.batch))))
        self._deliver(self.now + step_s, inclusive=False)
        self.now += step_s
        for each in in_order:
            if tokens[each]:
                self._charge(each, tokens[each], step_s)
        for each in in_order:
            if each.given == each.spec.output_tokens:
                self._end(each)

    def _charge(self, each: _Call, tokens: int, step_s: float) -> None:
        resuming = self._is_resuming(each)
        if each.prefill:
            each.prefill -= tokens
            computed = max(0, each.spec.prompt_tokens + each.given - each.prefill)
            new = max(0, min(tokens, computed - each.computed))
            each.computed = max(each.computed, computed)
        else:
            new = 1
            each.computed += 1
        each.given += each.prefill == 0
        charge_s = step_s if self.token_s is None else new * self.token_s
        each.service_s += charge_s
        self.policy.charge(each.call, charge_s, self.now, recomputed=resuming)

    def _end(self, each: _Call) -> None:
        name = each.program
        self.batch.remove(each)
        self.policy.leave(each.call)
        self.views[name].attained.fold(each.inherited, Account(each.service_s, each.wait_s))
        self.policy.program_changed(self.views[name])
        self.wait_s[name] += each.wait_s
        self.service_s[name] += each.service_s
        ended, program = self.ended[name], self.programs[name]
        ended.add(each.spec.call_id)
        for child in program.calls:
            if each.spec.call_id in child.parents and ended.issuperset(child.parents):
                self._follow(name, child, self.now)
        if len(ended) == len(program.calls):
            arrival_s, count = program.arrival_s, len(program.calls)
            self.results[name] = ProgramResult(arrival_s, self.now, self.wait_s[name], self.service_s[name], count)
