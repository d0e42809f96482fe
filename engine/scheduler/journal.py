"""A scheduler that keeps a journal of what comes to it from outside and what it decides: `weft replay` plays it again.

The file is compressed by gzip. A line is a call of a method: its name, what the scheduler read meanwhile (the clock,
whether a grammar is ready, what other replicas have in host memory), what it was given, and what came of it. There are
no texts: tokens are counted, and blocks of KV have numbers, which say no more than which are equal.
"""

from __future__ import annotations

import json
import os
import secrets
import time
import zlib
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import astuple
from itertools import count, islice
from pathlib import Path
from types import NoneType
from typing import Any, Final, TypeVar

from weft.core.log import get_logger
from weft.engine.kv_cache.connector import SwapConnector, WorkerReport
from weft.engine.kv_cache.shared import Found
from weft.engine.scheduler.plugin import WeftScheduler
from weft.engine.vllm_compat.names import FullAttentionSpec, Request, RequestStatus, SchedulerOutput
from weft.engine.wire.call_header import FIELDS

T = TypeVar("T")

VERSION: Final = 1
_GZIP: Final = 16  # zlib's sign for a stream of gzip
SUFFIX: Final = ".journal.gz"
MOST_BYTES: Final = 1 << 30  # of a journal, which then ends
MOST_FILES: Final = 32  # in a folder, whose oldest ones are deleted
_MOST_BLOCKS: Final = 1 << 19  # whose numbers are known; those that were not used for longest are forgotten
_FLUSHED: Final = ("head", "schedule", "update_from_output", "end")  # they are on file though the process may die then
_ENDED: Final = (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_REPETITION, RequestStatus.FINISHED_ERROR)
_AWAITS_GRAMMAR: Final = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR


