"""Logs of single requests: Azure's published traces, LiteLLM, vLLM."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from weft.core.errors import TraceError
from weft.core.trace.format import TraceCall, TraceProgram, text, whole
from weft.core.trace.importers.contract import Blocks, BlockScope, Importer, LeftOut, begins
from weft.core.trace.importers.reading import an_object, documents, lines, moment, together, tokens_of, whole_or_text
from weft.core.trace.importers.spans import LoggedSpan, program_of, texts_of
from weft.core.trace.prefixes import BLOCK_TOKENS, with_block_hashes

_COLUMNS: Final = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


def _read_azure(path: Path, _: Blocks, advance: Callable[[int], object]) -> Iterator[TraceProgram]:
    """Reads requests, of which nothing says which belong together: each is a program."""
    start: datetime | None = None
    columns: list[str] = []
    for number, line in lines(path, advance):
        where, cells = f"{path}, line {number}", _cells(line)
        row = dict(zip(columns or cells, cells, strict=False))
        if not set(_COLUMNS) <= set(row):
            raise TraceError(f"{where}: {line.strip()!r:.80} has no cell for one of {', '.join(_COLUMNS)}.")
        if not columns:
            columns = cells
            continue
        time = _time(row["TIMESTAMP"], where)
        start = start or time
        arrival_s = max(0.0, (time - start).total_seconds())
        prompt_tokens, output_tokens = (whole_or_text(row, key, where) for key in _COLUMNS[1:])
        call = TraceCall("c0", (), max(1, output_tokens), prompt_tokens, at_s=0.0)
        yield TraceProgram(f"{path.stem}-{number}", (call,), arrival_s=arrival_s)


AZURE: Final = Importer(
    "azure",
    "Azure's LLM inference traces, a CSV with TIMESTAMP, ContextTokens and GeneratedTokens",
    lambda _, head: set(_COLUMNS) <= set(_cells(head.partition("\n")[0])),
    _read_azure,
)


def _cells(line: str) -> list[str]:
    return [cell.strip().strip('"') for cell in line.split(",")]  # no cell of these files has a comma


def _time(text: str, where: str) -> datetime:
    try:
        time = datetime.fromisoformat(text.strip())
    except ValueError:
        raise TraceError(
            f"{where}: TIMESTAMP is {text!r:.40}; expected a time such as 2023-11-16 18:17:03.9799."
        ) from None
    return time if time.tzinfo is not None else time.replace(tzinfo=UTC)


_EXPECTED: Final = "LiteLLM's StandardLoggingPayload, an object with startTime, endTime and prompt_tokens, on each line"
_PAYLOAD: Final = "standard_logging_object"  # under which a callback gets it
_OTHER: Final = ("embedding", "image", "speech", "transcription", "moderation", "rerank", "file", "batch", "vector")


def _start_s_litellm(path: Path) -> float | None:
    """The beginning of the first request."""
    return min((span.begin_s for _, span in _requests(path, lambda _: None)), default=None)


def _read_litellm(path: Path, _: Blocks, advance: Callable[[int], object]) -> Iterator[TraceProgram | LeftOut]:
    """Reads requests. A program is a session, or without one a `trace_id`, which may be the session's id."""
    for group in together(lambda advance: _requests(path, advance), advance, lambda each: each[0]):
        yield from program_of(group[0][0], [span for _, span in group])


LITELLM: Final = Importer(
    "litellm",
    "LiteLLM's logs, a StandardLoggingPayload on each line",
    begins(("{", "["), "startTime", "endTime", "prompt_tokens", "completion_tokens"),
    _read_litellm,
    _start_s_litellm,
)


def _requests(path: Path, advance: Callable[[int], object]) -> Iterator[tuple[str, LoggedSpan]]:
    """The requests of a model for text, with what they belong to."""
    for where, data in documents(path, advance, _EXPECTED):
        for number, each in enumerate(data if isinstance(data, list) else [data], 1):
            place = f"{where}, request {number}" if isinstance(data, list) else where
            row = an_object(each, place, _EXPECTED)
            if _PAYLOAD in row:
                row = an_object(row[_PAYLOAD], place, _EXPECTED)
            kind = text(row, "call_type", place) or ""
            if not any(other in kind for other in _OTHER):
                yield _request(row, place)


def _request(row: dict[str, Any], where: str) -> tuple[str, LoggedSpan]:
    request_id = text(row, "id", where) or where
    begin_s, end_s = moment(row, "startTime", where), moment(row, "endTime", where)
    if begin_s is None or end_s is None:
        raise TraceError(f"{where}: startTime is {begin_s} and endTime is {end_s}; expected {_EXPECTED}.")
    prompt, output = (
        whole(row, "prompt_tokens", where, required=True),
        whole(row, "completion_tokens", where, required=True),
    )
    # A failed request, and one that LiteLLM's own cache answered, has reached no engine.
    is_answered = text(row, "status", where) in (None, "success") and row.get("cache_hit") not in (True, "True")
    span = LoggedSpan(
        where=where,
        span_id=where,
        parent_id=None,
        begin_s=begin_s,
        end_s=max(begin_s, end_s),
        is_call=True,
        lengths=(prompt, output) if is_answered and prompt > 0 else None,
        cached=_cached(row, where),
        texts=texts_of(row.get("messages")),
    )
    return text(row, "session_id", where, empty=True) or text(row, "trace_id", where) or request_id, span


def _cached(row: dict[str, Any], where: str) -> int:
    """The prompt's tokens that the server's cache had, in the usage of the response or of its record."""
    response, record = row.get("response"), row.get("metadata")
    for holder, key in ((response, "usage"), (record, "usage_object")):
        usage = holder.get(key) if isinstance(holder, dict) else None
        details = usage.get("prompt_tokens_details") if isinstance(usage, dict) else None
        if isinstance(details, dict) and details.get("cached_tokens") is not None:
            return whole(details, "cached_tokens", where)
    return 0


