"""Forming the batch of a step: the calls that leave it, and the tokens of those that compute their prompts."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from weft.core.policies import Call, Policy, ProgramView, StepTokens
from weft.engine.kv_cache.store import HostStore
from weft.engine.scheduler.call_table import CallTable
from weft.engine.scheduler.ledger import Entry
from weft.engine.vllm_compat.names import AsyncScheduler, KVCacheBlock, KVCacheManager, Request, SchedulerOutput

_MANY: Final = 64  # calls that start in one step
_FEW: Final = 4  # calls that are each compared with the running one of worst rank


class BatchFormer:
    """Decides for which waiting calls a step has room, and what running calls give up for them.

    vLLM serves running requests before it admits waiting ones. It therefore learns before each step which running
    requests are preempted, and how many tokens of their prompts the others compute.

    Args:
        can_start: Whether vLLM could admit a waiting request in the next step, if there were room for it.
    """

    def __init__(
        self,
        scheduler: AsyncScheduler,
        policy: Policy,
        table: CallTable,
        swap: HostStore | None,
        can_start: Callable[[Request], bool],
    ) -> None:
        self.is_settled = False  # whether a step finds nothing to do either, as long as nothing happens
        self.turned_away: set[str] = set()  # waiting requests that had room in an earlier step, and vLLM did not admit
        self.shares: dict[str, int] = {}  # by running request with a prompt, the most tokens that it gets in the step
        self._scheduler = scheduler
        self._policy = policy
        self._table = table
        self._entries = table.entries
        self._swap = swap
        self._can_start = can_start
        self._awaited: list[str] = []  # the waiting requests for which the step has room
        self._has_prompts = False
        self._growing: int | None = None  # running calls whose last block is full; None: not counted since it changed
        # Models with Mamba layers compute prompts in chunks that end where vLLM says, and with a threshold vLLM itself
        # keeps long prompts from using up a step.
        self._divides_steps = not (
            scheduler.need_mamba_block_aligned_split or scheduler.scheduler_config.long_prefill_token_threshold
        )

    def form(self, *, admits: bool, may_preempt: bool, has_prompts: bool) -> list[Request]:
        """Find the running requests that waiting calls of higher queues outrank (Alg. 1 lines 32-39), and divide the
        step's tokens among prompts in rank order. The running requests must be in rank order. Returns those to preempt.

        Args:
            admits: Whether vLLM admits waiting requests in this step. If not, none displaces a running one.
            has_prompts: Whether running requests still compute their prompts.
        """
        scheduler, policy = self._scheduler, self._policy
        running = scheduler.running
        self.shares, self._awaited, self.is_settled = {}, [], False
        self._has_prompts = has_prompts
        free_slots = scheduler.max_num_active_reqs - len(running) - scheduler.num_waiting_for_streaming_input
        outranks = admits and policy.preempts and len(policy.waiting) > 0 and self._outranks(free_slots)
        if not (outranks and may_preempt) and not has_prompts:
            # A running call that computes again what it has had may be displaced once it has done so.
            last = ((request, self._entries[request.request_id]) for request in running[-1:])
            self.is_settled = admits and not (outranks or any(recomputes(request, entry) for request, entry in last))
            return []
        entries = [(request, self._entries[request.request_id]) for request in running]
        room = StepRoom(
            scheduler.kv_cache_manager,
            scheduler.requests,
            [(request, entry.call) for request, entry in entries],
            scheduler.max_num_scheduled_tokens,
            self._swap,
        )
        victims: list[Call] = []
        if outranks:
            victims = policy.victims(
                [entry.call for request, entry in entries if may_preempt and not recomputes(request, entry)],
                free_slots,
                ready=self._is_ready,
                room=room,
            )
        self._awaited = room.started
        if self._divides_steps:
            self.shares = room.shares()
        return [scheduler.requests[call.key] for call in victims]

    def _outranks(self, free_slots: int) -> bool:
        """Whether a waiting call may outrank a running one. Usually the first ones outrank none. Then no other does."""
        running = self._scheduler.running
        if not running or self._policy.is_settled(self._entries[running[-1].request_id].call.rank):
            return False
        if free_slots > (0 if self._has_prompts else _FEW):  # calls that start take tokens from prompts of worse rank
            return True
        entries = ((request, self._entries[request.request_id]) for request in reversed(running))
        last = next((entry.call for request, entry in entries if not recomputes(request, entry)), None)
        if last is None:
            return False
        # Those before need no other's slot. One that is not ready is passed over, and others after these may outrank.
        first_calls = itertools.islice(self._policy.waiting, max(0, free_slots) + 1)
        return any(not self._is_ready(call) or self._policy.outranks(call, last) for call in first_calls)

    def _is_ready(self, call: Call) -> bool:
        """Whether a waiting call may displace others in this step.

        vLLM may turn a call away although there is room for it, for example when the batch has the most LoRA adapters
        that it may have. Such a call displaces no other until the batch changes.
        """
        return call.key not in self.turned_away and self._can_start(self._scheduler.requests[call.key])

    def most_blocks(self) -> int:
        """The most KV blocks that the step can take, after `form`. Calls that vLLM admits out of turn are not counted,
        nor, with speculative decoding, how many tokens are accepted."""
        scheduler, waiting = self._scheduler, self._policy.waiting
        block_tokens = scheduler.block_size
        ahead = scheduler.num_spec_tokens + scheduler.num_lookahead_tokens  # besides the tokens that are known
        slots = scheduler.max_num_active_reqs - len(scheduler.running)
        starting = max(0, min(slots, len(waiting)))
        most = scheduler.max_num_scheduled_tokens // block_tokens + len(scheduler.running) + starting
        if self._swap is not None and starting:
            most += self._entries[waiting.peek().key].lost_tokens // block_tokens
        blocks = self.running_blocks()
        if starting > _MANY:
            return most
        for call in itertools.islice(waiting, starting):
            blocks += -(-(scheduler.requests[call.key].num_tokens + ahead) // block_tokens)
        return min(blocks, most)

    def running_blocks(self) -> int:
        """The most KV blocks that running calls take, with all of the prompts that they compute."""
        scheduler = self._scheduler
        block_tokens = scheduler.block_size
        # One that decodes takes a block each time when its last one is full. Calls that left since may be counted.
        if self._growing is None:
            full = [request for request in scheduler.running if not request.num_computed_tokens % block_tokens]
            self._growing = len(full)
        ahead = scheduler.num_spec_tokens + scheduler.num_lookahead_tokens
        blocks = self._growing + -(-ahead // block_tokens) * len(scheduler.running)
        if self._has_prompts:
            prompts = (request for request in scheduler.running if request.is_prefill_chunk)
            blocks += sum((each.num_tokens - each.num_computed_tokens) // block_tokens + 1 for each in prompts)
        return blocks

    def queue(self) -> Iterator[tuple[ProgramView, int]]:
        """The programs of the calls that wait and the levels of their queues, the call that starts next first. Those
        that are held back come last."""
        calls = itertools.chain(self._policy.waiting, self._policy.held)
        return ((call.program, call.rank.level) for call in calls)

    def step_formed(self, output: SchedulerOutput, now_s: float) -> None:
        """vLLM has formed the step: note the calls that it turned away, and those that got no tokens for their prompts
        or get some again."""
        self._growing = None
        if self._awaited:
            self.turned_away.update(key for key in self._awaited if not self._entries[key].running)
            self._awaited = []
        if not self._has_prompts:
            return
        for request in self._scheduler.running:
            entry = self._entries[request.request_id]
            if entry.stalled or request.is_prefill_chunk:
                has_tokens = request.request_id in output.num_scheduled_tokens
                self._table.set_stalled(entry, now_s, stalled=not has_tokens)

    def preempted(self) -> None:
        """A call is preempted. vLLM admits no call in a step in which it preempts."""
        self.turned_away.clear()
        self._awaited = []


def recomputes(request: Request, entry: Entry) -> bool:
    """Whether a resumed call has not yet produced a new token.

    Such a call is not preempted. Otherwise calls would preempt each other for ever where rebuilding the KV cache takes
    longer than a quantum.
    """
    return request.num_preemptions > 0 and request.num_output_tokens <= entry.output_tokens


# -- what vLLM's next step has room for, if some calls started and others were preempted


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
