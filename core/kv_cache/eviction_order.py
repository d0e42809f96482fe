"""The order of eviction: which cached block goes next, by a KV policy's decisions and worths.

Only leaves of the tree of prefixes can go. An event marks a few leaves, in O(1). Marked leaves are ranked when somebody
asks what goes next, each in O(log n), so nothing is ranked while nothing has to be evicted. The epoch marks all leaves,
for policies whose order changes with time. Naming the next k blocks takes O(k log n). A policy that compares each
context with all others has all leaves ranked whenever somebody asks at a new time, in O(n log n).
"""

from __future__ import annotations

import enum
import heapq
import math
from collections.abc import Callable, Collection, Hashable, Iterable
from dataclasses import dataclass
from typing import Final, Generic, NamedTuple, TypeVar

from weft.core.kv_cache.policies import Action, Context, KvPolicy, Memory
from weft.core.kv_cache.prefix_tree import Block, PrefixTree

T = TypeVar("T")


class Rotation(Generic[T]):
    """Hands out every item once in each period, a few at a time.

    Args:
        items: Returns all items. It is called at the start of each period.
        period_s: The period in seconds of the caller's clock.
        most_a_s: Of more items than so many for each second of the period, the period is longer.
    """

    def __init__(self, items: Callable[[], Iterable[T]], period_s: float, most_a_s: float = math.inf) -> None:
        self._make = items
        self._least_s = self._period_s = period_s
        self._most_a_s = most_a_s
        self._items: list[T] = []
        self._done = 0
        self._began_s = self._asked_s = -math.inf

    def due(self, now_s: float) -> list[T]:
        """The items whose turn has come since the previous call; all items if that was a period ago or more."""
        is_late, self._asked_s = now_s >= self._asked_s + self._period_s, now_s
        rest: list[T] = []
        if is_late or now_s >= self._began_s + self._period_s:
            rest = [] if is_late else self._items[self._done :]
            self._items, self._done, self._began_s = list(self._make()), 0, now_s
            self._period_s = max(self._least_s, len(self._items) / self._most_a_s)
        share = 1.0 if is_late else (now_s - self._began_s) / self._period_s
        until = math.ceil(share * len(self._items))
        part = self._items[self._done : until]
        self._done = max(self._done, until)
        return rest + part


LEAST_MOVED: Final = 32  # blocks that are named at a time, so that steps that take one each do not each ask
_MOST_STALE: Final = 64  # entries that a heap or a set may have beyond a multiple of those that are current


class Group(enum.IntEnum):
    """Groups of leaves; a lower group is evicted before a higher one."""

    ENDED = 0  # no open program uses it
    SPILLED = 1  # host memory has it as well
    LEFT = 2  # the policy neither holds nor spills it
    HELD = 3  # the policy holds it


class EvictionRank(NamedTuple):
    """A leaf's place in the order of eviction; the lowest goes first."""

    group: int
    worth: float
    depth: int  # negative, so that the longer of two contexts of equal worth is shortened first


_LAST: Final = EvictionRank(Group.HELD + 1, 0.0, 0)


@dataclass(eq=False, slots=True)
class Leaf:
    """A block as a leaf: what it would be if the blocks behind it were gone."""

    block: Block
    contexts: list[Context]
    used_s: float
    is_common: bool
    children: int

    @classmethod
    def of(cls, block: Block) -> Leaf:
        return cls(block, list(block.contexts), block.used_s, block.is_common, len(block.children))

    def parent_of_same_rank(self) -> Block | None:
        """The block before it, if that has no other child and nothing that would change the rank. None: it has."""
        before = self.block.parent
        if before is None or before.pins or before.contexts or len(before.children) > 1:
            return None
        return before if before.used_s <= self.used_s and before.is_common <= self.is_common else None

    def merge_child(self, child: Leaf) -> None:
        """A child of the block is gone. Its contexts end in the block now."""
        self.contexts += child.contexts
        self.used_s = max(self.used_s, child.used_s)
        self.is_common |= child.is_common
        self.children -= 1