class SchedulerJournal:
    """The lines of one scheduler's life. An error of the disk ends them, and not the scheduler.

    Raises:
        OSError: There can be no file.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for old in sorted(folder.glob(f"*{SUFFIX}"))[: 1 - MOST_FILES]:
            old.unlink(missing_ok=True)
        self.path = folder / f"{time.strftime('%Y%m%dT%H%M%S')}-{secrets.token_hex(4)}{SUFFIX}"
        self._file = os.fdopen(os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb")
        # Lines are like those just before them, so 4 KiB are looked back on, which stay in a core's cache.
        self._deflate = zlib.compressobj(1, wbits=_GZIP + 12, memLevel=5)
        self.begin()

    def begin(self) -> None:
        self.is_open = True
        self._line: list[Any] | None = None
        self._numbers: dict[bytes, int] = {}  # of blocks, by their hashes, the latest used last
        self._next_number = count(1)

    @contextmanager
    def event(self, name: str, *given: Any) -> Iterator[list[Any]]:
        """A call of a method. What is read in the block, and what is added to the list, is in its line. A call within
        another one is a part of that one."""
        if self._line is not None or not self.is_open:
            yield []
            return
        self._line = line = [name, [], *given]
        try:
            yield line
        except Exception as error:
            line.append(type(error).__name__)
            raise
        finally:
            self._line = None
            self.write(line)

    def reading(self, value: T) -> T:
        """Note what the scheduler reads."""
        if self._line is not None:
            self._line[1].append(value)
        return value

    def blocks(self, hashes: Sequence[bytes]) -> list[list[int]]:
        """The numbers of blocks: where each run of numbers begins, and how long it is."""
        numbers, runs = self._numbers, list[list[int]]()
        for each in hashes:
            numbers[each] = number = numbers.pop(each, 0) or next(self._next_number)
            if runs and sum(runs[-1]) == number:
                runs[-1][1] += 1
            else:
                runs.append([number, 1])
        if len(numbers) > _MOST_BLOCKS:
            for each in list(islice(numbers, _MOST_BLOCKS // 4)):
                del numbers[each]
        return runs

    def write(self, line: list[Any]) -> None:
        if not self.is_open:
            return
        is_last = line[0] == "end"
        try:
            text = json.dumps(line, separators=(",", ":"), default=str) + "\n"
            self._file.write(self._deflate.compress(text.encode()))
            if line[0] in _FLUSHED:
                self._file.write(self._deflate.flush(zlib.Z_SYNC_FLUSH))
                self._file.flush()
                if self._file.tell() > MOST_BYTES:
                    self._file.write(self._deflate.compress(b'["end","the journal is full"]\n'))
                    is_last = True
        except OSError as error:
            get_logger().warning("a journal cannot be written, and ends", path=str(self.path), reason=str(error))
            is_last = True
        if is_last:
            self.close()

    def close(self) -> None:
        if self.is_open:
            self.is_open = False
            with suppress(OSError), self._file:
                self._file.write(self._deflate.flush())


class JournaledScheduler(WeftScheduler):
    """A `WeftScheduler` that keeps a journal, and decides the same."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.plans: deque[SchedulerOutput] = deque()  # whose outputs are not there yet
        self._preempted: list[str] = []  # since the last step
        self._journal = self._open_journal()
        self._journal.write(["head", _head(self)] if _is_plain_engine(self) else _end_of("this engine"))
        self.set_clock(self._clock)
        if (shared := self._swap.shared if self._swap is not None else None) is not None:
            find = shared.find

            def noted(key: Any) -> Found | None:
                found = self._journal.reading(find(key))
                return Found(*found) if found is not None else None

            shared.find = noted  # type: ignore[method-assign]

    def _open_journal(self) -> SchedulerJournal:
        return SchedulerJournal(Path(self._config.journal))

    def set_clock(self, clock: Any) -> None:
        super().set_clock(lambda: self._journal.reading(clock()))

    def add_request(self, request: Request) -> None:
        if not _is_plain(request):
            self._journal.write(_end_of(f"request {request.request_id}"))
        given = [_described(request), self._journal.blocks(request.block_hashes)] if self._journal.is_open else []
        with self._journal.event("add_request", *given):
            super().add_request(request)

    def finish_requests(self, request_ids: Any, finished_status: RequestStatus) -> list[Request]:
        ids = [request_ids] if isinstance(request_ids, str) else request_ids
        ids = list(self.requests if ids is None else ids)
        finished: list[Request] = []
        with self._journal.event("finish_requests", ids, finished_status.name):
            for each in ids:  # vLLM makes a set of several, whose order differs from process to process
                finished += super().finish_requests(each, finished_status)
        return finished

    def __call__(self, message: object) -> dict[str, Any]:
        with self._journal.event("__call__", message):
            return super().__call__(message)

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> bool:
        with self._journal.event("reset_prefix_cache", args, kwargs):
            return super().reset_prefix_cache(*args, **kwargs)

    def set_pause_state(self, pause_state: Any) -> None:
        with self._journal.event("set_pause_state", pause_state.name):
            super().set_pause_state(pause_state)

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        with self._journal.event("schedule", throttle_prefills) as line:
            output = super().schedule(throttle_prefills)
            self.plans.append(output)
            cached, plan = output.scheduled_cached_reqs, getattr(output.kv_connector_metadata, "plan", None)
            started = [each.req_id for each in output.scheduled_new_reqs]
            if cached.resumed_req_ids:
                started += [key for key in cached.req_ids if key in cached.resumed_req_ids]
            copies = plan if plan is not None and (plan.number or plan.waits_for) else ""
            digest = zlib.crc32(f"{output.num_scheduled_tokens}{copies}".encode())
            line += [started, self._preempted, output.total_num_scheduled_tokens, digest]
            self._preempted = []
        return output

    def get_grammar_bitmask(self, scheduler_output: SchedulerOutput) -> Any:
        with self._journal.event("get_grammar_bitmask", self._number_of(scheduler_output)):
            return super().get_grammar_bitmask(scheduler_output)

    def update_from_output(self, scheduler_output: SchedulerOutput, model_runner_output: Any) -> Any:
        number, keys = self._number_of(scheduler_output), scheduler_output.num_scheduled_tokens
        for _ in range(number + 1):
            self.plans.popleft()
        requests = [(each, len(each.block_hashes)) for key in keys if (each := self.requests.get(key)) is not None]
        sampled = dict(zip(model_runner_output.req_ids, model_runner_output.sampled_token_ids, strict=False))
        empty = [key for key in keys if not sampled.get(key)]
        if copied := model_runner_output.kv_connector_output:
            report = copied.kv_connector_worker_meta
            copied = [isinstance(report, WorkerReport) and astuple(report), sorted(copied.invalid_block_ids)]
        with self._journal.event("update_from_output", number, empty, copied) as line:
            outputs = super().update_from_output(scheduler_output, model_runner_output)
            line.append([each.request_id for each, _ in requests if each.status in _ENDED])
            new = [(each, each.block_hashes[known:]) for each, known in requests if len(each.block_hashes) > known]
            line.append([[each.request_id, self._journal.blocks(hashes)] for each, hashes in new])
        return outputs

    def _number_of(self, plan: SchedulerOutput) -> int:
        return next((number for number, each in enumerate(self.plans) if each is plan), -1)

    def _handle_blocked_waiting_request(self, request: Request) -> bool:
        awaits_grammar = request.status == _AWAITS_GRAMMAR
        is_ready = super()._handle_blocked_waiting_request(request)
        if awaits_grammar and (is_ready := self._journal.reading(is_ready)):
            request.status = RequestStatus.WAITING
        return is_ready

    def _preempt_request(self, request: Request, *args: Any, **kwargs: Any) -> None:
        self._preempted.append(request.request_id)
        super()._preempt_request(request, *args, **kwargs)

    def shutdown(self) -> None:
        self._journal.close()
        super().shutdown()


