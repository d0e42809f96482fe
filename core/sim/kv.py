"""The KV cache of a simulated replica: how full it is, and which prefixes are still in it.

A tree of segments of tokens, as vLLM's blocks form one by their hashes. A segment that a running call reads is pinned;
the others stay until the room is needed, the least recently used go first and from the end of a prefix. Counted in
tokens, not in blocks: vLLM shares full blocks only, and loses up to a block at the end of each prefix.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable
from dataclasses import dataclass


@dataclass(eq=False, slots=True)
class Segment:
    """Tokens that follow those of its parents. Compared by identity."""

    key: Hashable | None  # under which it is found; None: part of a longer prefix only
    parent: Segment | None
    base: int  # tokens before it
    tokens: int
    pins: int = 0  # 1 for the call that runs on it, 1 for each child that is pinned
    children: int = 0

    @property
    def end(self) -> int:
        return self.base + self.tokens


class KvCache:
    """KV cache with prefix caching.

    Args:
        capacity: in tokens; math.inf for no bound.
        keep: keep what no running call reads (prefix caching).
    """

    def __init__(self, capacity: float, *, keep: bool = True) -> None:
        self.capacity = capacity
        self.pinned = 0  # tokens that running calls read or have reserved
        self.cached = 0  # tokens that are kept only in case that they are asked for again
        self._keep = keep
        self._index: dict[Hashable, Segment] = {}
        self._leaves: OrderedDict[Segment, None] = OrderedDict()  # not pinned, no children; least recently used first

    @property
    def available(self) -> float:
        """Tokens that could be reserved, those that are only kept among them."""
        return self.capacity - self.pinned

    def find(self, keys: Iterable[tuple[Hashable, int]]) -> tuple[Segment | None, int]:
        """The longest prefix that is here.

        Args:
            keys: under which parts of the prefix may be found, the longest first, and how many tokens are shared.

        Returns:
            The segment that holds the prefix' end, and its length in tokens.
        """
        for key, shared in keys:
            segment = self._index.get(key)
            if segment is not None:
                hit = min(shared, segment.end)
                while segment.base >= hit and segment.parent is not None:  # shared less than all of the last segment
                    segment = segment.parent
                return (segment, hit) if hit else (None, 0)
        return None, 0

    def cost(self, segment: Segment | None, hit: int, tokens: int) -> int:
        """Of the room that is available, what a call of `tokens` would take that shares `hit` of them."""
        while segment is not None and not segment.pins:
            segment = segment.parent
        return tokens - (min(segment.end, hit) if segment is not None else 0)

    def reserve(self, key: Hashable, segment: Segment | None, hit: int, tokens: int) -> Segment:
        """Reserve and pin room for a call's `tokens`, of which `hit` are shared as `find` said.

        Returns:
            The call's own segment.
        """
        own = self.reserve_prefix(key, segment, hit, tokens)
        self._pin(own)
        self._make_room()
        return own

    def reserve_prefix(self, key: Hashable, segment: Segment | None, hit: int, tokens: int) -> Segment:
        """A prefix of `tokens` that others will share, of which only `hit` are here, as `find` said; it is pinned by
        what follows it."""
        if segment is not None and hit < segment.end:
            segment = self._split(segment, hit)
        return self._add(key, segment, hit, tokens - hit)

    def grow(self, tokens: int) -> None:
        """Running calls have given this many tokens together; `settle` says whose they were."""
        self.pinned += tokens
        self._make_room()

    @staticmethod
    def settle(own: Segment, tokens: int) -> None:
        """This many of the tokens given to `grow` were those of one call."""
        own.tokens += tokens

    def trim(self, own: Segment, tokens: int) -> None:
        """Give back room at a call's end that was reserved and never written."""
        own.tokens -= tokens
        self.pinned -= tokens

    def release(self, own: Segment) -> None:
        """A call runs no more."""
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
        self._index[key] = own = Segment(key, parent, base, tokens)
        self.cached += tokens  # until it is pinned
        return own

    def _split(self, segment: Segment, at: int) -> Segment:
        """Cut a segment in two; the first part is returned, the second keeps the key and the children."""
        head = Segment(None, segment.parent, segment.base, at - segment.base, min(segment.pins, 1), 1)
        segment.parent, segment.base, segment.tokens = head, at, segment.end - at
        return head

    def _make_room(self) -> None:
        while self.pinned + self.cached > self.capacity and self._leaves:
            leaf = next(iter(self._leaves))
            over = self.pinned + self.cached - self.capacity
            if leaf.tokens > over:
                leaf.tokens -= int(over)
                self.cached -= int(over)
            else:
                self._drop(leaf)

    def _drop(self, leaf: Segment) -> None:
        self.cached -= leaf.tokens
        del self._leaves[leaf]
        parent = leaf.parent
        if parent is not None:
            parent.children -= 1
            if not parent.children and not parent.pins:  # it was last used when its last child was
                self._leaves[parent] = None
                self._leaves.move_to_end(parent, last=False)
        if leaf.key is not None:
            if parent is not None and parent.key is None:  # what is left of the prefix is still found
                parent.key = leaf.key
                self._index[leaf.key] = parent
            else:
                del self._index[leaf.key]

    def check_integrity(self) -> None:
        """Assert that the tree adds up once every call has settled. For tests.

        Raises:
            AssertionError: it does not.
        """
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
            "tokens are lost": (pinned, cached) == (self.pinned, self.cached),
            "more than there is room for": self.pinned + self.cached <= self.capacity,
            "leaves are wrong": leaves == set(self._leaves),
            "children are wrong": all(segment.children == count for segment, count in children.items()),
            "a prefix has a hole": all(s.base == (s.parent.end if s.parent else 0) for s in segments),
            "a key is wrong": all(segment.key == key for key, segment in self._index.items()),
        }
        failed = [what for what, holds in checks.items() if not holds]
        if failed:
            raise AssertionError("; ".join(failed))
