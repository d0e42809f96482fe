"""The cached blocks as a tree of prefixes, with the contexts that end in each block.

A context needs the block in which it ends, and all blocks before it. Only leaves can be evicted, so a prefix is evicted
from its end, and a block stays as long as a block behind it stays. When a leaf goes, its contexts get shorter: from
then on they end in its parent. A block therefore need not list all contexts that need it, only those that end in it.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Hashable, Sequence, Set
from dataclasses import dataclass, field

from weft.core.kv_cache.policies import Context


@dataclass(eq=False, slots=True)
class Block:
    """A cached block. Compared by identity."""

    key: Hashable  # stands for its tokens and all before them
    parent: Block | None
    program: Hashable  # the program that brought it
    depth: int  # blocks before it
    used_s: float
    children: dict[Block, None] = field(default_factory=dict)
    pins: int = 0  # 1 for each running call that ends in it, and 1 for each pinned child
    is_common: bool = False  # another program has used it, or a block behind it
    contexts: dict[Context, None] = field(default_factory=dict)  # the contexts that end in it
    needed_by: int = 0  # contexts that end in it, and children that a context needs
    version: int = 0  # the number of its valid entry in the order of eviction
    number: int = 0  # of the blocks that the tree has had, in the order in which they came

    @property
    def is_leaf(self) -> bool:
        """Whether it can be evicted."""
        return not self.children and not self.pins


def path(block: Block | None) -> list[Block]:
    """The blocks of a chain from the first one to this block."""
    found = []
    while block is not None:
        found.append(block)
        block = block.parent
    return found[::-1]


class PrefixTree:
    """The tree. It records blocks, running calls and contexts, and decides nothing."""

    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self.pinned = 0  # blocks that running calls use
        self.needed = 0  # blocks that a context has
        self._blocks: dict[Hashable, Block] = {}
        self._ends: dict[Hashable, dict[Context, Block]] = {}  # by program: where its contexts end
        self._numbers = itertools.count()
        self._common = 0  # how often a block has become common
        # For each context: its own tokens, with the end and `_common` for which they were counted.
        self._own: dict[Context, tuple[Block, int, int]] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._blocks

    def get(self, key: Hashable) -> Block | None:
        """The block of a key, if it is cached."""
        return self._blocks.get(key)

    def leaves(self) -> list[Block]:
        """Every block that can be evicted."""
        return [block for block in self._blocks.values() if block.is_leaf]

    def hit_blocks(self, chain: Sequence[Hashable]) -> int:
        """How many blocks of a chain are cached, from its beginning on."""
        low, high = 0, len(chain)
        while low < high:  # bisection: only a beginning of a chain can be cached
            middle = (low + high) // 2
            if chain[middle] in self._blocks:
                low = middle + 1
            else:
                high = middle
        return low

    def extend(self, program: Hashable, chain: Sequence[Hashable], now_s: float) -> Block | None:
        """Add the missing blocks of a chain. Returns its last block; None if the chain is empty."""
        hit = self.hit_blocks(chain)
        last = self._blocks[chain[hit - 1]] if hit else None
        if last is not None and last.program != program:
            self._make_common(last)
        for key in chain[hit:]:
            block = Block(key, last, program, last.depth + 1 if last else 0, now_s, number=next(self._numbers))
            self._blocks[key] = block
            if last is not None:
                last.children[block] = None
            last = block
        if last is not None:
            last.used_s = max(last.used_s, now_s)
        return last

    def pin(self, block: Block | None) -> None:
        """A running call ends in this block, and uses those before it."""
        while block is not None:
            block.pins += 1
            if block.pins > 1:
                return
            self.pinned += 1
            block = block.parent

    def unpin(self, block: Block | None) -> None:
        """The running call that ended in this block has left."""
        while block is not None:
            block.pins -= 1
            if block.pins:
                return
            self.pinned -= 1
            block = block.parent

    def end_context(self, context: Context, block: Block) -> list[Context]:
        """Let a context end in this block. Contexts of its program that end earlier in the chain are given up, and
        returned."""
        before = self.contexts_on(context.program, block)
        self._need(block)  # before the others are given up, so that the shared blocks are needed all the time
        for each in before:
            self.drop_context(each)
        self._ends.setdefault(context.program, {})[context] = block
        block.contexts[context] = None
        self._note_tokens(context, (block.depth + 1) * self.block_tokens)
        return before

    def contexts_on(self, program: Hashable, block: Block | None) -> list[Context]:
        """The contexts of a program that end in this block or before it in its chain."""
        ends = self._ends.get(program)
        if not ends:
            return []
        found: list[Context] = []
        shallowest = min(end.depth for end in ends.values())
        while block is not None and block.depth >= shallowest and len(found) < len(ends):
            found += (each for each in block.contexts if each.program == program)
            block = block.parent
        return found

    @property
    def programs(self) -> Set[Hashable]:
        """The programs that have contexts."""
        return self._ends.keys()

    def contexts(self) -> list[Context]:
        """The contexts of all programs."""
        return [context for ends in self._ends.values() for context in ends]

    def contexts_beyond(self, other: PrefixTree) -> list[Context]:
        there, none = other._ends, dict[Context, Block]()
        return [each for program, ends in self._ends.items() for each in ends if each not in there.get(program, none)]

    def contexts_of(self, program: Hashable) -> list[Context]:
        """The contexts of a program, the oldest first."""
        return list(self._ends.get(program, ()))

    def end_of(self, context: Context) -> Block | None:
        """The block that a context ends in; None if nothing of it is cached."""
        return self._ends.get(context.program, {}).get(context)

    def own_tokens(self, context: Context) -> int:
        """The tokens of a context that no other program has used. O(1) if they are as at the last call."""
        block = end = self.end_of(context)
        if end is None:
            return 0
        known = self._own.get(context)
        if known is not None and known[:2] == (end, self._common):
            return known[2]
        count = 0
        while block is not None and block.program == context.program and not block.is_common:
            count += 1
            block = block.parent
        self._own[context] = end, self._common, count * self.block_tokens
        return count * self.block_tokens

    def _make_common(self, block: Block) -> None:
        if not block.is_common:
            block.is_common = True
            self._common += 1

    def tokens_of(self, program: Hashable) -> int:
        """The tokens of all contexts of a program. Shared tokens count once."""
        seen: set[Block] = set()
        ends = list(self._ends.get(program, {}).values())
        if len(ends) == 1:
            return (ends[0].depth + 1) * self.block_tokens
        for end in ends:
            block: Block | None = end
            while block is not None and block not in seen:
                seen.add(block)
                block = block.parent
        return len(seen) * self.block_tokens

    def drop_context(self, context: Context) -> Block | None:
        """Forget a context. Its blocks stay. Returns the block in which it ended."""
        block = self._forget(context)
        if block is not None:
            del block.contexts[context]
        self._need_no_more(block)
        return block

    def _forget(self, context: Context) -> Block | None:
        self._own.pop(context, None)
        ends = self._ends.get(context.program)
        block = ends.pop(context, None) if ends is not None else None
        if ends is not None and not ends:
            del self._ends[context.program]
        return block

    def _need(self, block: Block | None) -> None:
        while block is not None:
            block.needed_by += 1
            if block.needed_by > 1:
                return
            self.needed += 1
            block = block.parent

    def _need_no_more(self, block: Block | None) -> None:
        while block is not None:
            block.needed_by -= 1
            if block.needed_by:
                return
            self.needed -= 1
            block = block.parent

    def chain(self, block: Block | None) -> list[Hashable]:
        """The keys of a chain from its first block to this block."""
        return [each.key for each in path(block)]

    def roots(self) -> list[Block]:
        """The first blocks of chains."""
        return [block for block in self._blocks.values() if block.parent is None]

    def remove(self, block: Block) -> None:
        """Remove a block that no running call uses, and all blocks behind it, which cannot be found without it.

        Contexts that end in a removed block end in the parent of `block` from then on.
        """
        parent, behind = block.parent, [block]
        if parent is not None:
            del parent.children[block]
        while behind:
            gone = behind.pop()
            behind += gone.children
            del self._blocks[gone.key]
            gone.version = -1
            self.needed -= gone.needed_by > 0
            if parent is not None:
                parent.used_s = max(parent.used_s, gone.used_s)
                if gone.is_common:
                    self._make_common(parent)
                parent.needed_by += len(gone.contexts)
            for context in list(gone.contexts):
                if parent is None:
                    self._forget(context)
                    self._note_tokens(context, 0)
                else:
                    self._ends[context.program][context] = parent
                    parent.contexts[context] = None
                    self._note_tokens(context, (parent.depth + 1) * self.block_tokens)
            gone.contexts.clear()
        if parent is not None:
            parent.needed_by -= block.needed_by > 0

    def _note_tokens(self, context: Context, tokens: int) -> None:
        """Note how many tokens of a context are in the tree now."""
        context.tokens = tokens

    def check_integrity(self) -> None:
        """Assert that the counts agree with the tree. For tests."""
        blocks = self._blocks.values()
        children = Counter(block.parent for block in blocks)
        inner = [(block, block.parent) for block in blocks if block.parent is not None]
        ends = {(context, block) for each in self._ends.values() for context, block in each.items()}
        checks = {
            "a block has lost its parent": all(self._blocks.get(parent.key) is parent for _, parent in inner),
            "a depth is wrong": all(block.depth == parent.depth + 1 for block, parent in inner),
            "a pinned block follows one that is not": all(parent.pins or not block.pins for block, parent in inner),
            "children are miscounted": all(len(block.children) == children[block] for block in blocks),
            "pinned blocks are miscounted": self.pinned == sum(block.pins > 0 for block in blocks),
            "needed blocks are miscounted": self.needed == sum(block.needed_by > 0 for block in blocks),
            "who needs a block is miscounted": all(
                block.needed_by == len(block.contexts) + sum(each.needed_by > 0 for each in block.children)
                for block in blocks
            ),
            "contexts and blocks disagree": ends == {(each, block) for block in blocks for each in block.contexts},
            "a program without contexts is kept": all(self._ends.values()),
            "own tokens are kept of a context that is gone": all(self.end_of(each) for each in self._own),
        }
        failed = [problem for problem, holds in checks.items() if not holds]
        if failed:
            raise AssertionError("; ".join(failed))
