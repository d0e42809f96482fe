"""The KV blocks of programs that have ended are evicted before those of others.

vLLM evicts the cached blocks that were used longest ago. It does not know that no call of an ended program will come.
Weft moves such blocks to the front of vLLM's list of free blocks. It changes nothing but that order: vLLM still counts
the blocks as free, and a call that happens to find one takes it.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any, Final

from weft.engine.kv_cache.order import CallKv, KvOrder, NextStep
from weft.engine.vllm_compat.names import BlockPool

_MOST_OWNERS: Final = 16  # a block that more programs share is a common prefix, which the next program shares too


@dataclass(slots=True)
class _Owned:
    """A block that programs have used."""

    content: Any  # its hash; another one means that vLLM has evicted it
    owners: dict[Hashable, None] = field(default_factory=dict)
    is_common: bool = False


class EndedFirst(KvOrder):
    """Knows which programs use which cached blocks, at most 16 programs for each block.

    Args:
        pool: vLLM's blocks, of a model with one kind of attention.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._owned: dict[int, _Owned] = {}  # by block
        self._blocks: dict[Hashable, dict[int, None]] = {}  # by program, in the order of its contexts
        self._due: dict[int, Any] = {}  # blocks of ended programs with their hashes

    def call_left(self, call: CallKv, now_s: float) -> None:
        del now_s
        program = call.program
        mine = self._blocks.setdefault(program, {})
        for number in call.block_ids:
            content = self._pool.blocks[number].block_hash
            if content is None:  # it is not full, and no other call can find it
                continue
            owned = self._owned.get(number)
            if owned is None or owned.content != content:
                self._drop(number)
                owned = self._owned[number] = _Owned(content)
            self._due.pop(number, None)
            if owned.is_common or program in owned.owners:
                continue
            owned.owners[program] = mine[number] = None
            if len(owned.owners) > _MOST_OWNERS:
                owned.is_common = True
                for each in owned.owners:
                    del self._blocks[each][number]
                owned.owners.clear()

    def program_ended(self, program: Hashable, now_s: float) -> None:
        del now_s
        for number in self._blocks.pop(program, ()):
            owned = self._owned[number]
            del owned.owners[program]
            if not owned.owners:
                del self._owned[number]
                self._due[number] = owned.content

    def before_step(self, step: NextStep, now_s: float) -> None:
        """Move the blocks of ended programs to the front of the free list, the ends of their contexts first.

        A block that is in use follows when it is free.
        """
        del step, now_s
        if not self._due:
            return
        queue, free, in_use = self._pool.free_block_queue, [], {}
        for number, content in self._due.items():
            block = self._pool.blocks[number]
            if block.block_hash != content:  # vLLM has evicted it
                continue
            if block.ref_cnt:
                in_use[number] = content
                continue
            queue.remove(block)
            free.append(block)
        queue.prepend_n(free[::-1])
        self._due = in_use

    def _drop(self, number: int) -> None:
        """vLLM has evicted what a block held."""
        owned = self._owned.pop(number, None)
        for program in owned.owners if owned is not None else ():
            del self._blocks[program][number]

    def check_integrity(self) -> None:
        forward = {(program, number) for program, blocks in self._blocks.items() for number in blocks}
        backward = {(program, number) for number, owned in self._owned.items() for program in owned.owners}
        if forward != backward:
            raise AssertionError(f"programs and blocks disagree: {forward ^ backward}")
