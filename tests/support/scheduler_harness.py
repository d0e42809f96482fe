"""vLLM's scheduler and KV cache manager without a model, with a fake clock and a worker that notices corrupted KV.

The worker stores token ids in the KV slots that it is told to write, and derives each next token from a hash of the
whole context, which it reads through the block table. Wrong blocks, lost tokens and a wrong resume position all change
the output.
"""

from __future__ import annotations

import os
import random
import zlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast
from unittest import mock

import numpy as np
from bare_scheduler import make_scheduler

from weft import _csrc
from weft.core.kv_cache.config import SwapConfig
from weft.core.testing import FakeClock
from weft.engine.kv_cache.connector import WorkerReport, transfer_config
from weft.engine.kv_cache.shared import VARIABLE, Part
from weft.engine.kv_cache.slot_plans import Executed, SwapBatch, SwapPlan
from weft.engine.scheduler import WeftScheduler
from weft.engine.scheduler.journal import JournaledScheduler
from weft.engine.vllm_compat.names import (
    KVConnectorOutput,
    LoRARequest,
    ModelRunnerOutput,
    Request,
    RequestStatus,
    SamplingParams,
    SchedulerOutput,
    get_request_block_hasher,
    init_none_hash,
    make_block_hash_with_group_id,
    sha256,
)
from weft.engine.wire.reports import read_report

BLOCK_TOKENS = 16
_MARK = 1_000_000  # more than any token
_BLOCK_BYTES = 2 * BLOCK_TOKENS * 2  # key and value of one layer, one head and one bfloat16


def next_token(context: list[int]) -> int:
    """The token with which the worker continues a context."""
    return zlib.crc32(",".join(map(str, context)).encode()) % 900 + 50


def expected_output(prompt: list[int], count: int) -> list[int]:
    """The first `count` output tokens of a call that is never preempted."""
    context = list(prompt)
    for _ in range(count):
        context.append(next_token(context))
    return context[len(prompt) :]


def _settings(weft: dict[str, Any]) -> dict[str, Any]:
    """A policy's name and parameters, and the scheduler's other settings, as `additional_config` has them."""
    others = {
        name: weft[name] for name in ("one_client", "trust_clients", "model", "kv_policy", "journal") if name in weft
    }
    return {"policy": {name: value for name, value in weft.items() if name not in others}, **others}


@dataclass
class _Beside:
    """What a plan copies beside steps."""

    plan: SwapPlan
    left: set[str] = field(default_factory=lambda: {"out", "in"})  # what is not copied yet
    lost: set[int] = field(default_factory=set)
    unread: set[int] = field(default_factory=set)


