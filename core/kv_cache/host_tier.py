"""The KV blocks that host memory has, the contexts that they belong to, and the order in which they are given up.

One tier holds the blocks of preempted calls and of open programs between their calls, and, as long as there is room,
those of ended programs, which others may repeat. The blocks form a tree of prefixes, as on the device. A block stays as
long as a context ends in it or behind it. So shared blocks are there once. A chain may have gaps where blocks were not
copied yet.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import ClassVar

from weft.core.kv_cache.eviction_order import EvictionOrder, EvictionRank, Group, Leaf
from weft.core.kv_cache.policies import Context, KvPolicy, Memory
from weft.core.kv_cache.prefix_tree import Block, PrefixTree


class Longest(KvPolicy):
    """The rule without a KV policy: host memory keeps the longest contexts, which cost most to compute again."""

    evicts_ended_first: ClassVar[bool] = True

    def worth(self, context: Context, memory: Memory, now_s: float) -> float:
        return context.host_tokens


class _HostTree(PrefixTree):
    def _note_tokens(self, context: Context, tokens: int) -> None:
        context.host_tokens = tokens


class _HostOrder(EvictionOrder):
    """Orders by worth alone, because holds and spills concern the device only."""

    def rank_of(self, block: Block, now_s: float, leaf: Leaf | None = None) -> EvictionRank:
        of, depth = leaf or block, -block.depth
        needed = [context for context in of.contexts if context.is_needed]
        if not needed:
            return EvictionRank(Group.SPILLED if of.contexts else Group.ENDED, of.used_s, depth)
        worths = (self._policy.worth(context, self._memory, now_s) for context in needed)
        return EvictionRank(Group.LEFT, self._policy.worth_together(worths), depth)


class HostTier:
    """The blocks in host memory by key, with their slots. It neither copies nor allocates.

    `free` is called with each slot that becomes free.

    Attributes:
        slots: The slot of each block by the block's key.
        shortened: Contexts that have lost blocks. The caller empties it.
    """

    def __init__(self, policy: KvPolicy, block_tokens: int, memory: Memory, free: Callable[[int], None]) -> None:
        self.tree = _HostTree(block_tokens)
        self.order = _HostOrder(policy, self.tree, memory)
        self.slots: dict[Hashable, int] = {}
        self.shortened: dict[Context, None] = {}
        self._free = free

    def held(self, chain: Sequence[Hashable], first: int = 0) -> int:
        """How many blocks of a chain host memory has in a row, from index `first` on."""
        count = 0
        while first + count < len(chain) and chain[first + count] in self.slots:
            count += 1
        return count

    def put(self, context: Context, chain: Sequence[Hashable], now_s: float) -> Block | None:
        """Let a context end at the end of this chain, unless it ends behind that already.

        Older contexts of the same program on the chain are given up.

        Returns:
            The chain's last block. It is pinned until the caller calls `unpin`.
        """
        block = self.tree.extend(context.program, chain, now_s)
        self.tree.pin(block)
        last = self.tree.end_of(context)
        while last is not None and block is not None and last.depth > block.depth:
            last = last.parent
        if block is None or last is block:
            return block
        before = self.tree.drop_context(context)
        for each in self.tree.contexts_on(context.program, block):
            self.drop(each)
        self.tree.end_context(context, block)
        self._trim(before)
        return block

    def claim(self, context: Context, chain: Sequence[Hashable], now_s: float) -> None:
        """A call has left a context. It takes over the blocks of the contexts that it continues."""
        there = self.tree.hit_blocks(chain)
        if there:
            self.unpin(self.put(context, chain[:there], now_s))
            context.on_host = self.held(chain) == len(chain)

    def unpin(self, block: Block | None) -> None:
        """Unpin a block of `put`, once the copies to or from its chain are planned for good."""
        self.tree.unpin(block)
        self._trim(block)

    def drop(self, context: Context) -> None:
        """Give up a context. Blocks that no other context needs become free."""
        self._trim(self.tree.drop_context(context))
        self.shortened.pop(context, None)
        context.host_tokens, context.on_host = 0, False

    def lose(self, key: Hashable) -> None:
        """The copy of a block is not valid. Its chain has a gap from now on."""
        slot = self.slots.pop(key, None)
        if slot is None:
            return
        self._free(slot)
        block = self.tree.get(key)
        below = [block] if block is not None else []
        for each in below:
            for context in each.contexts:
                context.on_host = False
                self.shortened[context] = None
            below += each.children
        self._trim(block)

    def evict(self, count: int, rank: EvictionRank | None, now_s: float) -> int:
        """Give up blocks of rank below `rank` until `count` slots have become free. None: blocks of any rank.

        Returns how many slots became free.
        """
        freed = 0
        while freed < count and (first := self.order.peek(now_s)) is not None:
            lowest, block = first
            if rank is not None and lowest[:2] >= rank[:2]:
                break
            freed += block.key in self.slots
            self._remove(block)
            self._trim(block.parent)
        return freed

    def rank_of(self, context: Context, now_s: float) -> EvictionRank:
        """The rank of a context, comparable with that of blocks of other contexts."""
        block = self.tree.end_of(context)
        if block is None:
            return EvictionRank(Group.ENDED, 0.0, 0)
        self.order.compare(now_s)
        return self.order.rank_of(block, now_s, Leaf(block, [context], now_s, is_common=False, children=0))

    def rank_again(self, contexts: Iterable[Context]) -> None:
        """Something has changed for these contexts. Some of them may not be in host memory."""
        for context in contexts:
            block = self.tree.end_of(context)
            if block is not None:
                self.order.mark(block)

    def _trim(self, block: Block | None) -> None:
        """Remove blocks that no context needs, and gaps, from the end of a chain."""
        while block is not None and self.tree.get(block.key) is block:
            if not block.is_leaf or (block.contexts and block.key in self.slots):
                self.order.mark(block)
                return
            parent = block.parent
            self._remove(block)
            block = parent

    def _remove(self, block: Block) -> None:
        contexts = list(block.contexts)
        slot = self.slots.pop(block.key, None)
        self.tree.remove(block)
        for context in contexts:
            if slot is not None:
                context.on_host = False
                self.shortened[context] = None
        if slot is not None:
            self._free(slot)

    def check_integrity(self) -> None:
        """Assert that the counts agree, and that every block belongs to a context. For tests."""
        self.tree.check_integrity()
        self.order.check_integrity()
        if not all(key in self.tree for key in self.slots):
            raise AssertionError("a slot's block is not in the tree")
        if len(set(self.slots.values())) != len(self.slots):
            raise AssertionError("two blocks have one slot")
        if any(not leaf.contexts for leaf in self.tree.leaves()):
            raise AssertionError("a block of nobody is kept")