_COMMAND: Final = "vllm serve --enable-log-requests --enable-log-outputs --log-level DEBUG"
_LINE: Final = re.compile(r"\(\w+ pid=\d+\) [A-Z]+ (\d\d-\d\d \d\d:\d\d:\d\d) \[\S*?(\w+)\.py:\d+\] (.*)")
_IDS: Final = r"(\[[\d, ]*\]|\([\d, ]*\)|None)"
_PROMPT: Final = re.compile(rf"Request (\S+) details: prompt: .*, prompt_token_ids: {_IDS}, prompt_embeds shape: .*")
_RECEIVED: Final = re.compile(r"Received request (\S+): params: (?:SamplingParams\(n=(\d+))?")
_TOKENS: Final = re.compile(rf"Generated response (\S+)(?: \(streaming \w+\))? details: output_token_ids: {_IDS}")
_ANSWER: Final = re.compile(
    r"Generated response (\S+)( \(streaming delta\))?(?: \(streaming complete\))?: output: (.*)"
)
_YEAR_S: Final = 366 * 86400.0


@dataclass(slots=True)
class _Request:
    """A request that is not answered yet."""

    arrival_s: float
    prompt_tokens: int
    prompt: list[int]  # hashes of its blocks
    output_tokens: int = 0
    answers: int = 1  # that are still to come


def _read_vllm(path: Path, blocks: Blocks, advance: Callable[[int], object]) -> Iterator[TraceProgram | LeftOut]:
    """Reads requests, of which nothing says which belong together: each is a program. Blocks are those of the tokens.

    The times of a log have whole seconds and no year.
    """
    scope, clock = blocks.scope(), _Clock()
    open_requests: dict[str, _Request | None] = {}  # None: its prompt is not in the log
    left_out = 0
    for number, line in lines(path, advance):
        where, found = f"{path}, line {number}", _LINE.match(line)
        if found is None or found[2] != "request_logger":
            continue
        message = found[3]
        if prompt := _PROMPT.match(message):
            left_out += prompt[1] in open_requests
            at_s, tokens = clock.since_start_s(found[1], where), _ids(prompt[2], where)
            open_requests[prompt[1]] = _Request(at_s, len(tokens), _hashes(tokens)) if tokens is not None else None
        elif received := _RECEIVED.match(message):
            if received[1] not in open_requests:
                raise TraceError(f"{where}: the prompt's tokens are not in the log; expected that of {_COMMAND}.")
            if (request := open_requests[received[1]]) is not None:
                request.answers = max(1, int(received[2] or 1))
        elif answered := _TOKENS.match(message):
            if (request := open_requests.get(_asked(answered[1], open_requests))) is not None:
                request.output_tokens += len(_ids(answered[2], where) or [])
        elif (answered := _ANSWER.match(message)) and answered[2] is None:
            name = _asked(answered[1], open_requests)
            if (request := open_requests.get(name)) is not None:
                request.answers -= 1
                if not request.answers:
                    del open_requests[name]
                    yield _program(f"{path.stem}-{answered[1]}", request, answered[3], scope)
    left_out += len(open_requests)
    if left_out:
        yield LeftOut(left_out)


VLLM_LOG: Final = Importer("vllm", f"the log of {_COMMAND}", lambda _, head: _LINE.search(head) is not None, _read_vllm)


class _Clock:
    """Seconds since the first time of a log."""

    def __init__(self) -> None:
        self._start_s: float | None = None
        self._last_s = 0.0

    def since_start_s(self, text: str, where: str) -> float:
        """Return the seconds up to a time such as `11-25 16:50:01`. A time long before the last one is a year later."""
        try:
            at_s = (datetime.strptime(f"2000-{text}", "%Y-%m-%d %H:%M:%S") - datetime(2000, 1, 1)).total_seconds()
        except ValueError:
            raise TraceError(f"{where}: the time is {text!r:.40}; expected one such as 11-25 16:50:01.") from None
        if at_s < self._last_s - _YEAR_S / 2:
            at_s += _YEAR_S
        self._last_s = at_s
        if self._start_s is None:
            self._start_s = at_s
        return max(0.0, at_s - self._start_s)


def _program(name: str, request: _Request, answer: str, scope: BlockScope) -> TraceProgram:
    # A stream's tokens are logged with its parts, or not at all.
    output = request.output_tokens or tokens_of(answer.rpartition(", finish_reason: ")[0])
    call = TraceCall("c0", (), max(1, output), request.prompt_tokens, at_s=0.0)
    program = TraceProgram(name, (call,), request.arrival_s)
    return with_block_hashes(program, {"c0": scope.numbers(request.prompt)}, BLOCK_TOKENS)


def _asked(answered: str, open_requests: Container[str]) -> str:
    """The id under which a request was logged. The answers of Responses have another one, `resp_1` for `resp_1_0`."""
    return answered if answered in open_requests else f"{answered}_0"


def _ids(text: str, where: str) -> list[int] | None:
    if text == "None":
        return None
    try:
        found: list[int] = json.loads(f"[{text[1:-1].removesuffix(',')}]")
    except ValueError:
        raise TraceError(f"{where}: the token ids are {text!r:.40}; expected whole numbers in brackets.") from None
    return found


def _hashes(tokens: list[int]) -> list[int]:
    whole = len(tokens) - len(tokens) % BLOCK_TOKENS
    return [hash(tuple(tokens[begin : begin + BLOCK_TOKENS])) for begin in range(0, whole, BLOCK_TOKENS)]
