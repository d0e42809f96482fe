"""Charges the running calls of a simulated replica for its steps."""

from __future__ import annotations

import math
from typing import cast

from weft.core.policies import Policy, StepCosts
from weft.core.policies.steps import FIT_STEPS
from weft.core.sim.batch import RunningBatch
from weft.core.sim.kv_cache.cache import KvCache, Segment
from weft.core.sim.sim_programs import SimCall
from weft.core.sim.step_time import StepTime


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
