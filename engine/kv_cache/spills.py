"""What goes from the device to host memory between the calls of a program, and when.

A context that its policy spills is copied a part in each step, once the device may run out of blocks that nobody needs.
Where it does not, a copy would be of no use. Of the others a block is copied when vLLM is about to give it away: vLLM
tells who watches it (`BlockPool.unpin_blocks`), in the step that overwrites it, and the workers copy out before they
write.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

from weft.core.kv_cache.policies import Context
from weft.core.kv_cache.prefix_tree import Block, path
from weft.core.kv_cache.spill_ahead import STEP_BYTES, is_short
from weft.core.kv_cache.tiered import TieredRetention
from weft.engine.kv_cache.store import HostStore
from weft.engine.vllm_compat.names import BlockPool, KVCacheBlock


class Spills:
    """Copies contexts to host memory, with a soft hold's knowledge of the device's blocks.

    Args:
        store: Host memory.
        retention: The contexts.
        pool: vLLM's blocks.
        block_of: The block that holds a key, if there is one.
        forget: Is told of keys that vLLM evicts, and of the time.
    """

    def __init__(
        self,
        store: HostStore,
        retention: TieredRetention,
        pool: BlockPool,
        block_of: Callable[[Hashable], KVCacheBlock | None],
        forget: Callable[[Sequence[Hashable], float], None],
    ) -> None:
        self._store = store
        self._retention = retention
        self._pool = pool
        self._block_of = block_of
        self._forget = forget
        self._watched: dict[int, tuple[Hashable, Any]] = {}  # by block: its key and its hash
        self._reused: dict[Hashable, int] = {}  # in this step: blocks by key
        self._gone: list[Hashable] = []  # that vLLM has evicted, and nobody knows yet
        self._copying: deque[tuple[int, Context]] = deque()  # with the number of the plan that completes them
        self._is_short = False
        self._step_blocks = max(1, int(STEP_BYTES / (store.choice.token_bytes * store.block_tokens)))
        store.at_plan = self._spill_reused

    def watch(self, blocks: Iterable[tuple[Hashable, KVCacheBlock]]) -> None:
        """Have vLLM tell when it gives these blocks away. A call that is about to be freed has them."""
        new = [(key, block) for key, block in blocks if self._watched.get(block.block_id) != (key, block.block_hash)]
        if not new:
            return
        self._watched.update((block.block_id, (key, block.block_hash)) for key, block in new)
        held = [block for _, block in new]
        self._pool.touch(held)
        self._pool.unpin_blocks(held, self._on_reuse)  # the references are as before, only the watcher stays

    def plan(self, most_blocks: int) -> bool:
        """Plan copies of contexts that are to be spilled, as many as one step makes.

        Args:
            most_blocks: The most blocks that the next step can take.

        Returns:
            Whether a context is in host memory now that was not.
        """
        has_copied = False
        store, retention = self._store, self._retention
        while self._copying and self._copying[0][0] <= store.reported:
            context = self._copying.popleft()[1]
            chain = retention.chain_of(context)
            has_all = context.host_tokens >= max(1, len(chain) * store.block_tokens)  # not blocks that only others keep
            if has_all and store.tier.held(chain) == len(chain):
                retention.copied(context)
                has_copied = True
        of_nobody = self._pool.get_num_free_blocks() - retention.tree.needed
        self._is_short = is_short(of_nobody, most_blocks, len(self._pool.blocks))
        left = self._step_blocks if self._is_short else 0
        while retention.spills and left > 0:
            context = next(iter(retention.spills))
            chain = retention.chain_of(context)
            blocks: dict[int, int] = {}
            for index, key in enumerate(chain):
                if key in store.tier.slots:
                    continue
                block = self._block_of(key) if len(blocks) < left else None
                if block is None:
                    break
                blocks[index] = block.block_id
            left -= max(1, len(blocks))
            is_kept = self._pays(context) and store.keep(context, chain, blocks)
            if is_kept and left <= 0 and store.tier.held(chain) < len(chain):
                break  # the rest follows in the next step
            del retention.spills[context]
            if is_kept and chain and not blocks:
                retention.copied(context)
                has_copied = True
            elif is_kept and chain:
                self._copying.append((store.next_plan, context))
        return has_copied

    def reset(self) -> None:
        """vLLM has emptied its prefix cache."""
        self._reused.clear()
        self._gone.clear()
        self._copying.clear()
        self._retention.spills.clear()

    @property
    def wants_step(self) -> bool:
        """Whether a step would copy something."""
        is_done = bool(self._copying) and self._copying[0][0] <= self._store.reported
        return is_done or (self._is_short and bool(self._retention.spills))

    def _pays(self, context: Context) -> bool:
        return context.tokens >= self._store.choice.min_tokens

    def _on_reuse(self, block: KVCacheBlock) -> None:
        key, content = self._watched.pop(block.block_id)
        if block.block_hash == content:
            self._reused[key] = block.block_id

    def _spill_reused(self) -> None:
        """Of the blocks that the step overwrites, plan to copy those of open programs' contexts. They are forgotten
        later, since that delays the step."""
        reused, self._reused = self._reused, {}
        if not reused:
            return
        block_at, block_of = self._retention.tree.get, self._block_of
        lost: dict[Block, int] = {}
        ends: dict[Context, Block] = {}  # of the contexts that lose blocks and are not in host memory
        for key, number in reused.items():
            block = block_at(key)
            if block is None or block.pins:
                continue
            self._gone.append(key)
            if not block.children and all(context.on_host for context in block.contexts):
                continue  # nobody loses anything, which is the usual case
            if (at := block_of(key)) is not None and at.block_id != number:
                continue  # another block holds the same
            lost[block] = number
            if not block.children:
                ends.update((context, block) for context in block.contexts if not context.on_host)
                continue
            behind = [block]  # can still be read, and not be found
            for each in behind:
                if each is not block and each not in lost and (at := block_of(each.key)) is not None:
                    lost[each] = at.block_id
                if each.contexts:
                    ends.update((context, each) for context in each.contexts if not context.on_host)
                if each.children:
                    behind += (child for child in each.children if child not in lost)
        for context, end in ends.items():
            if self._pays(context):
                chain = path(end)
                numbers = {each.depth: lost[each] for each in chain if each in lost}
                self._store.keep(context, [each.key for each in chain[: max(numbers) + 1]], numbers)

    def forget_reused(self) -> None:
        """Forget what vLLM has evicted, unless it is there again."""
        gone, self._gone = self._gone, []
        if gone:
            self._forget([key for key in gone if self._block_of(key) is None], self._store.now_s)
