"""One simulated engine: continuous batching of what a policy puts first, as `weft.engine.scheduler` has vLLM do it.

While the batch stays as it is, steps are not played one by one but jumped over: the next time that something can happen
is known beforehand.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable
from typing import Final, cast

from weft.core.policies import Call, Policy, Rank
from weft.core.sim.calls import SimCall
from weft.core.sim.kv import KvCache, Segment
from weft.core.sim.records import Batch, Counts, Execution, Jump
from weft.core.sim.settings import SimSettings

# Of the KV cache, kept free when a call is let in beside others: it would soon be preempted again.
_HEADROOM: Final = 0.01


class Replica:
    """A simulated engine.

    Args:
        number: its own.
        policy: its own, fresh.
        record: told of every run of a call.
        note: told of every batch.
        jump: jump over steps that change nothing; False plays each one (for tests).
    """

    def __init__(
        self,
        number: int,
        policy: Policy,
        settings: SimSettings,
        counts: Counts,
        *,
        record: Callable[[Execution], None] | None = None,
        note: Callable[[Batch], None] | None = None,
        jump: bool = True,
    ) -> None:
        self.number = number
        self.policy = policy
        self.jump: Jump | None = None  # under way
        self.running: dict[SimCall, Rank] = {}
        self._settings = settings
        self._counts = counts
        self._record = record
        self._note = note
        self._decide_every = settings.policy.decide_every
        self._token_s = settings.policy.token_s
        self._plays_each_step = policy.ranks_follow_steps or not jump
        self._timing = settings.timing
        self._kv = KvCache(settings.kv_capacity, keep=settings.shares_prefixes)
        self._headroom = 0.0 if math.isinf(settings.kv_capacity) else settings.kv_capacity * _HEADROOM
        self._chunks: dict[SimCall, int] = {}  # of calls that compute a prompt: their tokens in the step under way
        self._decoding = 0
        self._context = 0  # tokens that the decoding calls attend to
        self._steps = 0
        self._busy_s = 0.0
        self._swap_s = 0.0  # copies to make before the next step
        self._undecided = False
        self._pushes = itertools.count()
        self._ends: list[tuple[int, int, SimCall]] = []  # heap by the step with which a decoding call ends
        self._quanta: list[tuple[float, int, SimCall]] = []  # heap by the meter at which one has used its quantum

    @property
    def _meter(self) -> float:
        """What a decoding call is charged by: the difference between two readings."""
        return self._busy_s if self._token_s is None else self._steps * self._token_s

    # -- what happens to it

    def arrive(self, call: SimCall, now_s: float) -> bool:
        """A call arrives. It is looked at before the next step.

        Returns:
            Whether the jump under way now ends earlier.
        """
        policy, jump = self.policy, self.jump
        policy.program_changed(call.program)
        call.queued_since_s = now_s
        policy.arrive(call, now_s)
        if jump is None or jump.steps == 1:
            return False
        until_s = max(now_s, policy.next_change_s())  # it may come starved already
        if policy.waiting.peek() is call and (
            len(self.running) < self._settings.batch_size or call.rank < max(self.running.values())
        ):
            until_s = now_s
        steps = jump.steps_until(until_s - jump.began_s) if until_s < math.inf else jump.steps
        shorter = steps < jump.steps
        jump.steps = min(jump.steps, steps)
        return shorter

    def end_jump(self, now_s: float) -> list[SimCall]:
        """The jump under way ends.

        Returns:
            The calls that end with it, in the order in which they stood.
        """
        jump = cast("Jump", self.jump)
        self.jump = None
        if self._note is not None:
            self._note(Batch(self.number, jump.began_s, jump.steps, *self._load()))
        self._steps += jump.steps
        lasted_s = jump.lasts_s(jump.steps)
        self._busy_s += lasted_s
        self._context += self._decoding * jump.steps
        self._kv.grow(self._decoding * jump.steps)
        due = sorted(self._due(), key=lambda call: self.running[call])
        for call in due:
            if call in self._chunks:
                self._charge_prefill(call, lasted_s, now_s)
            else:
                self._charge_decode(call, now_s)
        ended = [call for call in due if call.given >= call.spec.output_tokens]
        for call in ended:
            self._stop(call, now_s)
            self.policy.leave(call)
            call.program.predicted_tokens -= call.owner.prefill_work(call.spec)
        return ended

    def schedule(self, now_s: float) -> Jump | None:
        """Form the batch and begin the next jump.

        Returns:
            The jump, None if there is nothing to run.
        """
        self._undecided = self._steps % self._decide_every > 0
        if not self._undecided:
            for changed in self.policy.decide(now_s):
                if changed in self.running:
                    self.running[changed] = changed.rank
            self._preempt_outranked(now_s)
        while self._growth() > self._kv.available:
            self._preempt(max(self.running, key=self.running.__getitem__), now_s)
        self._admit(self._share_out(), now_s)
        self.jump = self._plan(now_s) if self.running else None
        return self.jump

    # -- forming the batch

    def _preempt_outranked(self, now_s: float) -> None:
        """Make room where calls of higher queues wait (Alg. 1 lines 32-39)."""
        waiting = self.policy.waiting
        if not waiting or not self.running or waiting.peek().rank > max(self.running.values()):
            return
        free, room = self._settings.batch_size - len(self.running), self._room()
        if len(waiting) <= min(free, 4) and sum(_context(call) for call in waiting) <= room:
            return  # they fit anyhow
        victims = self.policy.victims(
            [call for call in self.running if not (call.resumed and call in self._chunks)],
            free,
            free_blocks=room,
            blocks=self._blocks_of,
        )
        for call in victims:
            self._preempt(cast("SimCall", call), now_s)

    def _blocks_of(self, call: Call) -> int:
        """As the scheduler counts: all that a running call has so far, what it shares with others, too."""
        call = cast("SimCall", call)
        if not call.running or call.segment is None:
            return call.context
        return call.segment.end - call.prefill_left + (self._steps - call.seen_step if call.end_step >= 0 else 0)

    def _growth(self) -> int:
        """Tokens of KV that the next step may add."""
        return self._decoding + len(self._chunks)

    def _room(self) -> float:
        """Tokens of KV that a call may bring, so that the next step can be made and a little is left."""
        return self._kv.available - self._growth() - 1 - self._headroom

    def _share_out(self) -> int:
        """Share a step's tokens out to the prompts under way.

        Returns:
            How many are left.
        """
        left = self._settings.chunk_tokens - self._decoding
        for call in sorted(self._chunks, key=lambda call: self.running[call]):
            self._chunks[call] = min(call.prefill_left, left)
            left -= self._chunks[call]
        return left

    def _admit(self, left: int, now_s: float) -> None:
        """Let calls in from the first that waits on, until one does not fit."""
        waiting = self.policy.waiting
        while waiting and left > 0 and len(self.running) < self._settings.batch_size:
            call = cast("SimCall", waiting.peek())
            shares = self._settings.shares_prefixes
            segment, hit = self._kv.find(call.prefixes()) if shares else (None, 0)
            if self.running and self._kv.cost(segment, hit, call.context) > self._room():
                return
            self._enter(call, segment, hit, now_s)
            self.policy.start(call, now_s)
            self.running[call] = call.rank
            if call.prefill_left:
                self._chunks[call] = min(call.prefill_left, left)
                left -= self._chunks[call]
            else:
                self._decode(call)

    def _enter(self, call: SimCall, segment: Segment | None, hit: int, now_s: float) -> None:
        """Give a call its KV, and say what is to be computed before its next token."""
        spec, counts, tokens = call.spec, self._counts, call.context
        call.resumed = not math.isnan(call.started_s) and not self._settings.unit_steps
        if not call.resumed:
            counts.prompt += spec.prompt_tokens
            counts.prefix_hits += hit
            call.cached_tokens = min(hit, spec.prompt_tokens)
        have = max(hit, call.swapped)
        self._swap_s += max(0, call.swapped - hit) * self._settings.swap_token_s
        if call.resumed:
            counts.recomputed += max(0, call.computed - have)
        shared = spec.shared_prefix_tokens
        if hit < shared and self._settings.shares_prefixes:
            segment, hit = self._kv.reserve_prefix(call.prefix_key, segment, hit, shared), shared
        call.segment = self._kv.reserve(call.kv_key, segment, hit, tokens)
        # At least the last token is computed again, for what comes after it.
        call.prefill_left = 0 if self._settings.unit_steps else max(1, tokens - have)
        call.swapped = 0
        call.running = True
        call.queued_s += now_s - call.queued_since_s
        call.started_s = now_s

    def _decode(self, call: SimCall) -> None:
        """A call's prompt is computed; it gives a token with each step from here on."""
        self._decoding += 1
        self._context += call.context
        call.seen_step, call.seen_meter = self._steps, self._meter
        call.end_step = self._steps + call.spec.output_tokens - call.given
        heapq.heappush(self._ends, (call.end_step, next(self._pushes), call))
        self._note_quantum(call)

    def _preempt(self, call: SimCall, now_s: float) -> None:
        self._counts.preemptions += 1
        if call.end_step >= 0:
            self._charge_decode(call, now_s)
        segment = cast("Segment", call.segment)
        self._kv.trim(segment, min(call.prefill_left, segment.tokens))
        if self._settings.swaps:
            call.swapped = max(0, call.context - max(1, call.prefill_left))
            self._counts.swapped += call.swapped
            self._swap_s += call.swapped * self._settings.swap_token_s
        self._stop(call, now_s)
        call.queued_since_s = now_s
        self.policy.preempt(call, now_s)

    def _stop(self, call: SimCall, now_s: float) -> None:
        """A call leaves the batch."""
        if call.end_step >= 0:
            self._decoding -= 1
            self._context -= call.context
            call.end_step = -1
        self._chunks.pop(call, None)
        del self.running[call]
        call.running = False
        self._kv.release(cast("Segment", call.segment))
        call.segment = None
        if self._record is not None:
            self._record(Execution(call.owner.spec.program, call.spec.call_id, self.number, call.started_s, now_s))

    # -- jumping

    def _load(self) -> tuple[int, int, int]:
        """What is in the next step: calls that decode, tokens of prompts, and of the context that both attend to."""
        context = self._context + sum(call.context - call.prefill_left for call in self._chunks)
        return self._decoding, sum(self._chunks.values()), context

    def _plan(self, now_s: float) -> Jump:
        first_s = self._timing.step_s(*self._load())
        if self._chunks or self._swap_s:
            first_s += self._swap_s
            self._swap_s = 0.0
            return Jump(now_s, first_s, 0.0, 1)
        jump = Jump(now_s, first_s, self._timing.context_token_s * self._decoding, 1)
        if self._plays_each_step:
            return jump
        while self._ends[0][2].end_step != self._ends[0][0]:
            heapq.heappop(self._ends)
        steps = self._ends[0][0] - self._steps
        if self._kv.capacity < math.inf:
            steps = min(steps, int(self._kv.available // self._decoding))
        if self._undecided:
            steps = min(steps, self._decide_every - self._steps % self._decide_every)
        if self._quanta:
            until = self._quanta[0][0] - self._meter
            steps = min(steps, jump.steps_until(until) if self._token_s is None else math.ceil(until / self._token_s))
        change_s = self.policy.next_change_s()
        if change_s < math.inf:
            steps = min(steps, jump.steps_until(change_s - now_s))
        jump.steps = max(1, steps)
        return jump

    def _due(self) -> dict[SimCall, None]:
        """The calls that the steps that have just ended did something to: all that computed a prompt, and those that
        end or have used their quantum."""
        due = dict.fromkeys(self.running if self.policy.ranks_follow_steps else self._chunks)
        while self._ends and self._ends[0][0] <= self._steps:
            end_step, _, call = heapq.heappop(self._ends)
            if call.end_step == end_step:
                due[call] = None
        meter = self._meter
        while self._quanta and self._quanta[0][0] <= meter:
            at, _, call = heapq.heappop(self._quanta)
            if call.end_step >= 0 and call.seen_meter + call.quantum_s == at:
                due[call] = None
        return due

    def _charge_prefill(self, call: SimCall, lasted_s: float, now_s: float) -> None:
        chunk = self._chunks[call]
        if not chunk:  # it was in the batch, but not in the step
            return
        call.prefill_left -= chunk
        computed = max(0, call.context - call.prefill_left)
        new = max(0, min(chunk, computed - call.computed))
        call.computed = max(call.computed, computed)
        charge_s = lasted_s if self._token_s is None else new * self._token_s
        call.ran_s += charge_s
        self.policy.charge(call, charge_s, now_s, recomputed=call.resumed)
        self.running[call] = call.rank
        if call.prefill_left == 0:  # this step has given a token, too
            call.given += 1
            call.program.predicted_tokens -= 1
            self._kv.grow(1)
            self._kv.settle(cast("Segment", call.segment), 1)
            call.resumed = False
            del self._chunks[call]
            self._decode(call)

    def _charge_decode(self, call: SimCall, now_s: float) -> None:
        """Bring a decoding call up to date."""
        steps, meter = self._steps - call.seen_step, self._meter
        if not steps:
            return
        charge_s = meter - call.seen_meter
        call.seen_step, call.seen_meter = self._steps, meter
        call.given += steps
        call.computed = call.context - 1  # the token that was given last is computed with the next step
        call.program.predicted_tokens -= steps
        call.ran_s += charge_s
        self._kv.settle(cast("Segment", call.segment), steps)
        self.policy.charge(call, charge_s, now_s)
        self.running[call] = call.rank
        self._note_quantum(call)

    def _note_quantum(self, call: SimCall) -> None:
        if call.quantum_s < math.inf:
            heapq.heappush(self._quanta, (call.seen_meter + call.quantum_s, next(self._pushes), call))

    def check_integrity(self) -> None:
        """Assert that an idle replica holds nothing. For tests.

        Raises:
            AssertionError: it does.
        """
        self._kv.check_integrity()
        left = (self.running, self._chunks, self._decoding, self._context, len(self.policy.waiting), self._kv.pinned)
        if any(left):
            raise AssertionError(f"replica {self.number} is not empty: {left}")


def _context(call: Call) -> int:
    return cast("SimCall", call).context