def _end_of(what: str) -> list[Any]:
    return ["end", f"{what} is of a kind that journals do not hold"]


def _is_plain(request: Request) -> bool:
    """Whether a request is all that a journal holds: one prompt of tokens, and sampled tokens."""
    others = request.lora_request, request.prompt_embeds, request.pooling_params
    kv_elsewhere = request.kv_transfer_params or request.ec_transfer_params
    return not (
        any(each is not None for each in others) or request.has_encoder_inputs or request.resumable or kv_elsewhere
    )


def _is_plain_engine(scheduler: WeftScheduler) -> bool:
    """Whether a scheduler can be made again from a head: one kind of attention, no drafts, no pipeline."""
    config, groups = scheduler.vllm_config, scheduler.kv_cache_config.kv_cache_groups
    parallel = config.parallel_config
    parts = (
        parallel.pipeline_parallel_size * parallel.decode_context_parallel_size * parallel.prefill_context_parallel_size
    )
    has_one_kind = len(groups) == 1 and type(groups[0].kv_cache_spec) is FullAttentionSpec
    is_ours = isinstance(scheduler.connector, SwapConnector | None)
    return parts == 1 and config.speculative_config is None and is_ours and has_one_kind


def _described(request: Request) -> dict[str, Any]:
    params = request.sampling_params
    given = params.extra_args or {}
    return {
        "id": request.request_id,
        "prompt_tokens": request.num_prompt_tokens,
        "max_tokens": request.max_tokens,
        "session": request.session_id,
        "header": {name: given[name] for name in FIELDS if name in given},
        "has_stops": bool(params.stop),
        "awaits_grammar": request.status == _AWAITS_GRAMMAR,
        "skips_cache": request.skip_reading_prefix_cache,
    }


def _head(scheduler: WeftScheduler) -> dict[str, Any]:
    """What a scheduler is made of, and what it is then."""
    config, (group,), swap = scheduler.vllm_config, scheduler.kv_cache_config.kv_cache_groups, scheduler._swap  # noqa: SLF001
    spec = group.kv_cache_spec
    return {
        "version": VERSION,
        "settings": {key: each for key, each in config.additional_config["weft"].items() if key != "journal"},
        "max_model_len": config.model_config.max_model_len,
        "scheduler_config": _plain(config.scheduler_config),
        "cache_config": _plain(config.cache_config),
        "swap": config.kv_transfer_config.kv_connector_extra_config if swap is not None else None,
        "workers": config.parallel_config.world_size,
        "shares": swap is not None and swap.shared is not None,
        "blocks": scheduler.kv_cache_config.num_blocks,
        "block_tokens": [scheduler.block_size, scheduler.hash_block_size],
        "spec": [spec.num_kv_heads, spec.head_size, str(spec.dtype).removeprefix("torch."), len(group.layer_names)],
        "scheduler": _plain(scheduler),
    }


def _plain(thing: object) -> dict[str, Any]:
    return {name: each for name, each in vars(thing).items() if type(each) in (bool, int, float, str, NoneType)}
