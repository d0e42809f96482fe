"""Host memory of a simulated replica: which tokens of which contexts it has."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Hashable, Iterable
from typing import NamedTuple

from weft.core.sim.kv_cache.blocks import BlockNode
from weft.core.sim.kv_cache.cache import KvCache, Segment
from weft.core.sim.sim_programs import SimCall


class KvElsewhere(NamedTuple):
    """Where a call that has moved finds what its program had on another replica."""

    host: HostMemory
    ready_s: float  # when it is there


class HostMemory(KvCache):
    """The contexts of programs in host memory, as prefixes like those on the device.

    The device gives a context away from its end, so of a prefix the beginning may not have been copied: the first
    tokens of a segment can be absent. If host memory is full, the copies that were used longest ago go first.

    Args:
        ended_first: Whether copies of ended programs go before all others.
    """

    def __init__(self, capacity: float, *, ended_first: bool = True) -> None:
        super().__init__(capacity)
        self._ended_first = ended_first
        self._ended: dict[Segment, None] = {}  # of ended programs, in the order in which they go
        self._absent: dict[Segment, int] = {}  # the tokens at the beginning of a segment that were not copied
        self._absent_tokens = 0
        self.has_evicted = False  # whether it was ever full
        # How often copies have changed, by the number of their program, or by the first node of the blocks that several
        # programs share; None: those that any program may share.
        self._changes: defaultdict[Hashable, int] = defaultdict(int)

    def changes_of(self, call: SimCall) -> int:
        """A number that grows whenever `held` may give another answer for a call."""
        changes, end = self._changes, call.end_node
        return changes[call.owner.number] + changes[None] + (0 if end is None else changes[end.first])

    def held(self, call: SimCall, first: int = 0) -> int:
        """The end of the tokens of a call's prefix that host memory has without a gap from `first` on; `first` if it
        has none there."""
        segment, end = self.find(call.prefixes())
        if not self._absent:
            return max(first, end)
        path: list[Segment] = []
        while segment is not None and segment.end > first:
            path.append(segment)
            segment = segment.parent
        held = first
        for each in reversed(path):
            if each.base + self._absent.get(each, 0) > held:
                break
            held = min(each.end, end)
        return max(first, held)

    def keep(self, call: SimCall, begin: int, end: int) -> int:
        """Copy the tokens from `begin` to `end` of a call's context that host memory does not have.

        Returns how many these are; 0 if the context is larger than the memory.
        """
        if end > self.capacity:
            return 0
        segment, hit = self.find(call.prefixes())
        copied = self._fill(segment, begin, min(hit, end))
        wanted = [*itertools.islice(call.prefixes(), 1), *call.shared_prefixes()]
        for key, tokens in reversed([(key, min(tokens, end)) for key, tokens in wanted]):
            if tokens > hit:
                if segment is not None and segment.key == key and begin <= hit == segment.end and not segment.children:
                    segment.tokens += tokens - hit  # a part was copied before
                    self.cached += tokens - hit
                    self._changed(key)
                else:
                    segment = self.reserve_prefix(key, segment, hit, tokens)
                    self._lack(segment, min(max(0, begin - hit), tokens - hit))
                copied += max(0, tokens - max(begin, hit))
                hit = tokens
        if segment is not None:
            self.name_output(call, segment)
            if not segment.children:
                self._leaves[segment] = None
                self._leaves.move_to_end(segment)
        self._evict()
        return copied

    def evict_first(self, keys: Iterable[Hashable]) -> None:
        if self._ended_first:
            copies = map(self._index.get, keys)
            self._ended.update(dict.fromkeys(each for each in copies if each is not None))

    def _next_leaf(self) -> Segment:
        while self._ended:
            if (first := next(iter(self._ended))) in self._leaves:
                return first
            del self._ended[first]
        return super()._next_leaf()

    def _fill(self, segment: Segment | None, begin: int, end: int) -> int:
        """Copy what is absent between `begin` and `end` up to a segment. Returns how many tokens that are."""
        copied = 0
        while segment is not None and segment.end > begin:
            absent = self._absent.get(segment, 0)
            left = min(absent, max(0, begin - segment.base))
            if absent > left and end >= segment.base + absent:
                copied += absent - left
                self._lack(segment, left)
            segment = segment.parent
        return copied

    def _lack(self, segment: Segment, tokens: int) -> None:
        self._changed(segment.key)
        self._absent_tokens += tokens - self._absent.pop(segment, 0)
        if tokens:
            self._absent[segment] = tokens

    def _changed(self, key: Hashable | None) -> None:
        """What is kept of a segment with this key has changed."""
        if isinstance(key, BlockNode):
            self._changes[key.first if key.is_common else key.program] += 1
        else:
            self._changes[key[0] if isinstance(key, tuple) and key[0] != "name" else None] += 1

    def _name(self, segment: Segment, key: Hashable) -> None:
        super()._name(segment, key)
        self._changed(key)

    def _split(self, segment: Segment, at: int) -> Segment:
        absent = self._absent.pop(segment, 0)
        head = super()._split(segment, at)
        for part, tokens in ((head, min(absent, head.tokens)), (segment, max(0, absent - head.tokens))):
            if tokens:
                self._absent[part] = tokens
        return head

    def _give_away(self, leaf: Segment, begin: int) -> None:
        self.has_evicted = True

    def _shorten(self, leaf: Segment, tokens: int) -> None:
        super()._shorten(leaf, tokens)
        self._lack(leaf, min(self._absent.get(leaf, 0), leaf.tokens))

    def _drop(self, leaf: Segment) -> None:
        super()._drop(leaf)
        self._lack(leaf, 0)

    def _excess(self) -> float:
        return super()._excess() - self._absent_tokens