class EvictionOrder:
    """Orders the leaves of a tree."""

    def __init__(self, policy: KvPolicy, tree: PrefixTree, memory: Memory) -> None:
        self.memory = memory
        self._policy = policy
        self._tree = tree
        self._seen = math.inf, 0  # `oldest_s` and `largest_tokens` of all contexts when they were compared last
        self._compared_s = -math.inf  # when that was
        self._heap: list[tuple[EvictionRank, int, int, Block]] = []
        self._expiries: list[tuple[float, int, int, Block]] = []
        self._unranked: dict[Block, None] = {}  # marked blocks, until somebody asks
        self._are_all_marked = False
        self._entries = 0
        self._most_entries = _MOST_STALE  # of the heap; beyond it, old entries are dropped
        self._most_expiries = _MOST_STALE

    def mark(self, block: Block) -> None:
        """Something has changed for a block. It is ranked again if it is a leaf when somebody asks."""
        block.version = 0  # makes its entry invalid
        self._unranked[block] = None
        if len(self._unranked) > _MOST_STALE + 2 * len(self._tree):
            self._unranked = {each: None for each in self._unranked if each.version == 0}

    def _rank_marked(self, now_s: float) -> None:
        if self._are_all_marked:
            self._mark_each(sorted(self.leaves(), key=lambda block: block.number))
            self._are_all_marked = False
        marked, self._unranked = self._unranked, {}
        for block in marked:
            if block.is_leaf and not block.version:  # removed blocks have -1
                self._rank(block, now_s)

    def _rank(self, block: Block, now_s: float) -> None:
        self._entries += 1
        block.version = self._entries
        rank = self.rank_of(block, now_s)
        heapq.heappush(self._heap, (rank, self._entries, block.version, block))
        if rank.group == Group.HELD:
            until_s = min((c.decision.until_s for c in block.contexts if _is_held(c, now_s)), default=math.inf)
            heapq.heappush(self._expiries, (until_s, self._entries, block.version, block))
        if len(self._heap) > self._most_entries:
            self._heap = [entry for entry in self._heap if _is_current(entry)]
            heapq.heapify(self._heap)
            self._most_entries = _MOST_STALE + 3 * len(self._heap)
        if len(self._expiries) > self._most_expiries:
            self._expiries = [entry for entry in self._expiries if _is_current(entry)]
            heapq.heapify(self._expiries)
            self._most_expiries = _MOST_STALE + 3 * len(self._expiries)

    def mark_all(self) -> None:
        """Mark all leaves. O(1); call it in each epoch. They are found when somebody asks what goes next."""
        self._are_all_marked = True

    def leaves(self) -> list[Block]:
        """The blocks that can be evicted. O(n) for n leaves."""
        marked = [block for block in self._unranked if block.is_leaf and not block.version]
        return marked + [entry[-1] for entry in self._heap if _is_current(entry)]

    def evict(self, now_s: float) -> Block | None:
        """Remove the next block from the tree and return it. None if every block is in use."""
        self._refresh(now_s)
        while self._heap:
            entry = heapq.heappop(self._heap)
            if _is_current(entry):
                block = entry[-1]
                self._tree.remove(block)
                if block.parent is not None:
                    self.mark(block.parent)
                return block
        return None

    def peek(self, now_s: float) -> tuple[EvictionRank, Block] | None:
        """The next block with its rank. None if every block is in use."""
        self._refresh(now_s)
        while self._heap:
            if _is_current(self._heap[0]):
                return self._heap[0][0], self._heap[0][-1]
            heapq.heappop(self._heap)
        return None

    def next_blocks(self, count: int, now_s: float) -> list[Hashable]:
        """The keys of the blocks that would be evicted next, in this order, at most `count`. Nothing is evicted."""
        self._refresh(now_s)
        taken: list[tuple[EvictionRank, int, int, Block]] = []
        opened: list[tuple[EvictionRank, int, Leaf]] = []  # parents that would have become leaves
        changed: dict[Block, Leaf] = {}
        found: list[Hashable] = []
        while len(found) < count:
            while self._heap and not _is_current(self._heap[0]):
                heapq.heappop(self._heap)
            if self._heap and (not opened or self._heap[0][0] <= opened[0][0]):
                taken.append(heapq.heappop(self._heap))
                rank, leaf = taken[-1][0], Leaf.of(taken[-1][-1])
            elif opened:
                rank, _, leaf = heapq.heappop(opened)
            else:
                break
            found.append(leaf.block.key)
            # In most cases the blocks before it in the chain follow, because only their depth differs.
            other = min(self._heap[0][0] if self._heap else _LAST, opened[0][0] if opened else _LAST)
            goes_on = rank[:2] < other[:2]
            while len(found) < count and (before := leaf.parent_of_same_rank()) is not None:
                leaf.block = before
                if not goes_on and (rank := EvictionRank(rank.group, rank.worth, -before.depth)) > other:
                    heapq.heappush(opened, (rank, len(found), leaf))
                    break
                found.append(before.key)
            else:
                self._add_parent(leaf, changed, opened, len(found), now_s)
        for entry in taken:
            heapq.heappush(self._heap, entry)
        return found

    def _add_parent(
        self,
        leaf: Leaf,
        changed: dict[Block, Leaf],
        opened: list[tuple[EvictionRank, int, Leaf]],
        order: int,
        now_s: float,
    ) -> None:
        """If a leaf were gone, its parent might be a leaf. Then add the parent to `opened`."""
        parent = leaf.block.parent
        if parent is None:
            return
        left = changed.get(parent)
        if left is None:
            left = changed[parent] = Leaf.of(parent)
        left.merge_child(leaf)
        if not left.children and not parent.pins:
            heapq.heappush(opened, (self.rank_of(parent, now_s, left), order, left))

    def check_integrity(self) -> None:
        """Assert that each leaf has one current entry, and nothing else has. For tests."""
        current = self.leaves()
        leaves = self._tree.leaves()
        if len(current) != len(leaves) or set(current) != set(leaves):
            raise AssertionError(f"{len(current)} leaves are ranked, and there are {len(leaves)}")

    def rank_of(self, block: Block, now_s: float, leaf: Leaf | None = None) -> EvictionRank:
        """The rank of a leaf, or of a block as the leaf that it would be: that of its best contexts."""
        of = leaf or block
        return rank_of(
            self._policy, self._memory, of.contexts, now_s, used_s=of.used_s, is_common=of.is_common, depth=block.depth
        )

    @property
    def _memory(self) -> Memory:
        """The memory, with what was compared of all contexts."""
        if not self._policy.compares_with_all:
            return self.memory
        return self.memory._replace(oldest_s=self._seen[0], largest_tokens=self._seen[1])

    def compare(self, now_s: float) -> None:
        """Compare all contexts as they are at this time, if the policy asks for that. Call it before `rank_of`.

        Within one instant the comparison stands, whatever is evicted, so all ranks of that instant can be compared.
        """
        if not self._policy.compares_with_all or now_s == self._compared_s:
            return
        among = self.memory.among(self._tree.contexts())
        self._seen, self._compared_s = (among.oldest_s, among.largest_tokens), now_s
        self._mark_each(self.leaves())

    def _mark_each(self, leaves: list[Block]) -> None:
        self._heap.clear()
        self._expiries.clear()
        for block in leaves:
            self.mark(block)

    def _refresh(self, now_s: float) -> None:
        """Rank the marked leaves, and those whose hold has expired."""
        self.compare(now_s)
        self._rank_marked(now_s)
        while self._expiries and self._expiries[0][0] <= now_s:
            entry = heapq.heappop(self._expiries)
            if _is_current(entry):
                self._rank(entry[-1], now_s)


