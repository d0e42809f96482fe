"""How calls enter and leave the batch of a simulated replica: their KV, their waits, and the copies that they need."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

from weft.core.policies import Policy, StepCosts
from weft.core.policies.steps import FIT_STEPS
from weft.core.sim.batch import RunningBatch
from weft.core.sim.kv_cache.cache import KvCache, Segment
from weft.core.sim.result import Counts, Execution
from weft.core.sim.settings import SimSettings, StepTime
from weft.core.sim.sim_programs import SimCall


@dataclass(eq=False, slots=True)
class Executions:
    """Begins, interrupts and ends the executions of a replica's calls. An execution is a stay in the batch."""

    number: int
    policy: Policy
    settings: SimSettings
    counts: Counts
    kv: KvCache
    batch: RunningBatch
    charges: Charges
    on_execution: Callable[[Execution], None] | None
    swapped: int = 0  # tokens of preempted calls to copy with the next step

    def take_copied(self) -> int:
        """The tokens that are copied with the next step, to host memory or back. They count as copied from now on."""
        swapped, self.swapped = self.swapped, 0
        return swapped + self.kv.take_copied()

    def begin(self, call: SimCall, segment: Segment | None, hit: int, now_s: float) -> None:
        """Reserve a call's KV and determine how many tokens are to be computed before its next one.

        `segment` is the cached segment in which the call's prefix ends.
        """
        spec, counts, tokens = call.spec, self.counts, call.context_tokens
        call.resumed = not math.isnan(call.started_s) and not self.settings.unit_steps
        if not call.resumed:
            counts.prompt += spec.prompt_tokens
            counts.prefix_hits += hit
            call.cached_tokens = min(hit, spec.prompt_tokens)
            self.kv.call_began(call, now_s - call.queued_since_s)
        self.swapped += max(0, call.swapped - hit)
        call.swapped, copy_s = self.kv.load(call, max(hit, call.swapped))
        call.ready_s = now_s + copy_s
        counts.host_hits += 0 if call.resumed else call.swapped - hit
        if call.resumed:
            counts.recomputed += max(0, call.computed - call.swapped)
        elif spec.parents:
            known = self._known_tokens(call)
            call.known_tokens = known if self.settings.shares_prefixes else 0
            counts.again += max(0, known - call.swapped)
        self.kv.unfilled += 0 if self.settings.unit_steps else call.tokens_to_compute(hit)
        if self.settings.shares_prefixes:
            call.segment = self.kv.reserve_call(call, segment, hit, tokens)
        else:
            call.segment = self.kv.reserve(call.kv_key, segment, hit, tokens)
        call.prefill_left = 0 if self.settings.unit_steps else call.tokens_to_compute(hit)
        call.swapped = 0
        call.running = True
        call.total_wait_s += now_s - call.queued_since_s
        call.started_s = now_s

    def _known_tokens(self, call: SimCall) -> int:
        """The tokens of a call's prompt whose KV its parent has left, in full blocks if these are counted."""
        spec, block_tokens = call.spec, self.settings.block_tokens
        known = min(spec.shared_prefix_tokens, spec.prompt_tokens)
        if block_tokens > 1:
            parent = call.owner.spec.calls[call.owner.index_of[spec.parents[0]]]
            known = min(known, (parent.prompt_tokens + parent.output_tokens - 1) // block_tokens * block_tokens)
        return known

    def preempt(self, call: SimCall, now_s: float) -> None:
        """Preempt a running call. Its KV is unpinned, and before that copied to host memory if the engines swap."""
        self.counts.preemptions += 1
        if call.stalled:
            self.go_on(call, now_s)
        if call.end_step >= 0:
            self.charges.decode(call, now_s)
        segment = cast("Segment", call.segment)
        self.kv.trim(segment, call.prefill_left)
        if self.settings.swaps:
            call.swapped = max(0, call.context_tokens - max(1, call.prefill_left))
            saved = self.kv.save(call, call.swapped)
            self.counts.swapped += saved
            self.swapped += saved
        self.end(call, now_s)
        self.kv.call_left(call, segment, has_ended=False)
        call.queued_since_s = now_s
        self.policy.preempt(call, now_s)

    def stall(self, call: SimCall, now_s: float) -> None:
        """Calls of better rank use up the tokens of the next step."""
        call.stalled, call.queued_since_s = True, now_s
        self.policy.stall(call, now_s)

    def go_on(self, call: SimCall, now_s: float) -> None:
        """A call that stalled gets tokens again."""
        call.stalled = False
        call.total_wait_s += now_s - call.queued_since_s
        self.policy.go_on(call, now_s)

    def end(self, call: SimCall, now_s: float) -> None:
        """A call leaves the batch."""
        self.batch.remove(call)
        call.running = False
        self._release(call)
        call.segment = None
        if self.on_execution is not None:
            self.on_execution(Execution(call.owner.spec.program, call.spec.call_id, self.number, call.started_s, now_s))

    def _release(self, call: SimCall) -> None:
        """Unpin a call's KV. The tokens of its last block are dropped unless the block is full, as in vLLM."""
        segment, block_tokens = cast("Segment", call.segment), self.settings.block_tokens
        if block_tokens > 1:
            computed = min(segment.end, call.context_tokens - 1)  # the last token's KV is never computed
            self.kv.trim(segment, segment.end - computed // block_tokens * block_tokens)
        if self.settings.shares_prefixes:
            self.kv.name_output(call, segment)
        self.kv.release(segment)


# -- what the running calls of a simulated replica are charged for its steps


class KnownCosts:
    """Tells a policy what steps cost, as often as an engine does.

    An engine fits the costs to its steps. The simulator knows them, except for the number of calls that share a step:
    both take the most calls that have decoded in one step so far.
    """

    def __init__(self, policy: Policy, timing: StepTime, batch_size: int) -> None:
        self._policy = policy
        self._timing = timing
        self._batch_size = batch_size
        self._slots = 1
        self._told_slots = 0

    def steps_to_next(self, steps: int) -> float:
        """The number of steps before the step with which the policy is told; inf if it is not told any more."""
        if self._told_slots == self._batch_size:
            return math.inf
        return max(1, FIT_STEPS - 1 - steps % FIT_STEPS)

    def step_begins(self, steps: int, decoding: int) -> None:
        """A step, or a jump, begins.

        The policy is told now and not at the end of the step. An engine takes in the calls that have arrived during a
        step only after the step, so they are ranked by the new costs. `decoding` is the number of calls that decode in
        the step.
        """
        self._slots = max(self._slots, decoding)
        if (steps + 1) % FIT_STEPS == 0 and self._slots > self._told_slots:
            self._told_slots, of = self._slots, self._timing
            self._policy.on_event(StepCosts(of.fixed_s, of.decode_token_s, of.prefill_token_s, self._slots))


class Charges:
    """Charges calls when they end, are preempted, have used their quanta, or compute a part of their prompts.

    Args:
        token_s: Service for each computed token, in seconds. None: service is the duration of the steps.
    """

    def __init__(self, policy: Policy, kv: KvCache, batch: RunningBatch, token_s: float | None) -> None:
        self._policy = policy
        self._kv = kv
        self._batch = batch
        self._token_s = token_s

    def prefill(self, call: SimCall, steps: int, steps_s: float, now_s: float) -> None:
        """Charge a call for the steps that computed a chunk of its prompt each. The last chunk generates the first
        token."""
        chunk = self._batch.chunks[call] * steps
        if not chunk:  # other calls used up the tokens of the step
            return
        call.prefill_left -= chunk
        computed = max(0, call.context_tokens - call.prefill_left)
        new_tokens = max(0, min(chunk, computed - call.computed))
        call.computed = max(call.computed, computed)
        prompt_tokens = call.spec.prompt_tokens
        before = max(call.known_tokens, min(computed - new_tokens, prompt_tokens))
        call.computed_tokens += max(0, min(computed, prompt_tokens) - before)
        self._charge(
            call, steps_s if self._token_s is None else new_tokens * self._token_s, now_s, recomputed=call.resumed
        )
        if call.prefill_left == 0:
            call.output_tokens += 1
            call.program.predicted_tokens -= 1
            self._kv.grow(1)
            self._kv.settle(cast("Segment", call.segment), 1)
            call.resumed = False
            del self._batch.chunks[call]
            self._batch.start_decoding(call)

    def decode(self, call: SimCall, now_s: float) -> None:
        """Charge a decoding call for the steps since it was last charged."""
        batch = self._batch
        steps, clock_s = batch.steps - call.charged_step, batch.decode_clock_s
        if not steps:
            return
        charge_s = clock_s - call.charged_clock_s
        call.charged_step, call.charged_clock_s = batch.steps, clock_s
        call.output_tokens += steps
        call.computed = call.context_tokens - 1  # the KV of the last generated token is computed in the next step
        call.program.predicted_tokens -= steps
        self._kv.settle(cast("Segment", call.segment), steps)
        self._charge(call, charge_s, now_s)
        batch.watch_quantum(call)

    def _charge(self, call: SimCall, charge_s: float, now_s: float, *, recomputed: bool = False) -> None:
        call.total_service_s += charge_s
        self._policy.charge(call, charge_s, now_s, recomputed=recomputed)
        self._batch.ranks[call] = call.rank
