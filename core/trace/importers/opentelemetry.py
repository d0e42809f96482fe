"""Spans of OpenTelemetry in OTLP's JSON, by its conventions for generative AI. Those of Weft have a program's graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from weft.core.errors import TraceError
from weft.core.trace.format import MOST, TraceCall, TraceProgram, ordered, text
from weft.core.trace.importers.contract import Blocks, Importer, LeftOut, begins
from weft.core.trace.importers.reading import a_list, an_object, documents, together, whole_or_text
from weft.core.trace.importers.spans import LoggedSpan, program_of, shared_tokens, texts_of

_EXPECTED: Final = "OTLP's JSON, an object with resourceSpans"
_CALLS: Final = ("chat", "text_completion", "generate_content")
_AGENTS: Final = ("invoke_agent", "invoke_workflow")
_KINDS: Final = {"LLM": "chat", "TOOL": "execute_tool", "AGENT": "invoke_agent"}  # OpenInference's, as operations
_INPUT: Final = ("gen_ai.usage.input_tokens", "gen_ai.usage.prompt_tokens", "llm.token_count.prompt")
_OUTPUT: Final = ("gen_ai.usage.output_tokens", "gen_ai.usage.completion_tokens", "llm.token_count.completion")
_CACHE_READ: Final = ("gen_ai.usage.cache_read.input_tokens", "gen_ai.usage.cache_read_input_tokens")
_CACHED: Final = (*_CACHE_READ, "llm.token_count.prompt_details.cache_read")
_KEPT: Final = ("gen_ai.", "weft.", "llm.token_count.", "openinference.span.kind", "input.value", "tool.name")
_NANOSECONDS: Final = 10**9

_Found = tuple[LoggedSpan, dict[str, Any]]  # a span and its attributes


def _start_s(path: Path) -> float | None:
    """The beginning of the first span."""
    return min((span.begin_s for span, _ in _spans(path, lambda _: None)), default=None)


def _read(path: Path, _: Blocks, advance: Callable[[int], object]) -> Iterator[TraceProgram | LeftOut]:
    """Reads spans. A program is a trace, or in spans of Weft a program."""
    for group in together(lambda advance: _spans(path, advance), advance, _program_id):
        program_id, attributes = _program_id(group[0]), group[0][1]
        if "weft.program.id" in attributes:
            yield from _of_weft(program_id, group)
        else:
            yield from program_of(program_id, [span for span, _ in group])


OPENTELEMETRY: Final = Importer(
    "opentelemetry",
    "OpenTelemetry's spans for generative AI in OTLP's JSON",
    begins("{", "resourceSpans"),
    _read,
    _start_s,
)


def _program_id(found: _Found) -> str:
    return str(found[1].get("weft.program.id") or found[1]["trace"])


def _spans(path: Path, advance: Callable[[int], object]) -> Iterator[_Found]:
    for where, data in documents(path, advance, _EXPECTED):
        number = 0
        for resource in _objects(an_object(data, where, _EXPECTED), "resourceSpans", where):
            for scope in _objects(resource, "scopeSpans", where):
                for row in _objects(scope, "spans", where):
                    number += 1
                    yield _span(row, f"{where}, span {number}")


def _objects(data: Mapping[str, Any], key: str, where: str) -> Iterator[dict[str, Any]]:
    for each in a_list(data, key, where) if data.get(key) is not None else ():
        yield an_object(each, where, f"objects in {key}")


def _span(row: dict[str, Any], where: str) -> _Found:
    attributes = dict(_attributes(row, where))
    operation = attributes.get("gen_ai.operation.name") or _KINDS.get(str(attributes.get("openinference.span.kind")))
    messages = attributes.pop("gen_ai.input.messages", None) or attributes.pop("input.value", None)
    prompt, output = _tokens(attributes, _INPUT, where), _tokens(attributes, _OUTPUT, where)
    is_call = operation in _CALLS
    may_be_call = is_call or operation is None  # a server's span of a call has no operation
    name = attributes.get("gen_ai.agent.name") or attributes.get("gen_ai.workflow.name") or text(row, "name", where)
    tool = attributes.get("gen_ai.tool.name") or attributes.get("tool.name") or "tool"
    begin_s = _time(row, "startTimeUnixNano", where)
    span = LoggedSpan(
        where=where,
        span_id=text(row, "spanId", where, required=True) or "",
        parent_id=text(row, "parentSpanId", where, empty=True) or None,
        begin_s=begin_s,
        end_s=max(begin_s, _time(row, "endTimeUnixNano", where)),
        is_call=is_call,
        lengths=(prompt, output or 0)
        if may_be_call and prompt is not None and (is_call or output is not None)
        else None,
        cached=_tokens(attributes, _CACHED, where) or 0,
        tool=str(tool) if operation == "execute_tool" else None,
        agent=str(name or "agent") if operation in _AGENTS else None,
        texts=texts_of(messages) if is_call else None,
    )
    return span, attributes | {"trace": text(row, "traceId", where, required=True)}


def _attributes(row: dict[str, Any], where: str) -> Iterator[tuple[str, Any]]:
    """The attributes of a span that are looked at."""
    for each in _objects(row, "attributes", where):
        key = text(each, "key", where, required=True) or ""
        if key.startswith(_KEPT):
            value = _value(an_object(each.get("value"), where, "an object with stringValue, intValue, …"), where)
            yield key, value


def _value(data: dict[str, Any], where: str) -> Any:
    if "arrayValue" in data:
        array = an_object(data["arrayValue"], where, "an object with values")
        return [_value(each, where) for each in _objects(array, "values", where)]
    return next(iter(data.values()), None)


def _tokens(attributes: Mapping[str, Any], keys: tuple[str, ...], where: str) -> int | None:
    """A number of tokens. OTLP's JSON has whole numbers as texts."""
    key = next((key for key in keys if attributes.get(key) is not None), None)
    return None if key is None else whole_or_text(attributes, key, where)


