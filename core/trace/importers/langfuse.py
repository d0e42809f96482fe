"""Observations that Langfuse exports: JSON or JSON lines, from its API, its pages or its exports to a bucket."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from weft.core.errors import TraceError
from weft.core.trace.format import TraceProgram, text
from weft.core.trace.importers.contract import Blocks, Importer, LeftOut
from weft.core.trace.importers.mooncake import key_of
from weft.core.trace.importers.reading import a_list, an_object, documents, moment, together, whole_or_text
from weft.core.trace.importers.spans import LoggedSpan, program_of, texts_of

_EXPECTED: Final = "Langfuse's observations, objects with id, traceId, type and startTime"
_TRACE: Final = ("traceId", "trace_id")
_PARENT: Final = ("parentObservationId", "parent_observation_id")
_BEGIN: Final = ("startTime", "start_time")
_END: Final = ("endTime", "end_time")
_DETAILS: Final = ("usageDetails", "usage_details")
_TRACE_NAME: Final = ("traceName", "trace_name")
_TOOLS: Final = ("TOOL", "RETRIEVER")


def _matches(_: Path, head: str) -> bool:
    """Whether the file begins like observations."""
    names = (("traceId", "parentObservationId", "startTime"), ("trace_id", "parent_observation_id", "start_time"))
    return head.lstrip().startswith(("{", "[")) and any(
        all(f'"{name}"' in head for name in (*each, "type")) for each in names
    )


def _start_s(path: Path) -> float | None:
    """The beginning of the first observation."""
    return min((span.begin_s for _, _, span in _observations(path, lambda _: None)), default=None)


def _read(path: Path, _: Blocks, advance: Callable[[int], object]) -> Iterator[TraceProgram | LeftOut]:
    """Reads observations. A program is a trace, and a generation a call. Tools and agents keep their names."""
    for group in together(lambda advance: _observations(path, advance), advance, lambda each: each[0]):
        name = next((name for _, name, _ in group if name), None)
        yield from program_of(group[0][0], [span for _, _, span in group], name)


LANGFUSE: Final = Importer("langfuse", "Langfuse's observations, as JSON or JSON lines", _matches, _read, _start_s)


def _observations(path: Path, advance: Callable[[int], object]) -> Iterator[tuple[str, str | None, LoggedSpan]]:
    """The observations, with their traces and the names of these."""
    for where, data in documents(path, advance, _EXPECTED):
        rows = data
        for key in ("observations", "data"):  # a trace with its observations, or a page of the API
            if isinstance(data, dict) and key in data and key_of(data, *_TRACE) not in data:
                rows = a_list(data, key, where)
        for number, row in enumerate(rows if isinstance(rows, list) else [rows], 1):
            place = f"{where}, observation {number}" if isinstance(rows, list) else where
            yield _observation(an_object(row, place, _EXPECTED), place)


def _observation(row: dict[str, Any], where: str) -> tuple[str, str | None, LoggedSpan]:
    kind = (text(row, "type", where, required=True) or "").upper()
    begin_s = moment(row, key_of(row, *_BEGIN), where)
    if begin_s is None:
        raise TraceError(f"{where}: there is no startTime; expected {_EXPECTED}.")
    end_s = moment(row, key_of(row, *_END), where)
    name = text(row, "name", where, empty=True)
    is_call = kind == "GENERATION"
    span = LoggedSpan(
        where=where,
        span_id=text(row, "id", where, required=True) or "",
        parent_id=text(row, key_of(row, *_PARENT), where, empty=True) or None,
        begin_s=begin_s,
        end_s=begin_s if end_s is None else max(begin_s, end_s),
        is_call=is_call,
        tool=(name or "tool") if kind in _TOOLS else None,
        agent=(name or "agent") if kind == "AGENT" else None,
        texts=texts_of(row.get("input")) if is_call else None,
    )
    if is_call and row.get("level") != "ERROR":
        span.lengths, span.cached = _usage(row, where)
    trace = text(row, key_of(row, *_TRACE), where, required=True) or ""
    return trace, text(row, key_of(row, *_TRACE_NAME), where, empty=True), span


def _usage(row: dict[str, Any], where: str) -> tuple[tuple[int, int] | None, int]:
    """The tokens of prompt and output, and those of the prompt that a cache had.

    Details tell the tokens of each kind, and those from a cache are no part of the others. The older `usage` has sums,
    and so has the observation itself.
    """
    details = row.get(key_of(row, *_DETAILS)) or {}
    tokens = {
        key: whole_or_text(details, key, where)
        for key in an_object(details, where, "an object with input and output in usage")
    }
    prompts = {key: value for key, value in tokens.items() if "input" in key}
    outputs = {key: value for key, value in tokens.items() if "output" in key}
    if prompts:
        cached = sum(value for key, value in prompts.items() if "cache" in key and "creation" not in key)
        return (sum(prompts.values()), sum(outputs.values())), cached
    sums = {"input": row.get("inputUsage") or None, "output": row.get("outputUsage")}
    usage = an_object(row.get("usage") or sums, where, "an object with input and output in usage")
    prompt, output = key_of(usage, "input", "promptTokens"), key_of(usage, "output", "completionTokens")
    if usage.get(prompt) is None or usage.get("unit") not in (None, "TOKENS"):
        return None, 0
    return (
        whole_or_text(usage, prompt, where),
        whole_or_text(usage, output, where) if usage.get(output) is not None else 0,
    ), 0
