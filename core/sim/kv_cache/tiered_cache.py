"""A simulated KV cache with host memory behind it, as Weft's engines have it (`weft.engine.kv_cache.soft_hold`).

What a step overwrites is copied out before it. While it runs, copies ahead of need are planned. They are made beside
the next step and those after it, one after another each way, and so is that of a call that waits for its context. Where
copies cannot run beside steps, all of them are a part of their step.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from weft.core.kv_cache import fetch_ahead, spill_ahead
from weft.core.kv_cache.policies import Action, Context, KvPolicy
from weft.core.sim.kv_cache.cache import KvCache, Segment
from weft.core.sim.kv_cache.host import HostMemory, KvElsewhere
from weft.core.sim.kv_cache.policy_cache import PolicyKvCache
from weft.core.sim.result import Counts
from weft.core.sim.settings import SimSettings, StepTime
from weft.core.sim.sim_programs import SimCall


class OffloadingKvCache(PolicyKvCache):
    """A KV cache whose contents are copied to host memory, and copied back one after another.

    Args:
        settings: The simulation's settings. The KV cache must be bounded.
    """

    def __init__(self, settings: SimSettings, policy: KvPolicy, host: HostMemory, counts: Counts) -> None:
        super().__init__(settings, policy)
        self._host: HostMemory = host
        self._counts = counts
        self._token_s = settings.timing.copy_token_s
        self._until_s = 0.0  # when the last copy back to the device is done

    def load(self, call: SimCall, hit: int) -> tuple[int, float]:
        tokens = max(hit, self._host.held(call, hit))
        if tokens == hit:
            return hit, 0.0
        self._counts.fetched += tokens - hit
        self._until_s = max(self._until_s, self._now_s) + (tokens - hit) * self._token_s
        return tokens, self._until_s - self._now_s

    def call_left(self, call: SimCall, segment: Segment, *, has_ended: bool) -> None:
        super().call_left(call, segment, has_ended=has_ended)
        if not has_ended or call.owner.unfinished_calls > 1 or not self._contexts.policy.evicts_ended_first:
            self._counts.spilled += self._host.keep(call, 0, segment.end)


_FRESH_S: Final = 0.1  # so long a step may use what was planned while the one before it ran


@dataclass(eq=False, slots=True)
class _Fetch:
    context: Context
    call: SimCall  # the call that left the context
    own: Segment  # reserved for the copied tokens, which are found once the copy is done
    done_s: float | None = None  # when it is; None: the step with which it begins has not begun


class TieredKvCache(PolicyKvCache):
    """A KV cache in which a KV policy chooses what is evicted, and what is copied to host memory and back.

    Args:
        settings: The simulation's settings. The KV cache must be bounded.
        copy_token_s: Seconds to copy a token, as the policy sees it.
    """

    def __init__(
        self, settings: SimSettings, policy: KvPolicy, host: HostMemory, copy_token_s: float, counts: Counts
    ) -> None:
        super().__init__(settings, policy, copy_token_s)
        self._host: HostMemory = host
        self._counts = counts
        self._fetches_ahead = settings.fetches_ahead
        self._is_beside = is_beside = settings.copies_beside
        self._spill_tokens = self._whole_blocks(spill_ahead.most_bytes(beside=is_beside) / settings.kv_token_bytes)
        self._fetch_tokens = self._whole_blocks(fetch_ahead.STEP_BYTES / settings.kv_token_bytes)
        self._token_s = settings.timing.copy_token_s
        self._until_s = {"in": 0.0, "out": 0.0}  # when the last copy beside steps is done, each way
        self._wait_until_s = 0.0  # for which of them the next step waits
        self._seen: dict[Context, tuple[int, int]] = {}  # its tokens, and the changes of host memory when that was seen
        self._spills: dict[Context | SimCall, None] = {}  # to be copied to host memory
        self._computing: dict[SimCall, None] = {}  # running calls whose prompts are copied once they are computed
        self._left: dict[SimCall, None] = {}  # of ended programs, to be copied when nothing else is
        self._planned: dict[Context | SimCall, int] = {}  # of these, beside the next step: tokens
        self._going_out: dict[Context | SimCall, tuple[float, int]] = {}  # beside steps: until when, and tokens
        self._spilling: deque[tuple[int, Context]] = deque()  # with the number of the step that completes them
        self._fetches: dict[Context, _Fetch] = {}
        self._running: Counter[int] = Counter()  # calls by the number of their program
        self._runs = 0  # calls
        self._copied = 0  # tokens, for the next step
        self._steps = 0  # that have begun
        self._next_fetch_s = self._planned_s = -math.inf
        self._is_short = False

    def _whole_blocks(self, tokens: float) -> int:
        return max(1, int(tokens / self._block_tokens)) * self._block_tokens

    # -- steps

    def before_step(self, most_tokens: Callable[[], int]) -> None:
        if self._now_s >= self._planned_s + _FRESH_S:
            self._plan(most_tokens)
        self._planned_s = -math.inf
        self._let_go_if_short(most_tokens)

    def step_formed(self, most_tokens: Callable[[], int]) -> None:
        self._plan(most_tokens)
        self._planned_s = self._now_s

    def take_copied(self) -> int:
        self._steps += 1
        if self._wait_until_s > self._now_s and self._token_s:
            self._copied += math.ceil((self._wait_until_s - self._now_s) / self._token_s)
        self._begin_spills()
        for fetch in self._fetches.values():
            if fetch.done_s is None:
                self._counts.fetched += fetch.own.tokens
                fetch.done_s = self._copy("in", fetch.own.tokens)
        copied, self._copied = self._copied, 0
        return copied

    def _copy(self, way: str, tokens: int) -> float:
        """Copy beside steps, or in the next one. Returns when that is done, which with a step is when it ends."""
        if not self._is_beside:
            self._copied += tokens
            return self._now_s
        self._until_s[way] = max(self._until_s[way], self._now_s) + tokens * self._token_s
        return self._until_s[way]

    def _begin_spills(self) -> None:
        for each, tokens in self._planned.items():
            self._going_out[each] = self._copy("out", tokens), tokens
        self._planned.clear()

    def even_steps(self, copied_tokens: int) -> float:
        if self._is_beside:
            is_spilling = self._left or self._planned or self._going_out or (self._is_short and self._spills)
            return 1 if copied_tokens or self._fetches or is_spilling else math.inf
        if not (copied_tokens or self._copied or self._fetches):
            return math.inf
        if self._fetches or not copied_tokens == self._copied == self._spill_tokens:
            return 1
        parts = map(self._to_copy, self._spills if self._is_short else ())
        left = sum(end - begin for _, begin, end in parts)
        return 2 + left // self._spill_tokens

    def steps_ended(self, steps: int) -> None:
        if steps > 1 and self._copied:  # the jump has copied what further plans would have
            self._steps += steps - 1
            self._spill_ahead((steps - 1) * self._spill_tokens)
            self._copied = self._spill_tokens
        done = [each for each in self._fetches.values() if each.done_s is not None and each.done_s <= self._now_s]
        for fetch in done:
            self._finish(fetch)

    # -- calls

    def load(self, call: SimCall, hit: int) -> tuple[int, float]:
        others = self._runs
        self._running[call.owner.number] += 1
        self._runs += 1
        if self._is_beside:
            self._computing[call] = None
        tokens = max(hit, self._host.held(call, hit))
        wait_s = 0.0
        if call.elsewhere is not None and (held := call.elsewhere.host.held(call, tokens)) > tokens:
            tokens, wait_s = held, max(0.0, call.elsewhere.ready_s - self._now_s)
        self._counts.fetched += tokens - hit
        if tokens > hit and self._is_beside and fetch_ahead.loads_beside(others):
            self._begin_spills()
            return tokens, max(wait_s, self._copy("in", tokens - hit) - self._now_s)
        self._copied += tokens - hit
        return tokens, wait_s

    def move_out(self, call: SimCall) -> KvElsewhere:
        begin, end = self._host.held(call), self.find(call.prefixes())[1]
        copied = self._spill(call, begin, end) if end > begin else 0
        return KvElsewhere(self._host, self._copy("out", copied))

    def save(self, call: SimCall, tokens: int) -> int:
        return self._host.keep(call, 0, tokens)

    def call_left(self, call: SimCall, segment: Segment, *, has_ended: bool) -> None:
        self._computing.pop(call, None)
        self._spills.pop(call, None)
        self._runs -= 1
        self._running[call.owner.number] -= 1
        if not self._running[call.owner.number]:
            del self._running[call.owner.number]
        super().call_left(call, segment, has_ended=has_ended)

    # -- contexts

    def decided(self, context: Context) -> None:
        super().decided(context)
        if not context.on_host or self._host.has_evicted:
            self._see_host(context)
        if context.decision.action is Action.SPILL and context.tokens and not context.on_host:
            self._spills[context] = None

    def left_behind(self, context: Context) -> None:
        if self._is_beside and context.decision.action is Action.SPILL and context.tokens and not context.on_host:
            self._left[self._contexts.call_of[context]] = None
            if len(self._left) > spill_ahead.MOST_LEFT:
                del self._left[next(iter(self._left))]

    def given_up(self, context: Context) -> None:
        super().given_up(context)
        self._spills.pop(context, None)
        self._seen.pop(context, None)
        if context in self._fetches:
            self._cancel(self._fetches[context])

    def _see_host(self, context: Context) -> None:
        """Note what host memory has of a context."""
        call = self._contexts.call_of[context]
        seen = context.tokens, self._host.changes_of(call)
        if self._seen.get(context) == seen:
            return
        self._seen[context] = seen
        held = self._host.held(call)
        context.on_host = held >= max(1, context.tokens)
        if held < context.tokens:  # there is a gap before its end, or its end is not there
            held = self._host.held(call, context.tokens)
        context.host_tokens = held if held > context.tokens or context.on_host else 0

    # -- copies out

    def _give_away(self, leaf: Segment, begin: int) -> None:
        """Copy out what the step overwrites of the contexts that host memory has not."""
        for context in self._contexts.ending_in(leaf):
            call = self._contexts.call_of[context]
            for each in (call, context):
                self._copied += self._planned.pop(each, 0)  # before the step
                self._wait_until_s = max(self._wait_until_s, self._going_out.get(each, (0.0, 0))[0])
            if not context.on_host:
                self._copied += self._spill(call, begin, leaf.end)
                self._see_host(context)

    def _spill(self, call: SimCall, begin: int, end: int) -> int:
        copied = self._host.keep(call, begin, end)
        self._counts.spilled += copied
        return copied

    def _plan(self, most_tokens: Callable[[], int]) -> None:
        for gone in [each for each, (done_s, _) in self._going_out.items() if done_s <= self._now_s]:
            del self._going_out[gone]
        while self._spilling and self._spilling[0][0] < self._steps and self._spilling[0][1] not in self._going_out:
            context = self._spilling.popleft()[1]
            if context in self._contexts.call_of:
                self._see_host(context)
                self.changed(context)
        for call in [each for each in self._computing if not each.prefill_left]:
            del self._computing[call]
            policy, memory = self._contexts.policy, self._contexts.memory
            is_room = self._contexts.all_left_tokens + call.context_tokens <= self._host.capacity
            if is_room and spill_ahead.copies_prompt(policy, call.context_tokens, memory, self._now_s):
                self._spills[call] = None
        if self._spills:
            ample = spill_ahead.ample(most_tokens(), self.capacity)
            self._is_short = self._contexts.need_more_than(self.free - ample)
            if self._is_short:
                under_way = sum(tokens for _, tokens in self._going_out.values())
                self._spill_ahead(self._spill_tokens - under_way)
        if self._left and self._now_s >= self._until_s["out"] and not self._planned:
            self._spill_left()
        self._let_go_if_short(most_tokens)
        if self._fetches_ahead and not self._fetches and self._now_s >= self._next_fetch_s:
            self._next_fetch_s = self._now_s + fetch_ahead.EVERY_S
            left = min(self._fetch_tokens, int(self.free) - self._spared(most_tokens()))
            for context in self._due() if left > 0 else ():
                left -= self._fetch(context, left)
                if left <= 0:
                    break

    def _spill_ahead(self, most: int) -> None:
        """Copy at most `most` tokens of the contexts that are to be spilled."""
        while self._spills and most > 0:
            most -= self._spill_part(next(iter(self._spills)), most)

    def _to_copy(self, each: Context | SimCall) -> tuple[SimCall, int, int]:
        """The tokens of a context or of a running call that are to be copied: whose, and from where to where."""
        if isinstance(each, SimCall):  # the KV of its last token is not there yet
            return each, self._host.held(each), (each.context_tokens - 1) // self._block_tokens * self._block_tokens
        call = self._contexts.call_of[each]
        return call, self._host.held(call), each.tokens

    def _spill_part(self, each: Context | SimCall, most: int) -> int:
        """Copy the next tokens of a context or a running call, at most `most`. Returns how many are copied."""
        call, begin, all_of_it = self._to_copy(each)
        end = min(all_of_it, begin + most)
        copied = self._spill(call, begin, end) if end > begin else 0
        if self._is_beside and copied:
            self._planned[each] = self._planned.get(each, 0) + copied
        else:
            self._copied += copied
        if end >= all_of_it or not copied:  # or there is no room
            del self._spills[each]
            if isinstance(each, Context):
                self._spilling.append((self._steps + 1, each))
        return max(self._block_tokens, copied)

    def _spill_left(self) -> None:
        """Copy the next tokens of what an ended program has left, as far as they are there yet."""
        call = next(iter(self._left))
        begin, end = self._host.held(call), self.find(call.prefixes())[1]
        copied = self._spill(call, begin, min(end, begin + self._spill_tokens)) if end > begin else 0
        self._copy("out", copied)
        if begin + copied >= end or not copied:
            del self._left[call]
            self._host.evict_first(call.owner.keys)

    # -- copies back

    def _spared(self, most_tokens: int) -> int:
        return most_tokens + self._block_tokens + int(self.capacity) // fetch_ahead.WATERMARK

    def _let_go_if_short(self, most_tokens: Callable[[], int]) -> None:
        if self._fetches and self.free < self._spared(most_tokens()):
            for fetch in list(self._fetches.values()):
                self._cancel(fetch)

    def _due(self) -> list[Context]:
        memory, now_s, running = self._contexts.refresh(), self._now_s, self._running
        room_tokens = fetch_ahead.SHARE * self.capacity - (self.capacity - self.free)
        left_tokens, is_any, contexts = self._contexts.left_tokens, False, []
        for each, call in self._contexts.call_of.items():
            if call.owner.number in running:
                continue
            if each.tokens < left_tokens[each]:  # otherwise host memory cannot have more
                self._see_host(each)
            is_one = 0 < each.host_tokens - each.tokens <= room_tokens and fetch_ahead.is_likely(each)
            is_any |= is_one
            if is_one or each.tokens:  # others are not copied back, and take no room
                contexts.append(each)
        if not is_any:
            return []
        return fetch_ahead.contexts_to_fetch(
            [fetch_ahead.expect(context, memory, now_s) for context in contexts],
            room_tokens=room_tokens,
            copy_token_s=self._copy_token_s,
        )

    def _fetch(self, context: Context, most: int) -> int:
        """Plan to copy back the next tokens of a context. Returns how many free tokens that takes."""
        call = self._contexts.call_of[context]
        segment, hit = self.find(call.prefixes())
        taken = self.cost(segment, hit, hit)  # they leave the free ones as well
        count = min(most - taken, self._host.held(call, hit) - hit) // self._block_tokens * self._block_tokens
        if count <= 0:
            return 0
        own = self.reserve(("fetch", context), segment, hit, hit + count)
        self._fetches[context] = _Fetch(context, call, own)
        self.has_moved = True
        return count + taken

    def _finish(self, fetch: _Fetch) -> None:
        """A copy is done. Its tokens are found from now on, unless the cache has them already."""
        context, call, end = fetch.context, fetch.call, fetch.own.end
        self._cancel(fetch)
        segment, hit = self.find(call.prefixes())
        if hit < end:
            own = self.reserve_call(call, segment, hit, end)
            self.name_output(call, own)
            self.release(own)
            context.is_fetched = True
            self._contexts.put(context, own)

    def _cancel(self, fetch: _Fetch) -> None:
        """Nobody needs the tokens of a copy any more."""
        own = fetch.own
        self.has_moved = True
        del self._fetches[fetch.context], self._index[own.key]
        own.key = None
        self.release(own)
        self._drop(own)

    def _evict(self) -> None:
        super()._evict()
        if self.pinned > self.capacity and self._fetches:  # running calls go first
            for fetch in list(self._fetches.values()):
                self._cancel(fetch)
            super()._evict()


def make_kv(settings: SimSettings, counts: Counts) -> KvCache:
    """Make the KV cache of a replica. It has a KV policy if the settings have one and anything can be evicted."""
    config = settings.evicts_by
    if config is None:
        return KvCache(settings.kv_capacity, keep=settings.shares_prefixes, block_tokens=settings.block_tokens)
    policy = config.make()
    if not settings.host_kv_tokens:
        return PolicyKvCache(settings, policy)
    host = HostMemory(settings.host_kv_tokens, ended_first=policy.evicts_ended_first)
    if policy.follows_use:
        return OffloadingKvCache(settings, policy, host, counts)
    # If copies take no time, policies see the default: an engine has measured some.
    return TieredKvCache(settings, policy, host, settings.timing.copy_token_s or StepTime().copy_token_s, counts)