def _time(row: dict[str, Any], key: str, where: str) -> float:
    return whole_or_text(row, key, where, MOST * _NANOSECONDS) / _NANOSECONDS


# -- Weft's own spans, whose calls tell their parents


def _of_weft(program_id: str, found: list[_Found]) -> Iterator[TraceProgram | LeftOut]:
    spans: dict[str, _Found] = {}
    stands_for: dict[str, list[str]] = {}  # for calls without an answer: their parents, which their children get
    left_out = 0
    program: dict[str, Any] = {}
    for span, attributes in found:
        if span.agent is not None:
            program = attributes
        if not span.is_call:
            continue
        call_id, parents = attributes.get("weft.call.id"), attributes.get("weft.call.parents") or []
        if not isinstance(call_id, str) or not isinstance(parents, list):
            raise TraceError(f"{span.where}: weft.call.id is {call_id!r:.40}; expected the id of a call.")
        if call_id not in spans and span.lengths is not None and span.lengths[1]:
            spans[call_id] = (span, attributes)
        else:
            left_out += 1
            if call_id not in spans:
                stands_for[call_id] = [str(parent) for parent in parents]
    if spans:
        start_s = min(span.begin_s for span, _ in spans.values())
        tools = [span for span, _ in found if span.tool is not None]
        calls = [_weft_call(call_id, spans, stands_for, tools, start_s) for call_id in spans]
        name, tenant = (
            str(each) if (each := program.get(key)) else None for key in ("weft.program.name", "weft.tenant")
        )
        name = name or next((str(each) for _, has in found if (each := has.get("weft.program.name"))), None)
        yield TraceProgram(program_id, ordered(calls, found[0][0].where), start_s, name, tenant)
    if left_out:
        yield LeftOut(left_out)


def _weft_call(
    call_id: str, spans: dict[str, _Found], stands_for: dict[str, list[str]], tools: list[LoggedSpan], start_s: float
) -> TraceCall:
    span, attributes = spans[call_id]
    parents: dict[str, None] = {}
    waiting, seen = list(attributes.get("weft.call.parents") or []), set[str]()
    while waiting:
        parent = str(waiting.pop(0))
        if parent in spans:
            parents[parent] = None
        elif parent not in seen:
            seen.add(parent)
            waiting = stands_for.get(parent, []) + waiting
    end_s = max((spans[parent][0].end_s for parent in parents), default=start_s)
    used = [tool.tool for tool in tools if end_s <= tool.begin_s and tool.end_s <= span.begin_s and tool.tool]
    before = spans[next(iter(parents))][0].lengths if parents else None
    prompt, output = span.lengths or (0, 0)
    label = attributes.get("gen_ai.agent.name")
    call = TraceCall(
        call_id=call_id,
        parents=tuple(parents),
        output_tokens=output,
        prompt_tokens=prompt,
        gap_s=max(0.0, round(span.begin_s - end_s, 6)),
        tool=(", ".join(dict.fromkeys(used)) or None) if parents else None,
        shared_prefix_tokens=shared_tokens(prompt, span.cached, before),
        at_s=max(0.0, round(span.begin_s - start_s, 6)),
    )
    return replace(call, agent=str(label)) if label else call
