"""The KV cache of a simulated replica: how full it is, and which prefixes it still holds.

The cache is a tree of segments, as the hashes of vLLM's blocks form a tree. A segment that a running call reads is
pinned. The other segments stay until their capacity is needed. Then the least recently used prefix is evicted, from its
end. The cache counts tokens. What calls take beyond them, because their last blocks are not full, is `padding`.
"""

from __future__ import annotations

import itertools
import math
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from weft.core.sim.kv_cache.host import KvElsewhere
    from weft.core.sim.sim_programs import SimCall, SimProgram


@dataclass(eq=False, slots=True)
class Segment:
    """A contiguous part of the cache, which follows the tokens of its parent. Compared by identity."""

    key: Hashable | None  # the key by which it is found; None: it is only a part of a longer prefix
    parent: Segment | None
    base: int  # tokens before it
    tokens: int
    pins: int = 0  # 1 for the running call that ends in it, and 1 for each pinned child
    children: int = 0

    @property
    def end(self) -> int:
        """Tokens from the beginning of the prefix to the end of the segment."""
        return self.base + self.tokens


class KvCache:
    """A KV cache with prefix caching.

    Args:
        capacity: In tokens; math.inf for no bound.
        keep: Whether segments that no running call reads stay in the cache (prefix caching).
        block_tokens: Prefixes are evicted in blocks of this many tokens.
    """

    def __init__(self, capacity: float, *, keep: bool = True, block_tokens: int = 1) -> None:
        self.capacity = capacity
        self.pinned = 0  # tokens that running calls read or have reserved
        self.cached = 0  # tokens that no running call reads, kept for later calls
        self.unfilled = 0  # the pinned tokens that are reserved for prompts and not computed yet
        self.padding = 0  # what running calls take beyond their tokens, because they take whole blocks; see `fill`
        self.has_moved = False  # whether copies ahead of need have taken or given back room; the reader resets it
        self._keep = keep
        self._block_tokens = block_tokens
        self._index: dict[Hashable, Segment] = {}
        # The segments that are not pinned and have no children, the least recently used first.
        self._leaves: OrderedDict[Segment, None] = OrderedDict()

    @property
    def available(self) -> float:
        """Tokens that calls can reserve: the free ones, and those that can be evicted."""
        return self.capacity - self.pinned

    @property
    def free(self) -> float:
        """Tokens in blocks that no running call has taken yet, those that can be evicted included."""
        return self.capacity - self.pinned + self.unfilled - self.padding

    def find(self, keys: Iterable[tuple[Hashable, int]]) -> tuple[Segment | None, int]:
        """Find the longest cached prefix.

        Args:
            keys: Keys under which a prefix may be cached, the longest first, each with the number of tokens shared.

        Returns the segment in which the prefix ends, and its length in tokens; None and 0 without a prefix.
        """
        found, longest, segment_of = None, 0, self._index.get
        for key, shared in keys:
            if shared <= longest:
                break
            segment = segment_of(key)
            if segment is None:
                continue
            if min(shared, segment.end) > longest:
                found, longest = segment, min(shared, segment.end)
            if self._block_tokens == 1:
                break
        while found is not None and found.base >= longest:  # the shared tokens end in an earlier segment
            found = found.parent
        return found, longest

    def shared_prefixes(self, call: SimCall) -> Iterator[tuple[Hashable, int]]:
        """Yield the keys under which later calls look for the KV that a call shares, the longest prefix first.

        vLLM finds equal blocks whoever has computed them. If the cache is counted in blocks, all earlier calls whose
        context the call begins with are therefore found again. Otherwise only the one before it is.
        """
        if self._block_tokens == 1 or call.end_node is not None:
            return call.shared_prefixes()
        return itertools.islice(call.prefixes(), 1, None)

    def cost(self, segment: Segment | None, hit: int, tokens: int) -> int:
        """How much less is `available` once a call reserves `tokens`, of which `hit` are shared as `find` said."""
        while segment is not None and not segment.pins:
            segment = segment.parent
        return tokens - (min(segment.end, hit) if segment is not None else 0)

    def reserve(self, key: Hashable, segment: Segment | None, hit: int, tokens: int) -> Segment:
        """Reserve and pin a call's `tokens`, of which `hit` are shared as `find` said.

        Returns the call's own segment, which holds the tokens that are not shared.
        """
        own = self.reserve_prefix(key, segment, hit, tokens)
        self._pin(own)
        self._evict()
        return own

    def reserve_call(self, call: SimCall, segment: Segment | None, hit: int, tokens: int) -> Segment:
        """Reserve a call's `tokens` as `reserve` does, so that others find the prefix that they share with it."""
        if call.end_node is not None:
            call.end_node.use(call.owner.number)
        missing = itertools.takewhile(lambda prefix: prefix[1] > hit, self.shared_prefixes(call))
        for key, shared in reversed(list(missing)):
            segment, hit = self.reserve_prefix(key, segment, hit, min(shared, tokens)), min(shared, tokens)
        return self.reserve(call.kv_key, segment, hit, tokens)

    def name_output(self, call: SimCall, own: Segment) -> None:
        """Let others find the tokens that a call has generated, as far as a later prompt repeats them."""
        for key, tokens in reversed(list(call.output_prefixes())):
            if own.base < tokens <= own.end and key not in self._index:
                self._name(self._split(own, tokens), key)

    def reserve_prefix(self, key: Hashable, segment: Segment | None, hit: int, tokens: int) -> Segment:
        """Reserve a prefix of `tokens`, of which `hit` are cached as `find` said.

        The prefix is not pinned. The caller then reserves a segment after it, which pins both.

        Returns the segment that holds the tokens that are not cached.
        """
        if segment is not None and hit < segment.end:
            segment = self._split(segment, hit)
        return self._add(key, segment, hit, tokens - hit)

    def grow(self, tokens: int, padding: int | None = None) -> None:
        """Count tokens that the running calls have generated together. `settle` adds them to the calls' segments.

        Args:
            padding: As for `fill`. None: the tokens lie in blocks that were taken before.
        """
        self.pinned += tokens
        if self._block_tokens > 1:
            self.padding = self.padding - tokens if padding is None else padding
        self._evict()

    def fill(self, unfilled: int, padding: int = 0) -> None:
        """Note what the running calls take in the next step.

        Args:
            unfilled: The tokens reserved for prompts that will still not be computed after the step.
            padding: The tokens by which the calls' blocks exceed their other tokens. It is below 0 if the blocks for
                the latest tokens are not taken yet.
        """
        self.unfilled, self.padding = unfilled, padding
        self._evict()

    @staticmethod
    def settle(own: Segment, tokens: int) -> None:
        """Add to a call's own segment the tokens that it generated. `grow` has counted them before."""
        own.tokens += tokens

    def trim(self, own: Segment, tokens: int) -> None:
        """Free the last `tokens` that only this call has reserved, because they were never computed.

        They may begin before its own segment, in prefixes that others were to find. If the cache is not counted in
        blocks, these stay.
        """
        segment, below = own, [own]
        while True:
            cut = min(tokens, segment.tokens)
            segment.tokens -= cut
            self.pinned -= cut
            tokens -= cut
            parent = segment.parent
            if not tokens or self._block_tokens == 1 or parent is None or parent.pins > 1 or parent.children > 1:
                break
            segment = parent
            below.append(parent)
        for each in reversed(below[:-1]):
            each.base = cast("Segment", each.parent).end

    def release(self, own: Segment) -> None:
        """Unpin the segments of a call that stops running. Without prefix caching its own segment is dropped."""
        segment: Segment | None = own
        while segment is not None:
            segment.pins -= 1
            if segment.pins:
                break
            self.pinned -= segment.tokens
            self.cached += segment.tokens
            if not segment.children:
                self._leaves[segment] = None
            segment = segment.parent
        if not self._keep:
            self._drop(own)

    def holds(self, key: Hashable) -> bool:
        """Whether a prefix is cached under this key."""
        return key in self._index

    def evict_first(self, keys: Iterable[Hashable]) -> None:
        """Have the segments of these keys evicted before all others, because no later call needs them."""
        for key in keys:
            segment = self._index.get(key)
            if segment is not None and segment in self._leaves:
                self._leaves.move_to_end(segment, last=False)

    # -- events that only a cache with a KV policy needs (`weft.core.sim.kv_cache.policy_cache`)

    def tick(self, now_s: float) -> None:
        """The time is `now_s`."""

    def queue_changed(self, calls: Iterable[SimCall], now_s: float) -> None:
        """These calls wait; the call that starts next comes first."""

    def call_arrived(self, call: SimCall) -> None:
        """A call has arrived."""

    def load(self, call: SimCall, hit: int) -> tuple[int, float]:
        """Copy back the tokens of a starting call that host memory has. Returns its tokens that need not be computed,
        and the seconds after which they are there if the copy does not delay the step."""
        return hit, 0.0

    def move_out(self, call: SimCall) -> KvElsewhere | None:
        """A call of which this cache has the latest KV goes to another replica. Returns what that can read in host
        memory here; None without host memory."""
        return None

    def save(self, call: SimCall, tokens: int) -> int:
        """A call is preempted, and its first `tokens` are copied to host memory. Returns how many it has not yet."""
        return tokens

    def take_copied(self) -> int:
        """The tokens that are copied out and back with the next step, which is formed."""
        return 0

    def even_steps(self, copied_tokens: int) -> float:
        """How many steps in a row copy `copied_tokens` each, the step that was formed last included. inf if it copies
        no tokens, and no copies are planned."""
        return 1 if copied_tokens else math.inf

    def before_step(self, most_tokens: Callable[[], int]) -> None:
        """The next step is about to be formed. `most_tokens` gives the most tokens of blocks that it can take."""

    def step_formed(self, most_tokens: Callable[[], int]) -> None:
        """The next step is formed. While it runs, copies are planned for the one after it."""

    def steps_ended(self, steps: int) -> None:
        """The steps of a jump have been made, of which each has copied as much."""

    def call_moved(self, call: SimCall) -> None:
        """A call that has not begun goes to another replica."""

    def call_began(self, call: SimCall, waited_s: float) -> None:
        """A call starts to run for the first time."""

    def call_left(self, call: SimCall, segment: Segment, *, has_ended: bool) -> None:
        """A call has ended, or was preempted and needs the context that it leaves. `segment` was its own."""

    def program_ended(self, program: SimProgram) -> None:
        """No call of a program will come."""

    # -- segments

    def _pin(self, own: Segment) -> None:
        segment: Segment | None = own
        while segment is not None:
            segment.pins += 1
            if segment.pins > 1:
                break
            self.pinned += segment.tokens
            self.cached -= segment.tokens
            self._leaves.pop(segment, None)
            segment = segment.parent

    def _add(self, key: Hashable, parent: Segment | None, base: int, tokens: int) -> Segment:
        before = self._index.get(key)
        if before is not None:
            before.key = None
        if parent is not None:
            parent.children += 1
            self._leaves.pop(parent, None)
        own = Segment(None, parent, base, tokens)
        self._name(own, key)
        self.cached += tokens  # until it is pinned
        return own

    def _name(self, segment: Segment, key: Hashable) -> None:
        """Let a segment be found by this key."""
        segment.key, self._index[key] = key, segment

    def _split(self, segment: Segment, at: int) -> Segment:
        """Divide a segment in two and return the first part. The second part keeps the key and the children."""
        head = Segment(None, segment.parent, segment.base, at - segment.base, min(segment.pins, 1), 1)
        segment.parent, segment.base, segment.tokens = head, at, segment.end - at
        return head

    def _evict(self) -> None:
        """Evict tokens, the least recently used first, until the rest fits."""
        while self._excess() > 0 and self._leaves:
            leaf = self._next_leaf()
            excess = math.ceil(self._excess() / self._block_tokens) * self._block_tokens
            self._give_away(leaf, max(leaf.base, leaf.end - excess))
            if leaf.tokens > excess:
                self._shorten(leaf, excess)
            else:
                self._drop(leaf)

    def _excess(self) -> float:
        return self.cached - self.free

    def _next_leaf(self) -> Segment:
        """The leaf to evict next. There must be one."""
        return next(iter(self._leaves))

    def _give_away(self, leaf: Segment, begin: int) -> None:
        """The tokens of a leaf from `begin` on are about to be evicted."""

    def _shorten(self, leaf: Segment, tokens: int) -> None:
        """Evict the last tokens of a leaf."""
        leaf.tokens -= tokens
        self.cached -= tokens

    def _drop(self, leaf: Segment) -> None:
        self.cached -= leaf.tokens
        del self._leaves[leaf]
        parent = leaf.parent
        if parent is not None:
            parent.children -= 1
            if not parent.children and not parent.pins:  # it was last used with this child
                self._leaves[parent] = None
                self._leaves.move_to_end(parent, last=False)
        if leaf.key is not None:
            if parent is not None and parent.key is None:  # the rest of the prefix can still be found
                self._name(parent, leaf.key)
            else:
                del self._index[leaf.key]

    def check_integrity(self) -> None:
        """Assert that the counts agree with the tree, once all generated tokens are settled. For tests."""
        segments: dict[Segment, None] = {}
        for each in (*self._index.values(), *self._leaves):
            segment: Segment | None = each
            while segment is not None and segment not in segments:
                segments[segment] = None
                segment = segment.parent
        pinned = sum(segment.tokens for segment in segments if segment.pins)
        cached = sum(segment.tokens for segment in segments if not segment.pins)
        leaves = {segment for segment in segments if not segment.pins and not segment.children}
        children = dict.fromkeys(segments, 0)
        for segment in segments:
            if segment.parent is not None:
                children[segment.parent] += 1
        checks = {
            "pinned or cached tokens are miscounted": (pinned, cached) == (self.pinned, self.cached),
            "more tokens than the capacity": self._excess() <= 0,
            "the leaves are wrong": leaves == set(self._leaves),
            "a number of children is wrong": all(segment.children == count for segment, count in children.items()),
            "a prefix has a gap": all(s.base == (s.parent.end if s.parent else 0) for s in segments),
            "a key is wrong": all(segment.key == key for key, segment in self._index.items()),
        }
        failed = [problem for problem, holds in checks.items() if not holds]
        if failed:
            raise AssertionError("; ".join(failed))