class FakeWorker:
    """Executes steps in place of a model; see the module's docstring.

    Args:
        blocks: KV blocks on the device.
        swap_blocks: KV blocks that the host memory holds.
    """

    def __init__(self, blocks: int, swap_blocks: int) -> None:
        pieces = np.array([[1 << 30, _BLOCK_BYTES, _BLOCK_BYTES]])  # addresses that nobody reads
        self._kernel = _csrc.SwapLayout(pieces, blocks, 1 << 40, _BLOCK_BYTES, max(1, swap_blocks))
        self._kv: list[list[int | None]] = [[None] * BLOCK_TOKENS for _ in range(blocks)]  # tokens by block
        self._tokens: dict[str, list[int]] = {}
        self._blocks: dict[str, list[int]] = {}
        self.host: dict[int, list[int | None]] = {}
        self.fails: Callable[[], bool] = lambda: False  # whether the next copy of a block fails
        self.failures = 0
        self._lost: set[int] = set()  # slots that hold nothing valid
        self.copies_beside: random.Random | None = None  # says how long copies beside steps take; None: no time
        self._beside: deque[_Beside] = deque()
        self.isolation: dict[str, int] = {}  # by request: calls with different numbers may share no KV
        self.slots = max(1, swap_blocks)
        self.replicas: dict[int, FakeWorker] = {}  # whose host memory this one can read, by number
        self.parts: dict[int, Part] = {}

    def swap(self, plan: SwapPlan) -> KVConnectorOutput | None:
        """Copy blocks to and from host memory as a plan says, except those that `fails` names.

        Raises:
            SwapError: The plan writes to a block or a slot twice.
            ValueError: The real kernel refuses a batch of the plan.
        """
        self._copy_beside(plan.waits_for)
        done = self._take_done(all_of_them=bool(plan.waits_for and not plan.number))
        if not plan.number:
            return KVConnectorOutput(kv_connector_worker_meta=WorkerReport(beside=done)) if done else None
        plan.check_integrity()
        own = [batch.split(self.slots)[0] for batch in plan.batches_in]
        for batch in (plan.out, *own, plan.spill, plan.fetch):
            self._kernel.check(np.array(batch.blocks, np.int64), np.array(batch.slots, np.int64))
        lost = self._out(plan.out)
        if plan.spill.slots or plan.fetch.slots:
            self._beside.append(_Beside(plan))
        if self.copies_beside is None:
            self._copy_beside(plan.number)
            done += self._take_done(all_of_them=True)
        unread, invalid, refused = set[int](), set[int](), set[int]()
        for load in plan.loads:
            mine, others = load.split(self.slots)
            slots, blocks = self._in(mine)
            unread |= slots
            invalid |= blocks
            for block, slot in zip(others.blocks, others.slots, strict=True):
                if not self._read_shared(block, slot, plan.generations[slot]):
                    invalid.add(block)
                    refused.add(slot)
        report = WorkerReport(executed=Executed(plan.number, tuple(lost), tuple(unread), tuple(refused)), beside=done)
        return KVConnectorOutput(invalid_block_ids=invalid, kv_connector_worker_meta=report)

    def _read_shared(self, block: int, slot: int, generation: int) -> bool:
        number, slot = slot // self.slots - 1, slot % self.slots
        is_valid = not self.fails() and int(self.parts[number].generations[slot]) == generation
        self._kv[block] = list(self.replicas[number].host[slot]) if is_valid else [-1] * BLOCK_TOKENS
        self.failures += not is_valid
        return is_valid

    def _out(self, batch: SwapBatch) -> set[int]:
        lost = set()
        for block, slot in zip(batch.blocks, batch.slots, strict=True):
            if self.fails():
                lost.add(slot)
                self.host[slot] = [-1] * BLOCK_TOKENS
            else:
                self.host[slot] = list(self._kv[block])
        self._lost = (self._lost - set(batch.slots)) | lost
        self.failures += len(lost)
        return lost

    def _in(self, batch: SwapBatch) -> tuple[set[int], set[int]]:
        unread, invalid = set(), set()
        for block, slot in zip(batch.blocks, batch.slots, strict=True):
            is_bad = slot in self._lost or self.fails()
            if is_bad:
                unread.add(slot)
                invalid.add(block)
            self._kv[block] = [-1 if is_bad and token is not None else token for token in self.host[slot]]
        self.failures += len(unread)
        return unread, invalid

    def run_beside(self) -> None:
        """Some time passes, in which copies beside steps go on, those out and those in each in their order."""
        rng = self.copies_beside
        while rng is not None and rng.random() < 0.6 and (left := [each for each in self._beside if each.left]):
            ways = [way for way in ("out", "in") if any(way in each.left for each in left)]
            way = ways[int(rng.random() * len(ways))]
            self._copy_beside(next(each.plan.number for each in left if way in each.left), (way,))

    def _copy_beside(self, number: int, ways: Sequence[str] = ("in", "out")) -> None:
        for each in self._beside:
            for way in [way for way in ways if way in each.left and each.plan.number <= number]:
                each.left.remove(way)
                if way == "out":
                    each.lost = self._out(each.plan.spill)
                else:
                    each.unread, _ = self._in(each.plan.fetch)

    def _take_done(self, *, all_of_them: bool) -> tuple[Executed, ...]:
        """The reports of copies that are done. A worker may see later that one is."""
        done, rng = list[Executed](), self.copies_beside
        while self._beside and not self._beside[0].left and (all_of_them or rng is None or rng.random() < 0.7):
            each = self._beside.popleft()
            done.append(Executed(each.plan.number, tuple(each.lost), tuple(each.unread)))
        return tuple(done)

    @property
    def fetching(self) -> list[int]:
        """The blocks that copies beside steps will write."""
        return [block for each in self._beside if "in" in each.left for block in each.plan.fetch.blocks]

    def content(self, block: int) -> list[int | None]:
        """The tokens whose KV a block of the device holds."""
        return self._kv[block]

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        for request_id in output.finished_req_ids:
            self._tokens.pop(request_id, None)
            self._blocks.pop(request_id, None)
        computed: dict[str, int] = {}
        for new in output.scheduled_new_reqs:
            self._tokens[new.req_id] = list(new.prompt_token_ids or ())
            self._blocks[new.req_id] = list(new.block_ids[0])
            computed[new.req_id] = new.num_computed_tokens
        cached = output.scheduled_cached_reqs
        for index, request_id in enumerate(cached.req_ids):
            blocks = cached.new_block_ids[index]
            if request_id in cached.resumed_req_ids:
                self._blocks[request_id] = list(blocks[0])
                self._tokens[request_id] = list(cached.all_token_ids[request_id])
            elif blocks is not None:
                self._blocks[request_id].extend(blocks[0])
            computed[request_id] = cached.num_computed_tokens[index]
        sampled = [
            self._run(request_id, computed[request_id], count)
            for request_id, count in output.num_scheduled_tokens.items()
        ]
        request_ids = list(output.num_scheduled_tokens)
        return ModelRunnerOutput(request_ids, {r: i for i, r in enumerate(request_ids)}, sampled)

    def _run(self, request_id: str, start: int, count: int) -> list[int]:
        tokens, blocks = self._tokens[request_id], self._blocks[request_id]
        end, marked = start + count, _MARK * self.isolation.get(request_id, 0)
        for position in range(start, end):
            self._kv[blocks[position // BLOCK_TOKENS]][position % BLOCK_TOKENS] = tokens[position] + marked
        if end < len(tokens):  # a chunk of a prefill
            return []
        read: Any = [token for block in blocks[: -(-end // BLOCK_TOKENS)] for token in self._kv[block]]
        tokens.append(next_token([token - marked for token in read[:end]]))  # None was never written
        return [tokens[-1]]


def _has_failed(copied: KVConnectorOutput | None) -> bool:
    """Whether a copy of a step failed."""
    report = copied.kv_connector_worker_meta if copied is not None else None
    executed = [report.executed, *report.beside] if isinstance(report, WorkerReport) else []
    return any(each is not None and (each.lost or each.unread or each.refused) for each in executed)


def share_memory(replicas: Mapping[str, SchedulerHarness]) -> None:
    """Let each of these replicas read the host memory of all.

    Args:
        replicas: By what `SharedFolder.add` gave.
    """
    by_number = {int(Path(link).name): (Path(link), each) for link, each in replicas.items()}
    for each in replicas.values():
        store = each.scheduler._swap
        assert store is not None
        assert store.shared is not None
        store.shared.open()
        shape = each.scheduler.connector._shape
        each.worker.replicas = {number: other.worker for number, (_, other) in by_number.items()}
        each.worker.parts = {number: Part(link, shape) for number, (link, _) in by_number.items()}


def swapping(space_bytes: int, min_tokens: int | str) -> dict[str, Any]:
    """vLLM's arguments for a swap into `space_bytes` of host memory; empty if that is 0."""
    if space_bytes == 0:
        return {}
    return {"kv_transfer_config": transfer_config(SwapConfig(space_bytes / 2**30, cast("Any", min_tokens)))}


class SchedulerHarness:
    """Steps a `WeftScheduler`. Every step takes `step_s` seconds of the fake clock.

    Args:
        folder: an existing folder, to which the model's configuration is written.
        weft: a policy's name and parameters, e.g. `bounds_s` and `beta`, and further settings of the scheduler. Figures
            of calls are trusted unless it says otherwise.
        slots: the number of calls that run at once.
        blocks: the number of KV blocks, of 16 tokens each.
        in_flight: the number of steps in flight: 1, or 2 for steps that overlap as under asynchronous scheduling.
        swap_blocks: the number of blocks in host memory for preempted calls; 0 to compute these calls again.
        beside: a seed for how long copies beside steps take; None: they are made within their step.
        start_s: what the clock shows at the start, in seconds.
        shared: what `SharedFolder.add` gave for this replica. `share_memory` then lets its worker read the others'.
        engine: further arguments of vLLM.
    """

    def __init__(
        self,
        folder: Path,
        weft: dict[str, Any],
        *,
        slots: int = 2,
        blocks: int = 200,
        in_flight: int = 1,
        prefix_caching: bool = False,
        batched_tokens: int = 64,
        swap_blocks: int = 0,
        min_tokens: int | str = 0,
        beside: int | None = None,
        start_s: float = 0.0,
        shared: str | None = None,
        **engine: Any,
    ) -> None:
        init_none_hash(sha256)
        self.folder = folder
        self._block_hasher = get_request_block_hasher(BLOCK_TOKENS, sha256) if prefix_caching else None
        self.clock = FakeClock(start_s)
        with mock.patch.dict(os.environ, {} if shared is None else {VARIABLE: shared}):
            scheduler = make_scheduler(
                JournaledScheduler if "journal" in weft else WeftScheduler,
                folder,
                blocks=blocks,
                block_tokens=BLOCK_TOKENS,
                overlapping=in_flight > 1,
                max_model_len=1024,
                max_num_seqs=slots,
                max_num_batched_tokens=batched_tokens,
                enable_prefix_caching=prefix_caching,
                additional_config={"weft": {"trust_clients": True, **_settings(weft)}},
                **swapping(swap_blocks * _BLOCK_BYTES, min_tokens),
                **engine,
            )
        self.scheduler = cast("WeftScheduler", scheduler)
        self.scheduler.set_clock(self.clock)
        self.worker = FakeWorker(blocks, swap_blocks)
        self.swaps = swap_blocks > 0
        if beside is not None and self.scheduler._swap is not None:
            self.worker.copies_beside = random.Random(beside)
            self.scheduler._swap.copies_beside = True
        self.in_flight = in_flight
        self.step_s = 1.0
        self.throttles = False  # prompts, as vLLM does while other ranks compute none
        self.asks_meanwhile = True  # for a grammar while a step runs, as vLLM does
        self.tokens: dict[str, list[int]] = {}
        self.accounts: dict[str, dict[str, Any]] = {}
        self.finished: list[str] = []
        self._pending: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()
        self._requests: dict[str, Request] = {}  # that have not ended
        self._content: dict[Any, list[int]] = {}  # the tokens that belong into a block, by its hash

    def add(
        self,
        request_id: str,
        *,
        prompt: list[int] | None = None,
        max_tokens: int = 4,
        session_id: str | None = None,
        resumable: bool = False,
        cache_salt: str | None = None,
        adapter: str | None = None,
        **extra: Any,
    ) -> Request:
        """Add a request with `extra` as its `extra_args`. Requests with different salts or adapters share no KV."""
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, extra_args=extra or None)
        request = Request(
            request_id,
            prompt or [7, 8, 9],
            sampling_params=params,
            pooling_params=None,
            session_id=session_id,
            resumable=resumable,
            cache_salt=cache_salt,
            lora_request=LoRARequest(lora_name=adapter, lora_int_id=1, lora_path=adapter) if adapter else None,
            block_hasher=self._block_hasher,
        )
        if cache_salt or adapter:
            self.worker.isolation[request_id] = 1 + zlib.crc32(f"{cache_salt} {adapter}".encode())
        self.tokens.setdefault(request_id, [])
        self._requests[request_id] = request
        self.scheduler.add_request(request)
        return request

    def abort(self, request_id: str) -> None:
        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    def step(self) -> set[str]:
        """Run one engine step.

        Returns:
            The ids of the requests that were scheduled.
        """
        output = self.scheduler.schedule(self.throttles)
        copied = None
        if self.swaps:
            self._check_owners(output.kv_connector_metadata.plan)
            copied = self.worker.swap(output.kv_connector_metadata.plan)
            self._check_beside()
            self.worker.run_beside()
        if output.total_num_scheduled_tokens:
            if self.asks_meanwhile:
                self.scheduler.get_grammar_bitmask(output)
            executed = self.worker.execute(output)
            executed.kv_connector_output = copied
            self.worker.run_beside()
            self._pending.append((output, executed))
        elif copied is not None:
            self._pending.append((output, ModelRunnerOutput([], {}, [], kv_connector_output=copied)))
        self.clock.advance(self.step_s)
        if self._pending and (len(self._pending) >= self.in_flight or not output.total_num_scheduled_tokens):
            self._take_outputs()
        self.scheduler.check_integrity()
        self._check_content()
        return set(output.num_scheduled_tokens)

    def _check_owners(self, plan: SwapPlan) -> None:
        """Assert that a plan which is being sent writes to blocks of the calls that it loads, and to blocks that are
        taken and nobody's, and that host memory keeps what it copies out."""
        manager = self.scheduler.kv_cache_manager
        held = {block for call in self.scheduler.running for block in manager.get_block_ids(call.request_id)[0]}
        assert held.issuperset(block for load in plan.loads for block in load.blocks), "a load writes to a free block"
        for block in plan.fetch.blocks:
            assert block not in held, "a fetch writes to the block of a call"
            assert manager.block_pool.blocks[block].ref_cnt > 0, "a fetch writes to a free block"
            assert manager.block_pool.blocks[block].block_hash is None, "a fetch writes to a block that can be found"
        if plan.number and self.scheduler._swap is not None:
            # What nobody needs once the plan is handed out is free by now, and written for nothing.
            owned = {slot: key for key, slot in self.scheduler._swap.tier.slots.items()}
            keys = self.scheduler._swap._sent[-1].keys
            assert list(keys) == list(plan.out.slots)
            assert all(owned.get(slot, key) == key for slot, key in keys.items()), "a slot of another block is written"

    def _check_beside(self) -> None:
        """Assert that blocks which copies beside steps will write are taken, and nobody's."""
        pool, manager = self.scheduler.kv_cache_manager.block_pool, self.scheduler.kv_cache_manager
        held = {block for call in self.scheduler.running for block in manager.get_block_ids(call.request_id)[0]}
        for block in self.worker.fetching:
            assert block not in held, "a copy beside steps writes to the block of a call"
            assert pool.blocks[block].ref_cnt > 0, "a copy beside steps writes to a free block"
            assert pool.blocks[block].block_hash is None, "a copy beside steps writes to a block that can be found"

    def _check_content(self) -> None:
        """Assert that each block which can be found holds the tokens that it is found by, on the device and in host
        memory. What has not arrived is known when its report is there."""
        for request_id, request in list(self._requests.items()):
            marked = _MARK * self.worker.isolation.get(request_id, 0)
            for index, block_hash in enumerate(request.block_hashes):
                key = make_block_hash_with_group_id(block_hash, 0)
                if key not in self._content:
                    tokens = request.all_token_ids[index * BLOCK_TOKENS : (index + 1) * BLOCK_TOKENS]
                    self._content[key] = [token + marked for token in tokens]
            if request.is_finished():
                del self._requests[request_id]
        if any(_has_failed(executed.kv_connector_output) for _, executed in self._pending):
            return
        for block in self.scheduler.kv_cache_manager.block_pool.blocks:
            if (content := self._content.get(block.block_hash)) is not None:
                assert self.worker.content(block.block_id) == content, f"{block} holds something else"
        swap = self.scheduler._swap
        if swap is not None:
            for block_hash, slot in swap.tier.slots.items():
                if isinstance(block_hash, bytes) and slot not in swap._out and slot not in swap._going_out:
                    content = self._content.get(make_block_hash_with_group_id(block_hash, 0))
                    assert content in (None, self.worker.host[slot]), f"slot {slot} holds something else"

    def _take_outputs(self) -> None:
        outputs = self.scheduler.update_from_output(*self._pending.popleft())
        for client in outputs.values():
            for output in client.outputs:
                self.tokens[output.request_id].extend(output.new_token_ids)
                account = read_report(output.kv_transfer_params).account
                if account is not None:
                    self.accounts[output.request_id] = account
                if output.finish_reason is not None:
                    assert account is not None
                    self.finished.append(output.request_id)

    def drain(self) -> None:
        """Take the outputs of all steps in flight, as vLLM does before it resets its caches."""
        while self._pending:
            self._take_outputs()

    def settle(self, limit: int = 100) -> None:
        """Step an engine without calls for as long as vLLM's loop would: until all copies are done."""
        for _ in range(limit):
            if not self.scheduler.has_requests() and not self._pending:
                return
            self.step()
        raise AssertionError(f"not idle after {limit} steps")

    def run(self, limit: int = 10_000) -> int:
        """Step until every request has ended, and return the number of steps."""
        for steps in range(limit):
            if not self.scheduler.has_unfinished_requests() and not self._pending:
                return steps
            self.step()
        raise AssertionError(f"not finished after {limit} steps")
