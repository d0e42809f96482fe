"""A tree of KV blocks, and the prompts that share them."""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Final, cast

from weft.core.trace.format import TraceProgram, in_order
from weft.core.trace.prefixes import common_prefix


class BlockNode:
    """A run of blocks that no call leaves before its end. Compared by identity.

    Attributes:
        is_common: Whether calls of several programs have begun to run with it, so far in the simulation.
    """

    __slots__ = ("_first", "begin", "children", "ids", "is_common", "parent", "program")

    def __init__(self, parent: BlockNode | None, begin: int, ids: array[int]) -> None:
        self.parent = parent
        self.begin = begin
        self.ids = ids
        self.children: dict[int, BlockNode] = {}  # by the first id of each
        self.program: Hashable = None  # the one that used it first
        self.is_common = False
        self._first: BlockNode | None = None

    @property
    def first(self) -> BlockNode:
        """The first node of its path, once the tree is complete."""
        if self._first is None:
            *_, self._first = self.path()
        return self._first

    @property
    def end(self) -> int:
        """The blocks up to its end."""
        return self.begin + len(self.ids)

    def path(self) -> Iterator[BlockNode]:
        """Yield the node and those before it, the last one first, without the root."""
        node = self
        while node.parent is not None:
            yield node
            node = node.parent

    def use(self, program: Hashable) -> None:
        """A call of a program has begun to run with the blocks up to the end of this node."""
        for node in self.path():
            if node.program == program or node.is_common:
                break  # so it is with the nodes before it
            if node.program is None:
                node.program = program
            else:
                node.is_common = True


class BlockTree:
    """The tree of the blocks of programs. Its root has no blocks."""

    def __init__(self) -> None:
        self.root: Final = BlockNode(None, 0, array("q"))

    def add(self, program: TraceProgram) -> list[BlockNode]:
        """Add the blocks of a program with `block_tokens`. Returns for each of its calls, in their order, the node with
        which the known blocks end."""
        block_tokens = program.block_tokens or 1
        ends: dict[str, BlockNode] = {}
        for call in in_order(program.calls):
            shared = call.shared_prefix_tokens // block_tokens if call.parents else 0
            before = ends[call.parents[0]] if call.parents else self.root
            ends[call.call_id] = self._extend(before, min(shared, before.end), call.hash_ids)
        return [ends[call.call_id] for call in program.calls]

    def _extend(self, before: BlockNode, depth: int, ids: array[int]) -> BlockNode:
        """Add ids after the first `depth` blocks of a path, and return the node with which they end."""
        node = before
        while node.begin >= depth and node.parent is not None:
            node = node.parent
        done = 0
        while True:
            inside = depth - node.begin
            same = common_prefix(node.ids[inside:], ids[done:]) if inside < len(node.ids) else 0
            done, depth = done + same, depth + same
            if done == len(ids) or depth < node.end:
                node = self._cut(node, depth)
            if done == len(ids):
                return node
            child = node.children.get(ids[done])
            if child is None:
                node.children[ids[done]] = child = BlockNode(node, depth, ids[done:])
                return child
            node = child

    @staticmethod
    def _cut(node: BlockNode, depth: int) -> BlockNode:
        """Return the node that ends after `depth` blocks: `node`, or the first part of it, which is divided in two."""
        if depth == node.end:
            return node
        first, parent = depth - node.begin, cast("BlockNode", node.parent)  # the root, which has no blocks, ends at 0
        head = BlockNode(parent, node.begin, node.ids[:first])
        parent.children[head.ids[0]] = head
        node.parent, node.begin, node.ids = head, depth, node.ids[first:]
        head.children[node.ids[0]] = node
        return head


def block_ends(programs: Iterable[TraceProgram]) -> list[Sequence[BlockNode]]:
    """For each program, the nodes with which the known blocks of its calls end; empty without `block_tokens`."""
    tree = BlockTree()
    return [tree.add(program) if program.block_tokens is not None else () for program in programs]


def share_full_blocks(program: TraceProgram, block_tokens: int) -> TraceProgram:
    """Round the prefixes that a program's calls share down to full blocks, because vLLM shares only these.

    A call computes at least its last token again, so it finds no block that ends with its prompt. Programs with hash
    ids share full blocks of their own length.

    The KV of the last token that a parent generated was never computed. The first call that continues the parent
    computes it, and the parent's other children find it.
    """
    if block_tokens == 1 or program.block_tokens is not None:
        return program
    calls = []
    for call in program.calls:
        tokens = max(0, min(call.shared_prefix_tokens, call.prompt_tokens - 1))
        calls.append(replace(call, shared_prefix_tokens=tokens // block_tokens * block_tokens))
    return replace(program, calls=tuple(calls))
