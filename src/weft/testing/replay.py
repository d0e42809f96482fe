"""Plays journals of schedulers (`weft serve --journal`) again, without a model.

The real scheduler gets the same calls at the same times. How long steps took, how many tokens came of them and which
calls ended is taken from the journal, and what the scheduler decides is compared with it, line by line.
"""

from __future__ import annotations

import gzip
import json
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, NamedTuple, TextIO, TypeVar

import torch

from weft.core.errors import JournalError
from weft.core.kv_cache.config import CopySpeed, SwapConfig
from weft.engine.kv_cache.connector import WorkerReport, transfer_config
from weft.engine.kv_cache.slot_plans import Executed
from weft.engine.scheduler.journal import VERSION, JournaledScheduler, SchedulerJournal
from weft.engine.vllm_compat.logs import host_logging
from weft.engine.vllm_compat.names import (
    EngineArgs,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVConnectorOutput,
    ModelRunnerOutput,
    PauseState,
    Request,
    RequestStatus,
    SamplingParams,
    StructuredOutputManager,
)

T = TypeVar("T")

_TOKEN: Final = 1
_LAST_TOKEN: Final = 2  # ends a call
_KEY_BYTES: Final = 32
_MODEL: Final = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 1000}


class Replayed(NamedTuple):
    """What a journal had, all of which came out again."""

    steps: int
    calls: int
    preemptions: int
    ends: str  # why the journal ends where it does


