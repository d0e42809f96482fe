"""What vLLM's next step has room for, if some calls started and others were preempted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from weft.core.policies import Call, StepTokens
from weft.engine.kv_cache.store import HostStore
from weft.engine.vllm_compat.names import KVCacheBlock, KVCacheManager, Request


class StepRoom:
    """Counts the KV blocks and tokens that calls need and give back, as vLLM does when it admits and preempts them.

    A block that another running call references counts for neither. A block that only the prefix cache holds is free,
    and a call that finds it takes it. Calls that decode get their tokens first, and the blocks for them.

    Args:
        running: The running requests and their calls, in rank order.
    """

    def __init__(
        self,
        manager: KVCacheManager,
        requests: Mapping[str, Request],
        running: Sequence[tuple[Request, Call]],
        step_tokens: int,
        swap: HostStore | None = None,
    ) -> None:
        self.started: list[str] = []  # the requests that would start
        self._manager = manager
        self._requests = requests
        self._swap = swap
        self._growth: dict[str, int] = {}  # blocks that calls which decode take in the step
        prompts = []
        for request, call in running:
            after = request.num_tokens_with_spec + request.num_output_placeholders
            new_tokens = max(0, after - request.num_computed_tokens)
            if request.is_prefill_chunk:
                prompts.append((call, new_tokens))
            else:
                step_tokens -= new_tokens
                self._growth[call.key] = self._growth_of(request, after)
        self._tokens = StepTokens(step_tokens, prompts)
        self._free = manager.block_pool.get_num_free_blocks() - manager.watermark_blocks - sum(self._growth.values())
        self._references: dict[int, int] = {}  # by block, of the blocks whose number of references would change
        self._brought: set[Any] = set()  # hashes of the blocks that calls which would start bring
        self._needed = 0  # free blocks that the offered call takes
        self._found: dict[int, KVCacheBlock] = {}  # the blocks that it finds in the prefix cache, by id
        self._new_hashes: list[Any] = []  # of its other full blocks
        self._to_compute = 0  # tokens that it computes
        self._key = ""

    def offer(self, call: Call) -> bool:
        if not self._tokens.left_for(call):
            return False
        self._key = call.key
        request, manager = self._requests[call.key], self._manager
        coordinator = manager.coordinator
        found, found_tokens = manager.empty_kv_cache_blocks.blocks, 0
        if manager.prefix_cache_lookup_enabled(request):
            found, found_tokens, _ = coordinator.find_longest_cache_hit(request.block_hashes, request.num_tokens - 1)
        self._needed = coordinator.get_num_blocks_to_allocate(
            request_id=call.key,
            num_tokens=request.num_tokens,
            new_computed_blocks=found,
            num_encoder_tokens=0,
            total_computed_tokens=found_tokens,
            num_local_computed_tokens=found_tokens,
            num_tokens_main_model=request.num_tokens,
            apply_admission_cap=True,
            prefill_end=max(request.num_prompt_tokens, request.num_tokens - 1),
        )
        self._found = {block.block_id: block for group in found for block in group if not block.is_null}
        if self._references:
            for number, block in self._found.items():
                references = self._references.get(number, block.ref_cnt)
                self._needed += (references == 0) - (block.ref_cnt == 0)
        if len(found) == 1 and manager.prefix_cache_lookup_enabled(request):
            self._new_hashes = list(request.block_hashes[len(found[0]) :])
            # vLLM looks up no block with the last token, which it computes again.
            most = (request.num_tokens - 1) // coordinator.scheduler_block_size - len(found[0])
            for count, each in enumerate(self._new_hashes):
                if each not in self._brought or count >= most:
                    break
                self._needed -= 1
                found_tokens += coordinator.scheduler_block_size
        loaded = 0
        if self._swap is not None and not request.skip_reading_prefix_cache:
            loaded = self._swap.match(call.key, request.block_hashes, found_tokens, request.num_tokens)
        self._to_compute = request.num_tokens - found_tokens - loaded
        return True

    def fits(self) -> bool:
        return self._needed <= self._free

    def start(self) -> None:
        self.started.append(self._key)
        self._tokens.take(self._to_compute)
        self._free -= self._needed
        for number, block in self._found.items():
            self._references[number] = self._references.get(number, block.ref_cnt) + 1
        self._brought.update(self._new_hashes)

    def keep(self, call: Call) -> None:
        self._tokens.keep(call)

    def shares(self) -> dict[str, int]:
        """The tokens of each running request that computes a prompt."""
        return {call.key: tokens for call, tokens in self._tokens.divide().items()}

    def preempt(self, call: Call) -> None:
        self._tokens.preempt(call)
        self._free += self._growth.pop(call.key, 0)
        for group in self._manager.get_blocks(call.key).blocks:
            for block in group:
                if block.is_null:
                    continue
                number = block.block_id
                references = self._references[number] = self._references.get(number, block.ref_cnt) - 1
                if references == 0:
                    self._free += 1
                    self._needed += number in self._found

    def _growth_of(self, request: Request, tokens: int) -> int:
        held = self._manager.get_blocks(request.request_id).blocks
        return len(held) * -(-tokens // self._manager.coordinator.scheduler_block_size) - sum(map(len, held))
