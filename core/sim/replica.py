"""A simulated engine: continuous batching of the calls that a policy ranks first.

It behaves as `weft.engine.scheduler` does on vLLM's scheduler. While the batch stays the same, the next time at which
something can happen is known, so the steps until then are jumped over and not played one by one.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Final, cast

from weft.core.policies import Call, KvSize, Policy, ProgramChanged, ProgramEnded, StepTokens
from weft.core.sim.batch import Jump, RunningBatch, SimRoom
from weft.core.sim.executions import Charges, Executions, KnownCosts
from weft.core.sim.kv_cache.cache import Segment
from weft.core.sim.kv_cache.host import KvElsewhere
from weft.core.sim.kv_cache.tiered_cache import make_kv
from weft.core.sim.result import Batch, Counts, Execution
from weft.core.sim.settings import SimSettings
from weft.core.sim.sim_programs import SimCall, SimProgram

# The share of the KV cache that stays free when a further call is admitted. Without it, a call would soon be preempted.
_HEADROOM: Final = 0.01
_MANY: Final = 64  # calls that start in one step


class SimReplica:
    """A simulated engine.

    Args:
        jump: Whether steps that change nothing are jumped over. False plays every step (for tests).
    """

    def __init__(
        self,
        number: int,
        policy: Policy,
        settings: SimSettings,
        counts: Counts,
        *,
        on_execution: Callable[[Execution], None] | None = None,
        on_batch: Callable[[Batch], None] | None = None,
        jump: bool = True,
    ) -> None:
        self.number = number
        self.policy = policy
        self.jump: Jump | None = None  # the jump in progress
        self._settings = settings
        self._on_batch = on_batch
        self._decide_every = settings.policy.decide_every
        # With `decide_every`, the order is that of the latest decision, and an engine decides whether anything has
        # happened or not. So jumps must not skip decisions.
        is_stale = policy.order_follows_clock and self._decide_every > 1
        self._plays_each_step = policy.ranks_follow_steps or is_stale or not jump
        self._timing = settings.timing
        self._costs = KnownCosts(policy, settings.timing, settings.batch_size)
        shares = settings.shares_prefixes  # without it contexts are not kept
        policy.on_event(KvSize(settings.kv_capacity, settings.host_kv_tokens) if shares else KvSize(math.inf))
        self._kv = make_kv(settings, counts)
        self._headroom_tokens = 0.0 if math.isinf(settings.kv_capacity) else settings.kv_capacity * _HEADROOM
        self._in_blocks = settings.block_tokens > 1 and not math.isinf(settings.kv_capacity)
        self._batch = RunningBatch(settings.policy.token_s, settings.block_tokens)
        self._charges = Charges(policy, self._kv, self._batch, settings.policy.token_s)
        self._executions = Executions(
            number,
            policy,
            settings,
            counts,
            kv=self._kv,
            batch=self._batch,
            charges=self._charges,
            on_execution=on_execution,
        )
        self._ended: list[Hashable] = []  # the KV of programs that have ended, until the next batch is formed
        self._between_decisions = False  # the policy does not decide before the next step (`decide_every`)
        self._copied_tokens = 0  # with each step of the jump
        # Until so many steps are made, and before this time, only an event or a copy ahead of need changes the batch.
        self._settled_steps, self._settled_until_s = 0, -math.inf
        self._shares: dict[Call, int] = {}  # the next step's tokens of the running calls that compute a prompt

    # -- events

    def arrive(self, call: SimCall, now_s: float) -> bool:
        """A call arrives. The replica considers it before the next step.

        Returns whether the jump in progress now ends earlier.
        """
        policy, jump = self.policy, self.jump
        self._settled_steps = 0
        policy.on_event(ProgramChanged(call.program))
        call.queued_since_s = now_s
        self._kv.tick(now_s)
        self._kv.call_arrived(call)
        before = policy.waiting.peek() if policy.waiting else None
        policy.arrive(call, now_s)
        if jump is None or jump.steps == 1:
            return False
        until_s = max(now_s, policy.next_change_s())  # the call may have starved before it arrived
        first = policy.waiting.peek() if policy.waiting else None  # the gate may have let in other calls
        if (first is not None and first is not before) and (
            len(self._batch.ranks) < self._settings.batch_size or not policy.is_settled(self._batch.lowest_rank())
        ):
            until_s = now_s
        return self._end_jump_by(until_s)

    @property
    def waiting_count(self) -> int:
        """The number of calls in its queue."""
        return len(self.policy.waiting) + len(self.policy.held)

    def take_back(self, call: SimCall, now_s: float) -> bool:
        """A call that has not begun leaves for another replica.

        Returns whether the jump in progress now ends earlier, because the policy may let another call in.
        """
        self._settled_steps = 0
        self._kv.tick(now_s)
        self._kv.call_moved(call)
        self.policy.waiting.discard(call)
        self.policy.held.discard(call)
        self.policy.leave(call)
        call.total_wait_s += now_s - call.queued_since_s
        call.wait_s = call.total_wait_s
        return self._end_jump_by(now_s)

    def not_begun(self) -> list[SimCall]:
        """The calls in its queue that have never run, the one that has waited longest first."""
        queue = cast("Iterator[SimCall]", itertools.chain(self.policy.waiting, self.policy.held))
        return sorted((call for call in queue if math.isnan(call.started_s)), key=lambda call: call.queued_since_s)

    def cached_tokens(self, call: SimCall) -> int:
        """The tokens of a waiting call's prompt that its KV cache holds."""
        return self._kv.find(call.prefixes())[1] if self._settings.shares_prefixes else 0

    def move_out(self, call: SimCall, now_s: float) -> KvElsewhere | None:
        """A call of which this replica has the latest KV goes to another one."""
        self._settled_steps = 0
        self._kv.tick(now_s)
        return self._kv.move_out(call)

    def _end_jump_by(self, until_s: float) -> bool:
        """End the jump with the step during which `until_s` lies. Returns whether that is earlier than planned."""
        jump = self.jump
        if jump is None or until_s == math.inf:
            return False
        steps = jump.steps_until(until_s - jump.began_s)
        ends_earlier = steps < jump.steps
        jump.steps = min(jump.steps, steps)
        return ends_earlier

    def end_program(self, program: SimProgram, now_s: float) -> bool:
        """A program has ended, and none of its calls will come.

        Returns whether the jump in progress now ends earlier, because the policy has something to decide.
        """
        self._settled_steps = 0
        self.policy.on_event(ProgramEnded(program.view))
        until_s = self.policy.next_change_s()
        self._kv.tick(now_s)
        self._kv.program_ended(program)
        if self.policy.evicts_ended_first and self._settings.evicts_as_scheduled and self._kv.capacity < math.inf:
            self._ended += filter(self._kv.holds, program.keys)
            until_s = now_s if self._ended else until_s
        return self._end_jump_by(max(now_s, until_s))

    def end_jump(self, now_s: float) -> list[SimCall]:
        """The jump in progress ends. Returns the calls that end with it, in rank order."""
        jump, batch = cast("Jump", self.jump), self._batch
        self.jump = None
        if self._on_batch is not None:
            copied_tokens = self._copied_tokens * jump.steps
            self._on_batch(Batch(self.number, jump.began_s, jump.steps, *batch.step_tokens(), copied_tokens))
        self._kv.tick(now_s)
        batch.advance(jump)
        self._kv.grow(batch.decoding * jump.steps, batch.padding(-1, {}) if jump.steps > 1 else None)
        charged = batch.pop_calls_to_charge(jump, every_call=self.policy.ranks_follow_steps)
        for call in charged:
            rank = batch.ranks[call]
            if call in batch.chunks:
                self._charges.prefill(call, jump.steps, jump.duration_s(jump.steps), now_s)
            else:
                self._charges.decode(call, now_s)
            if call not in batch.chunks or batch.ranks[call] != rank:
                self._settled_steps = 0
        ended = [call for call in charged if call.output_tokens >= call.spec.output_tokens]
        for call in ended:
            segment = cast("Segment", call.segment)
            self._executions.end(call, now_s)
            self._kv.call_left(call, segment, has_ended=True)
            self.policy.leave(call)
            call.program.predicted_tokens -= call.owner.prefill_work(call.spec)
        if (ended and self._in_blocks) or (jump.steps > 1 and batch.chunks):
            self._take_blocks(-1, {})
        self._kv.steps_ended(jump.steps)
        return ended

    def schedule(self, now_s: float) -> Jump | None:
        """Form the batch and begin the next jump. Returns the jump; None if no call runs."""
        batch = self._batch
        self._kv.tick(now_s)
        self._kv.evict_first(self._ended)
        self._ended.clear()
        if not (batch.ranks or self.policy.waiting or self.policy.held):  # an engine without requests makes no steps
            self.jump = None
            return None
        self._kv.before_step(self._most_tokens)
        may_start = self._form_batch(now_s)
        self.jump = self._plan_jump(now_s, only_one_step=not may_start) if batch.ranks else None
        if self.jump is not None:
            self._settled_steps, self._settled_until_s = batch.steps + self.jump.steps, self.policy.next_change_s()
            self._kv.step_formed(self._most_tokens)
            self.jump.steps = int(min(self.jump.steps, self._kv.even_steps(self._copied_tokens)))
            self._costs.step_begins(batch.steps, batch.decoding)
        return self.jump

    def _form_batch(self, now_s: float) -> bool:
        """Form the batch, unless nothing but copies has happened since the jump that was planned last, and it would go
        on. Returns whether waiting calls may start."""
        batch = self._batch
        is_settled = batch.steps < self._settled_steps and now_s < self._settled_until_s and not self._kv.has_moved
        self._kv.has_moved = False
        if not is_settled:
            self._decide(now_s)
        waiting = itertools.chain(self.policy.waiting, self.policy.held)
        self._kv.queue_changed(cast("Iterator[SimCall]", waiting), now_s)
        if is_settled:
            batch.admitted.clear()
            self._take_blocks(0, cast("dict[Call, int]", batch.chunks))
            return True
        starts_none = self._preempt_for_growth(now_s) and bool(batch.ranks)
        self._admit(now_s, may_start=not starts_none)
        for call, tokens in batch.chunks.items():
            if tokens == 0 and not call.stalled:
                self._executions.stall(call, now_s)
            elif tokens and call.stalled:
                self._executions.go_on(call, now_s)
        return not starts_none

    def _decide(self, now_s: float) -> None:
        """Let the policy decide, and preempt calls for those of better rank."""
        batch = self._batch
        self._between_decisions = batch.steps % self._decide_every > 0
        if not self._between_decisions:
            for call in self.policy.decide(now_s):
                if call in batch.ranks:
                    batch.ranks[call] = call.rank
            self._preempt_victims(now_s)
        elif self._in_blocks:
            self._shares = batch.divide_step(self._settings.chunk_tokens, now_s).divide()

    def _plan_jump(self, now_s: float, *, only_one_step: bool) -> Jump:
        """Plan as many steps as no event can interrupt. An arrival may still end the jump earlier.

        Args:
            now_s: When the jump begins.
            only_one_step: Whether calls that wait may start with the step after the next one.
        """
        batch = self._batch
        first_s = self._timing.step_s(*batch.step_tokens())
        self._copied_tokens = self._executions.take_copied()
        copy_s = self._copied_tokens * self._timing.copy_token_s
        prompt_tokens = sum(batch.chunks.values())
        jump = Jump(now_s, first_s + copy_s, self._timing.context_token_s * (batch.decoding + prompt_tokens), 1)
        if only_one_step or self._plays_each_step or self._order_may_change():
            return jump
        most_steps = math.inf
        if batch.chunks:
            if self.policy.ranks_follow_prompts or not self._settings.chunked_prefill:
                return jump
            most_steps = batch.steps_of_chunks(now_s)
            if most_steps < 2:
                return jump
        steps = min(most_steps, batch.steps_to_next_event(jump))
        if self._in_blocks:
            block_tokens = self._settings.block_tokens
            free_blocks = int(self._kv.free // block_tokens)
            if prompt_tokens:  # each call may take a block in each step
                steps = min(steps, free_blocks // (batch.decoding + prompt_tokens // block_tokens + 1))
            else:
                steps = min(steps, free_blocks // batch.decoding * block_tokens)
        elif self._kv.capacity < math.inf and batch.decoding:
            steps = min(steps, int((self._kv.available - len(batch.chunks)) // batch.decoding))
        steps = int(min(steps, self._costs.steps_to_next(batch.steps)))
        if self._between_decisions:
            steps = min(steps, self._decide_every - batch.steps % self._decide_every)
        change_s = self.policy.next_change_s()
        if change_s < math.inf:
            steps = min(steps, jump.steps_until(change_s - now_s))
        jump.steps = max(1, steps)
        return jump

    def _order_may_change(self) -> bool:
        """Whether another order of the waiting calls could change the batch after a step."""
        policy = self.policy
        if not (policy.order_follows_clock and policy.waiting):
            return False
        return policy.preempts or len(self._batch.ranks) < self._settings.batch_size

    # -- forming the batch

    def _preempt_victims(self, now_s: float) -> None:
        """Preempt running calls for waiting calls of better rank (Algorithm 1 lines 32-39)."""
        waiting, batch = self.policy.waiting, self._batch
        tokens = batch.divide_step(self._settings.chunk_tokens, now_s)
        if not waiting or not batch.ranks or not self.policy.preempts or self.policy.is_settled(batch.lowest_rank()):
            self._shares = tokens.divide()
            return
        free_slots = self._settings.batch_size - len(batch.ranks)
        if self._in_blocks:
            self._take_blocks(0, {})
        free_tokens = self._free_tokens()
        fit = len(waiting) <= min(free_slots, 4) and sum(map(self._blocks_of, waiting)) <= free_tokens
        if fit and not self._in_blocks:
            return  # all waiting calls start without preemption
        victims = self.policy.victims(
            [call for call in batch.ranks if not (call.resumed and call in batch.chunks)],
            free_slots,
            room=SimRoom(self._kv, free_tokens, batch.steps, tokens, self._settings),
        )
        self._shares = tokens.divide()
        for call in victims:
            self._executions.preempt(cast("SimCall", call), now_s)

    def _preempt_for_growth(self, now_s: float) -> bool:
        """Preempt calls until the next step fits. Returns whether any was preempted; vLLM then starts none."""
        batch, preempted = self._batch, False
        if not self._in_blocks:
            while batch.growth_tokens > self._kv.available:
                self._executions.preempt(batch.lowest_call(), now_s)
            return False
        while True:
            self._take_blocks(0, self._shares)
            if self._kv.free >= 0:
                return preempted
            self._executions.preempt(batch.lowest_call(), now_s)
            preempted = True

    def _free_tokens(self) -> float:
        """The tokens of KV that calls may take. If the KV cache is counted in tokens, the next step must fit, and a
        share of the cache stays free. vLLM, which counts blocks, lets calls take all that is free now."""
        if self._in_blocks:
            return self._kv.free
        return self._kv.available - self._batch.growth_tokens - 1 - self._headroom_tokens

    def _take_blocks(self, ahead: int, chunks: Mapping[Call, int]) -> None:
        """Count the blocks of the running calls, as `RunningBatch.padding` says, and evict others for them."""
        batch = self._batch
        unfilled = sum(call.prefill_left - chunks.get(call, 0) for call in batch.chunks)
        self._kv.fill(unfilled, batch.padding(ahead, chunks))

    def _most_tokens(self) -> int:
        """The most tokens of blocks that the next step can take, as `weft.engine.scheduler.batch` estimates them."""
        batch, waiting, block_tokens = self._batch, self.policy.waiting, self._settings.block_tokens
        starting = max(0, min(self._settings.batch_size - len(batch.ranks), len(waiting)))
        most = self._settings.chunk_tokens + (len(batch.ranks) + starting) * block_tokens
        if starting > _MANY:
            return most
        tokens = batch.growing_tokens() + sum(call.prefill_left + block_tokens for call in batch.chunks)
        for call in itertools.islice(waiting, starting):
            if tokens >= most:
                break
            tokens += self._blocks_of(call)
        return min(most, tokens)

    def _blocks_of(self, call: Call) -> int:
        """The tokens of the blocks that a waiting call's context takes."""
        block_tokens = self._settings.block_tokens
        return -(-cast("SimCall", call).context_tokens // block_tokens) * block_tokens

    def _admit(self, now_s: float, *, may_start: bool = True) -> None:
        """Admit waiting calls in rank order until one does not fit, and divide the next step's tokens."""
        waiting, batch = self.policy.waiting, self._batch
        batch.admitted.clear()
        if self._in_blocks:  # as vLLM, which serves running calls before it starts others
            batch.chunks = {call: self._shares.get(call, 0) for call in batch.chunks}
            prompts = sum(batch.chunks.values())
            tokens = StepTokens(self._settings.chunk_tokens - batch.decoding - prompts, ())
        else:
            tokens = batch.divide_step(self._settings.chunk_tokens, now_s)
        while may_start and waiting and len(batch.ranks) < self._settings.batch_size:
            call = cast("SimCall", waiting.peek())
            left = tokens.left_for(call if self.policy.preempts else None)
            if not left:
                break
            segment, hit = self._kv.find(call.prefixes()) if self._settings.shares_prefixes else (None, 0)
            if batch.ranks and left < call.tokens_to_compute(hit) and not self._settings.chunked_prefill:
                break
            if batch.ranks and self._kv.cost(segment, hit, self._blocks_of(call)) > self._free_tokens():
                break
            self._executions.begin(call, segment, hit, now_s)
            self.policy.start(call, now_s)
            batch.ranks[call] = call.rank
            batch.admitted[call] = None
            if call.prefill_left:
                batch.chunks[call] = tokens.take(call.prefill_left) if call.ready_s <= now_s else 0
            else:
                batch.start_decoding(call)
            if self._in_blocks:
                self._take_blocks(0, cast("dict[Call, int]", batch.chunks))
        batch.chunks.update(cast("dict[SimCall, int]", tokens.divide()))
        self._take_blocks(0, cast("dict[Call, int]", batch.chunks))

    def check_integrity(self) -> None:
        """Assert that an idle replica holds no calls and no pinned KV. For tests."""
        self._kv.check_integrity()
        waiting, pinned = len(self.policy.waiting), self._kv.pinned
        if waiting or pinned or not self._batch.is_empty():
            raise AssertionError(
                f"replica {self.number} is not idle: {list(self._batch.ranks)} run, {waiting} calls wait, "
                f"{pinned} tokens are pinned"
            )
