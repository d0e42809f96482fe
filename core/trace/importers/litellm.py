"""Logs of LiteLLM's requests, its `StandardLoggingPayload` on each line."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from weft.core.errors import TraceError
from weft.core.trace.fields import text, whole
from weft.core.trace.format import TraceProgram
from weft.core.trace.importers.contract import Blocks, LeftOut
from weft.core.trace.importers.reading import an_object, documents, moment, together
from weft.core.trace.importers.spans import Span, program_of, texts_of

_EXPECTED: Final = "LiteLLM's StandardLoggingPayload, an object with startTime, endTime and prompt_tokens, on each line"
_PAYLOAD: Final = "standard_logging_object"  # under which a callback gets it
_OTHER: Final = ("embedding", "image", "speech", "transcription", "moderation", "rerank", "file", "batch", "vector")


class LiteLlm:
    """Reads requests. A program is a `trace_id`, which is the session's id if the client gives one."""

    name: str = "litellm"
    description: str = "LiteLLM's logs, a StandardLoggingPayload on each line"

    def matches(self, path: Path, head: str) -> bool:
        """Whether the file begins like such a log."""
        del path
        keys = ("startTime", "endTime", "prompt_tokens", "completion_tokens")
        return head.lstrip().startswith(("{", "[")) and all(f'"{key}"' in head for key in keys)

    def start_s(self, path: Path) -> float | None:
        """The beginning of the first request."""
        return min((span.begin_s for _, span in _requests(path, lambda _: None)), default=None)

    def read(self, path: Path, blocks: Blocks, advance: Callable[[int], object]) -> Iterator[TraceProgram | LeftOut]:
        """Yield a program for each trace."""
        del blocks
        for group in together(lambda advance: _requests(path, advance), advance, lambda each: each[0]):
            yield from program_of(group[0][0], [span for _, span in group])


def _requests(path: Path, advance: Callable[[int], object]) -> Iterator[tuple[str, Span]]:
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


def _request(row: dict[str, Any], where: str) -> tuple[str, Span]:
    request_id = text(row, "id", where) or where
    begin_s, end_s = moment(row, "startTime", where), moment(row, "endTime", where)
    if begin_s is None or end_s is None:
        raise TraceError(f"{where}: startTime is {begin_s} and endTime is {end_s}; expected {_EXPECTED}.")
    prompt, output = (
        whole(row, "prompt_tokens", where, required=True),
        whole(row, "completion_tokens", where, required=True),
    )
    # A failed request, and one that LiteLLM's own cache answered, has reached no engine.
    is_answered = text(row, "status", where) in (None, "success") and row.get("cache_hit") is not True and prompt > 0
    span = Span(
        where=where,
        span_id=where,
        parent_id=None,
        begin_s=begin_s,
        end_s=max(begin_s, end_s),
        is_call=True,
        lengths=(prompt, output) if is_answered else None,
        cached=_cached(row, where),
        texts=texts_of(row.get("messages")),
    )
    names = ("trace_id", "litellm_session_id", "session_id")
    return next((found for name in names if (found := text(row, name, where))), request_id), span


def _cached(row: dict[str, Any], where: str) -> int:
    """The prompt's tokens that the server's cache had, in the usage of the response or of its record."""
    response, record = row.get("response"), row.get("metadata")
    for holder, key in ((response, "usage"), (record, "usage_object")):
        usage = holder.get(key) if isinstance(holder, dict) else None
        details = usage.get("prompt_tokens_details") if isinstance(usage, dict) else None
        if isinstance(details, dict) and details.get("cached_tokens") is not None:
            return whole(details, "cached_tokens", where)
    return 0