def replay(path: Path) -> Replayed:
    """Play a journal.

    Raises:
        JournalError: The file cannot be read or is no journal, or the first line that comes out otherwise.
    """
    try:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            playback = _Playback(path, file)
            return _Replay(playback, playback.head()).run()
    except (OSError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise JournalError(f"{path} cannot be read: {reason}. Give a file of weft serve --journal.") from None
    except UnicodeDecodeError:
        raise JournalError(f"{path} is not UTF-8 text. Give a file of weft serve --journal.") from None


class _Playback(SchedulerJournal):
    """A journal in place of the one that its scheduler would write."""

    def __init__(self, path: Path, file: TextIO) -> None:
        self.path, self._texts = path, file
        self.number = self.steps = 0
        self.ends = "the process ended, or goes on"
        self._expected: list[Any] = []
        self.begin()

    def head(self) -> dict[str, Any]:
        """What the scheduler was."""
        line = next(self.lines(), None)
        if line is None:
            reason = self.ends if self.number else "it has no line"
            raise JournalError(f"{self.path} has no step to replay: {reason}. Give a file of weft serve --journal.")
        if line[0] != "head" or not isinstance(line[1], dict) or line[1].get("version") != VERSION:
            raise self.wrong(f"no journal of version {VERSION} begins with {line!r:.100}")
        return line[1]

    def lines(self) -> Iterator[list[Any]]:
        """The lines to come. A process that is killed leaves a file without its end."""
        while text := self._next_text():
            self.number += 1
            try:
                line = json.loads(text)
            except ValueError:
                line = None
            if isinstance(line, list) and line[:1] == ["end"]:
                self.ends = f"{line[-1]}"
                return
            if not isinstance(line, list) or len(line) < 2 or (line[0] == "head") != (self.number == 1):
                what = "is no line of a journal, or begins another one" if self.number > 1 else "begins no journal"
                raise self.wrong(f"this {what}; give a file of weft serve --journal")
            self._expected = line
            yield line

    def _next_text(self) -> str:
        """The next line, or nothing at the end."""
        try:
            return self._texts.readline()
        except EOFError:  # the file is cut here
            return ""

    def wrong(self, what: str) -> JournalError:
        """The error that says what is wrong with the latest line."""
        return JournalError(f"{self.path}, line {self.number}, after {self.steps} steps: {what}.")

    def reading(self, value: T) -> T:
        if self._line is None:
            return value
        past, read = self._expected[1], self._line[1]
        if len(read) == len(past):
            raise self.wrong("more is read than then")
        read.append(past[len(read)])
        return read[-1]  # type: ignore[no-any-return]

    def write(self, line: list[Any]) -> None:
        if line[0] == "head" or line[-1] == JournalError.__name__:
            return
        found = json.loads(json.dumps(line, default=str))
        if found != self._expected:
            pairs = zip([*self._expected, "nothing"], [*found, "nothing"], strict=False)
            then, now = next((pair for pair in pairs if pair[0] != pair[1]), (self._expected, found))
            raise self.wrong(f"{line[0]} differs first: then {then!r:.200}, now {now!r:.200}")
        self.steps += line[0] == "schedule"


class _Replay:
    """Calls the methods of a scheduler as a journal says."""

    def __init__(self, playback: _Playback, head: dict[str, Any]) -> None:
        self._playback = playback
        self._keys: dict[str, list[Any]] = {}  # of the blocks of each request
        try:
            self._scheduler = _scheduler_of(head, playback)
        except Exception as error:
            raise playback.wrong(f"no scheduler can be made of it: {type(error).__name__}: {error}") from error

    def run(self) -> Replayed:
        """Play all lines."""
        calls = preemptions = 0
        for name, _, *given in self._playback.lines():
            try:
                self._call(name, given)
            except JournalError:
                raise
            except Exception as error:
                if given[-1:] != [type(error).__name__]:  # else it was raised then, too
                    raise self._playback.wrong(f"it cannot be played: {type(error).__name__}: {error}") from error
            calls += name == "add_request"
            preemptions += len(given[2]) if name == "schedule" and len(given) > 2 else 0
        return Replayed(self._playback.steps, calls, preemptions, self._playback.ends)

    def _call(self, name: str, given: list[Any]) -> None:
        scheduler = self._scheduler
        match name, *given:
            case "add_request", call, runs, *_:
                scheduler.add_request(self._request(call, runs))
            case "finish_requests", ids, status, *_:
                scheduler.finish_requests(ids, RequestStatus[status])
            case "__call__", message, *_:
                scheduler(message)
            case "reset_prefix_cache", args, kwargs, *_:
                scheduler.reset_prefix_cache(*args, **kwargs)
            case "set_pause_state", state, *_:
                scheduler.set_pause_state(PauseState[state])
            case "schedule", throttles, *_:
                scheduler.schedule(throttles)
            case "get_grammar_bitmask", number, *_:
                scheduler.get_grammar_bitmask(scheduler.plans[number])
            case "update_from_output", number, empty, copied, *came:
                ended, grown = came if len(came) > 1 else ([], [])
                for key, runs in grown:
                    self._keys[key] += _keys(runs)
                plan = scheduler.plans[number]
                keys = list(plan.num_scheduled_tokens)
                tokens = [[] if key in empty else [_LAST_TOKEN if key in ended else _TOKEN] for key in keys]
                places = {key: place for place, key in enumerate(keys)}
                output = ModelRunnerOutput(keys, places, tokens, kv_connector_output=_decoded(copied))
                scheduler.update_from_output(plan, output)
                scheduler.check_integrity()
            case _:
                raise self._playback.wrong(f"nothing is called {name!r:.40}")
        if len(self._keys) > 2 * len(scheduler.requests) + 64:
            self._keys = {key: self._keys[key] for key in scheduler.requests}

    def _request(self, call: dict[str, Any], runs: list[list[int]]) -> Request:
        """A call with the lengths and the blocks of one that came then."""
        self._keys[call["id"]] = _keys(runs)
        params = SamplingParams(max_tokens=call["max_tokens"], ignore_eos=True, stop_token_ids=[_LAST_TOKEN])
        params.extra_args, params.skip_reading_prefix_cache = call["header"] or None, call["skips_cache"]
        params.stop = ["."] if call["has_stops"] else []
        prompt, keys = [_TOKEN] * call["prompt_tokens"], self._next_keys
        request = Request(call["id"], prompt, params, None, session_id=call["session"], block_hasher=keys)
        if call["awaits_grammar"]:
            request.status = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
        return request

    def _next_keys(self, request: Request) -> list[Any]:
        full = request.num_tokens // self._scheduler.hash_block_size
        return self._keys[request.request_id][len(request.block_hashes) : full]


def _keys(runs: list[list[int]]) -> list[bytes]:
    return [number.to_bytes(_KEY_BYTES) for first, count in runs for number in range(first, first + count)]


def _decoded(copied: Any) -> KVConnectorOutput | None:
    """What workers reported."""
    if copied is None:
        return None
    report, invalid = copied
    if report:
        speed, copies_beside, shares, executed, beside, has_memory = report
        done, *others = [each and Executed(each[0], *map(tuple, each[1:])) for each in (executed, *beside)]
        report = WorkerReport(speed and CopySpeed(*speed), copies_beside, shares, done, tuple(others), has_memory)
    return KVConnectorOutput(kv_connector_worker_meta=report or None, invalid_block_ids=set(invalid))


def _scheduler_of(head: dict[str, Any], playback: _Playback) -> Any:
    """The scheduler that a journal is of, for which the journal is clock and neighbours."""

    class ReplayedScheduler(JournaledScheduler):
        def _open_journal(self) -> SchedulerJournal:
            if head["shares"]:
                methods = "open", "leave", "look", "find", "publish", "withdraw", "forget"
                self._swap.shared = SimpleNamespace(**dict.fromkeys(methods, lambda *_: None))  # type: ignore[union-attr]
            return playback

    with tempfile.TemporaryDirectory() as folder:
        model = {**_MODEL, "max_position_embeddings": head["max_model_len"]}
        (Path(folder) / "config.json").write_text(json.dumps(model))
        arguments = {"skip_tokenizer_init": True, "enforce_eager": True, "logging_config": host_logging()}
        config: Any = EngineArgs(model=folder, **arguments).create_engine_config()
    config.additional_config = {"weft": head["settings"]}
    config.parallel_config.world_size = head["workers"]
    if head["swap"] is not None:
        config.kv_transfer_config = transfer_config(SwapConfig())
        config.kv_transfer_config.kv_connector_extra_config = head["swap"]
    heads, size, dtype, layers = head["spec"]
    block_tokens, hash_block_tokens = head["block_tokens"]
    spec = FullAttentionSpec(block_size=block_tokens, num_kv_heads=heads, head_size=size, dtype=getattr(torch, dtype))
    group = KVCacheGroupSpec([f"layer {number}" for number in range(layers)], spec)
    for name in ("scheduler_config", "cache_config"):
        vars(getattr(config, name)).update(head[name])
    scheduler: Any = ReplayedScheduler(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(head["blocks"], [], [group]),
        structured_output_manager=StructuredOutputManager(config),
        block_size=block_tokens,
        hash_block_size=hash_block_tokens,
        log_stats=head["scheduler"]["log_stats"],
    )
    vars(scheduler).update(head["scheduler"])
    return scheduler