def rank_of(
    policy: KvPolicy,
    memory: Memory,
    contexts: Collection[Context],
    now_s: float,
    *,
    used_s: float,
    is_common: bool,
    depth: int,
) -> EvictionRank:
    """The rank of a leaf: that of its best contexts.

    Args:
        is_common: Whether several programs have used it.
        depth: The number of blocks, or of tokens, before it in its context.
    """
    if not contexts:
        if policy.evicts_ended_first and not is_common:  # nobody comes back for it, whatever the policy expects
            return EvictionRank(Group.ENDED, used_s, -depth)
        return EvictionRank(Group.LEFT, policy.worth_of_nobody(used_s, memory, now_s), -depth)
    if len(contexts) == 1:
        (one,) = contexts
        return EvictionRank(group_of(one, now_s), policy.worth_together((policy.worth(one, memory, now_s),)), -depth)
    groups = [group_of(context, now_s) for context in contexts]
    group = max(groups)
    worths = [policy.worth(each, memory, now_s) for each, of in zip(contexts, groups, strict=True) if of == group]
    return EvictionRank(group, policy.worth_together(worths), -depth)


def group_of(context: Context, now_s: float) -> Group:
    """The group that a context's decision puts it in."""
    if context.decision.action is Action.SPILL and context.on_host and not context.is_fetched:
        return Group.SPILLED
    return Group.HELD if _is_held(context, now_s) else Group.LEFT


def _is_held(context: Context, now_s: float) -> bool:
    return context.decision.action is Action.KEEP and now_s < context.decision.until_s


def _is_current(entry: tuple[object, int, int, Block]) -> bool:
    return entry[2] == entry[-1].version and entry[-1].is_leaf
