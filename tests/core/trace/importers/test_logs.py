"""Logs of calls with times: OpenTelemetry's spans, LiteLLM's requests, Langfuse's observations, all made up here."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trace_samples import litellm_row, observation, otlp, otlp_call, otlp_span, vllm_answer, vllm_prompt

from weft.core.errors import TraceError
from weft.core.trace.format import TraceCall, TraceProgram
from weft.core.trace.importers import TraceImport
from weft.core.trace.importers.contract import LeftOut
from weft.core.trace.importers.spans import LoggedSpan, program_of

AGENT = {"operation__name": "invoke_agent"}
TOOL = {"operation__name": "execute_tool"}


def imported(folder: Path, *rows: Any, name: str | None = None) -> tuple[list[TraceProgram], int]:
    """The programs of a file, and how many calls were left out."""
    path = folder / "log.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = TraceImport([path], format=name)
    return list(found), found.counts.calls_unused


def shape(calls: Iterable[TraceCall]) -> list[tuple[str, tuple[str, ...], float, str | None, str | None]]:
    return [(call.call_id, call.parents, call.gap_s, call.tool, call.agent) for call in calls]


def test_calls_and_tools_follow_one_another_in_their_span(tmp_path: Path) -> None:
    """A tool is what ran in the gap. Spans come in the order of their ends, over several lines. Times count from the
    first span of the file, and the agent around all is the program."""
    ((program,), left_out) = imported(
        tmp_path,
        otlp(otlp_call("a", "root", 1.0, 2.0, 100, 10)),
        otlp(
            otlp_span("find", "root", 2.0, 3.5, **TOOL, tool__name="find"),
            otlp_call("b", "root", 4.0, 5.0, 120, 5, 96),
            otlp_span("root", "", 0.0, 6.0, **AGENT, agent__name="researcher"),
        ),
    )
    assert (program.program, program.name, program.arrival_s, left_out) == ("t1", "researcher", 1.0, 0)
    assert program.calls == (
        TraceCall("c0", (), 10, 100, at_s=0.0),
        TraceCall("c1", ("c0",), 5, 120, gap_s=2.0, tool="find", shared_prefix_tokens=110, at_s=3.0),
    )


def test_spans_of_openinference(tmp_path: Path) -> None:
    """They name kinds, tokens and tools in their own way, and have the request's JSON as their input."""

    def span(name: str, kind: str, times: tuple[float, float], **attributes: Any) -> dict[str, Any]:
        given = {"openinference.span.kind": kind, **attributes}
        values = [{"key": key, "value": {"stringValue": value}} for key, value in given.items()]
        return otlp_span(name, "" if kind == "AGENT" else "root", *times) | {"attributes": values}

    def call(name: str, begin_s: float, tokens: tuple[str, str, str], *contents: str) -> dict[str, Any]:
        roles = ("system", "user", "assistant", "user")
        messages = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=False)]
        keys = ("prompt", "completion", "prompt_details.cache_read")
        counts = {f"llm.token_count.{key}": count for key, count in zip(keys, tokens, strict=True)}
        return span(
            name, "LLM", (begin_s, begin_s + 1.0), **counts, **{"input.value": json.dumps({"messages": messages})}
        )

    ((program,), left_out) = imported(
        tmp_path,
        otlp(
            call("a", 0.0, ("100", "10", "0"), "s" * 100, "u"),
            span("find", "TOOL", (1.0, 3.0), **{"tool.name": "search", "input.value": "{}"}),
            call("b", 3.5, ("130", "5", "0"), "s" * 100, "u", "a", "v"),
            call("c", 5.0, ("40", "5", "32"), "another"),
            span("other", "LLM", (6.0, 7.0)),
            span("root", "AGENT", (0.0, 9.0)),
        ),
    )
    assert (program.name, left_out) == ("root", 1)
    assert program.calls == (
        TraceCall("c0", (), 10, 100, at_s=0.0),
        TraceCall("c1", ("c0",), 5, 130, gap_s=2.5, tool="search", shared_prefix_tokens=110, at_s=3.5),
        TraceCall("c2", ("c1",), 5, 40, gap_s=0.5, at_s=5.0),
    )


def test_sub_agents_are_branches_that_join(tmp_path: Path) -> None:
    """A call of one does not wait for those of the other, though they ended before it. The call after them waits for
    both, and continues the one that started them."""
    ((program,), _) = imported(
        tmp_path,
        otlp(
            otlp_span("root", "", 0.0, 20.0, **AGENT),
            otlp_call("plan", "root", 0.0, 1.0, 50, 5),
            otlp_span("task", "root", 1.0, 9.0, **TOOL, tool__name="task"),
            otlp_span("left", "task", 1.0, 9.0, **AGENT, agent__name="left"),
            otlp_call("l1", "left", 1.0, 2.0, 10, 5),
            otlp_call("l2", "left", 6.0, 8.0, 20, 5),
            otlp_span("right", "root", 1.0, 5.0, **AGENT, agent__name="right"),
            otlp_call("r1", "right", 2.0, 4.0, 10, 5),
            otlp_call("end", "root", 10.0, 11.0, 70, 5),
        ),
    )
    names = {0.0: "plan", 1.0: "l1", 2.0: "r1", 6.0: "l2", 10.0: "end"}
    ids = {call.call_id: names[call.at_s or 0.0] for call in program.calls}
    found = {ids[call.call_id]: (tuple(ids[each] for each in call.parents), call.agent) for call in program.calls}
    assert found == {
        "plan": ((), None),
        "l1": (("plan",), "left"),
        "r1": (("plan",), "right"),
        "l2": (("l1",), "left"),
        "end": (("plan", "r1", "l2"), None),
    }
    shared = {ids[call.call_id]: call.shared_prefix_tokens for call in program.calls}
    assert shared == {"plan": 0, "l1": 0, "r1": 0, "l2": 15, "end": 55}


def test_a_call_is_one_however_many_spans_tell_of_it(tmp_path: Path) -> None:
    """A server's span inside a client's, a span around calls with their sums, and a span that was sent twice."""
    server = {"usage__prompt_tokens": 10, "usage__completion_tokens": 5}
    whole = {"usage__input_tokens": 30, "usage__output_tokens": 10}
    call = otlp_call("a", "root", 1.0, 2.0, 10, 5)
    ((program,), left_out) = imported(
        tmp_path,
        otlp(
            otlp_span("root", "", 0.0, 9.0, operation__name="chat", **whole),
            call,
            otlp_span("server", "a", 1.1, 1.9, **server),
            otlp_call("b", "root", 3.0, 4.0, 20, 5),
            call,
        ),
    )
    assert [call.prompt_tokens for call in program.calls] == [10, 20]
    assert left_out == 1
    ((alone,), _) = imported(tmp_path, otlp(otlp_span("llm_request", "", 0.0, 1.0, **server)))
    assert [call.prompt_tokens for call in alone.calls] == [10]


def test_calls_without_tokens_are_left_out_and_counted(tmp_path: Path) -> None:
    """Some libraries do not record the tokens of streams, and a call that failed has none. What follows such a call
    follows the call before it."""
    failed = otlp_span("x", "", 3.0, 4.0, operation__name="chat")
    ((program,), left_out) = imported(
        tmp_path, otlp(otlp_call("a", "", 1.0, 2.0, 10, 5), failed, otlp_call("b", "", 5.0, 6.0, 10, 5))
    )
    assert shape(program.calls) == [("c0", (), 0.0, None, None), ("c1", ("c0",), 3.0, None, None)]
    assert left_out == 1
    with pytest.raises(TraceError, match="no program, and 1 calls that failed or have no token counts"):
        imported(tmp_path, otlp(failed))


def test_messages_tell_how_much_of_a_prompt_is_old(tmp_path: Path) -> None:
    """Where a log has them. Only hashes and lengths are kept. An answer that a prompt repeats is old too."""
    old = [{"role": "system", "content": "s" * 100}, {"role": "user", "content": "u" * 100}]
    answer = {"role": "assistant", "content": "a" * 60}
    rows = [
        litellm_row("a", 0.0, 1.0, 40, 9, messages=old),
        litellm_row("a", 2.0, 3.0, 60, 9, messages=[*old, answer, {"role": "user", "content": "v" * 60}]),
        litellm_row("a", 4.0, 5.0, 40, 9, messages=[old[0], {"role": "user", "content": "w" * 100}]),
        litellm_row("a", 6.0, 7.0, 80, 9, messages=[{"role": "user", "content": "x"}]),
    ]
    ((program,), _) = imported(tmp_path, *rows)
    first, continued, forked, other = (call.shared_prefix_tokens for call in program.calls)
    assert (first, continued, other) == (0, 49, 0)
    assert 18 <= forked <= 22, "half of its characters"
    assert not any("sss" in str(call) for call in program.calls)


def test_messages_tell_which_tool_answered(tmp_path: Path) -> None:
    """By the call that it answers, in the last message that has one of this id, or else by its own name."""
    asked = {"role": "assistant", "tool_calls": [{"id": "c1", "function": {"name": "search"}}, {"id": "c2"}, 7]}
    last = [
        [asked, {"role": "tool", "tool_call_id": "c1", "name": "other", "content": "a"}],
        [asked, {"role": "tool", "tool_call_id": "c2", "name": "fetch", "content": "b"}],
        [asked, {"role": "tool", "tool_call_id": "c3", "content": "c"}],
        [asked, {"role": "user", "content": "d"}],
        [asked],
    ]
    start: list[dict[str, Any]] = [{"role": "user", "content": "u"}]
    rows = [
        litellm_row("a", 2.0 * number, 2.0 * number + 1, 40 + number, 9, messages=[*start, *each])
        for number, each in enumerate([[], *last])
    ]
    ((program,), _) = imported(tmp_path, *rows)
    assert [call.tool for call in program.calls[1:]] == ["search", "fetch", "tool", "human", None]


@pytest.mark.parametrize(
    "messages", [None, "redacted-by-litellm", [{"role": "user", "content": "redacted-by-litellm"}]]
)
def test_without_messages_a_prompt_that_grows_continues_the_one_before(messages: Any, tmp_path: Path) -> None:
    """Of a shorter one, only what the server's cache had is old."""
    usage = {"usage": {"prompt_tokens_details": {"cached_tokens": 16}}}
    rows = [
        litellm_row("a", 0.0, 1.0, 40, 9),
        litellm_row("a", 2.0, 3.0, 60, 9),
        litellm_row("a", 4.0, 5.0, 30, 9, response=usage),
        litellm_row("a", 6.0, 7.0, 20, 9),
    ]
    ((program,), _) = imported(tmp_path, *(row | {"messages": messages} for row in rows))
    assert [call.shared_prefix_tokens for call in program.calls] == [0, 49, 16, 0]


def test_requests_of_litellm_that_overlap_are_branches(tmp_path: Path) -> None:
    """Requests of one trace are a program. Those of the two that were sent at once do not wait for one another; the one
    after them waits for both. What reached no engine is left out, and what is no text is no call."""
    (programs, left_out) = imported(
        tmp_path,
        litellm_row("a", 0.0, 1.0, 10, 5),
        litellm_row("a", 2.0, 3.0, 10, 5),
        litellm_row("b", 0.0, 1.0, 10, 5),
        litellm_row("a", 2.0, 4.0, 10, 5),
        litellm_row("a", 4.0, 4.5, 10, 5, cache_hit=True),
        litellm_row("a", 4.0, 4.5, 0, 0, status="failure"),
        litellm_row("a", 4.0, 4.5, 10, 0, call_type="aembedding"),
        {"standard_logging_object": litellm_row("a", 5.0, 6.0, 10, 5)},
    )
    assert sorted(program.program for program in programs) == ["a", "b"]
    assert left_out == 2
    assert shape(next(program for program in programs if program.program == "a").calls) == [
        ("c0", (), 0.0, None, None),
        ("c1", ("c0",), 1.0, None, None),
        ("c2", ("c0",), 1.0, None, None),
        ("c3", ("c2", "c1"), 1.0, None, None),
    ]


def test_a_session_of_litellm_has_several_traces(tmp_path: Path) -> None:
    """As with `request_correlation_in_logs`. Without it, the session's id is that of the trace, and the session's own
    field is empty."""
    rows = [
        litellm_row("r1", 0.0, 1.0, 10, 5, session_id="s"),
        litellm_row("r2", 2.0, 3.0, 10, 5, session_id="s"),
        litellm_row("r3", 2.0, 3.0, 10, 5, session_id=""),
    ]
    programs, _ = imported(tmp_path, *rows)
    assert {program.program: shape(program.calls) for program in programs} == {
        "s": [("c0", (), 0.0, None, None), ("c1", ("c0",), 1.0, None, None)],
        "r3": [("c0", (), 0.0, None, None)],
    }


def test_logs_of_spend_have_no_trace_and_dates_and_texts(tmp_path: Path) -> None:
    """Rows of LiteLLM's table of spend, as the proxy 1.108 makes them."""
    times = {"startTime": "2026-11-27 06:54:15.685418+00:00", "endTime": "2026-11-27 06:54:16.685418+00:00"}
    row = litellm_row("", 0.0, 0.0, 10, 5) | times | {"session_id": "s", "messages": "{}", "cache_hit": "None"}
    del row["trace_id"]
    ((program,), left_out) = imported(tmp_path, row, row | {"cache_hit": "True"})
    assert (program.program, len(program.calls), left_out) == ("s", 1, 1)


def test_observations_of_langfuse(tmp_path: Path) -> None:
    """The tokens from a cache are part of the prompt. A trace is a program, with the name of the trace."""
    rows = [
        observation("chain", None, "SPAN", ("00:00", "00:09")),
        observation("g1", "chain", "GENERATION", ("00:01", "00:02"), {"input": "40", "output": 6, "total": 46}),
        observation("find", "chain", "TOOL", ("00:02", "00:05")),
        observation(
            "g2", "chain", "GENERATION", ("00:05", "00:08"),
            {"input": 9, "cache_read_input_tokens": 30, "output": 3, "output_reasoning_tokens": 4},
        ),
        observation("g3", "chain", "GENERATION", ("00:08", None)) | {"usage": {"input": 10, "output": 2, "total": 12}},
        observation("g4", "chain", "GENERATION", ("00:09", None)) | {"level": "ERROR"},
        observation("g5", "chain", "GENERATION", ("00:10", None)) | {"inputUsage": 20, "outputUsage": 1},
        observation("g6", "chain", "GENERATION", ("00:11", None)) | {"inputUsage": 0, "outputUsage": 0},
    ]  # fmt: skip
    ((program,), left_out) = imported(tmp_path, *(row | {"traceName": "nightly"} for row in rows))
    assert (program.program, program.name, left_out) == ("t1", "nightly", 2)
    assert [(call.prompt_tokens, call.output_tokens, call.tool) for call in program.calls] == [
        (40, 6, None),
        (39, 7, "find"),
        (10, 2, None),
        (20, 1, None),
    ]
    assert [call.shared_prefix_tokens for call in program.calls] == [0, 30, 0, 12]


def test_an_observation_may_quote_a_log_of_another_format(tmp_path: Path) -> None:
    """As where a framework puts the usage that a model's API told into the output."""
    usage = {"prompt_tokens": 40, "completion_tokens": 6}
    row = observation("g1", None, "GENERATION", ("00:01", "00:02"), {"input": 40, "output": 6}) | {"output": usage}
    ((program,), _) = imported(tmp_path, {"trace": {"id": "t1"}, "observations": [row]})
    assert [(call.prompt_tokens, call.output_tokens) for call in program.calls] == [(40, 6)]


@pytest.mark.parametrize("how", ["lines", "list", "page", "trace", "bucket"])
def test_langfuse_exports_observations_in_several_ways(how: str, tmp_path: Path) -> None:
    """Lines, a list, a page of the API, a trace with its observations, and rows with other names in a bucket."""
    rows = [
        observation("g1", None, "GENERATION", ("00:01", "00:02"), {"input": 40, "output": 6}),
        observation("g2", None, "GENERATION", ("00:03", "00:04"), {"input": 50, "output": 6}),
    ]
    if how == "bucket":
        names = {"traceId": "trace_id", "parentObservationId": "parent_observation_id", "startTime": "start_time"}
        names |= {"endTime": "end_time", "usageDetails": "usage_details"}
        rows = [{names.get(key, key): value for key, value in row.items()} for row in rows]
        rows = [row | {"start_time": row["start_time"].replace("T", " ").rstrip("Z")} for row in rows]
    whole = {"list": [rows], "page": [{"data": rows, "meta": {}}], "trace": [{"id": "t1", "observations": rows}]}
    ((program,), _) = imported(tmp_path, *whole.get(how, rows))
    assert [(call.parents, call.gap_s) for call in program.calls] == [((), 0.0), (("c0",), 1.0)]


def weft_call(name: str, begin_s: float, tokens: tuple[int, ...], parents: list[str]) -> dict[str, Any]:
    row = otlp_call(name, "root", begin_s, begin_s + 1.0, *tokens)
    values = [{"stringValue": parent} for parent in parents]
    row["attributes"] += [
        {"key": "weft.program.id", "value": {"stringValue": "p"}},
        {"key": "weft.call.id", "value": {"stringValue": name}},
        {"key": "weft.call.parents", "value": {"arrayValue": {"values": values}}},
    ]
    return row


def test_calls_of_weft_have_the_parents_that_they_tell(tmp_path: Path) -> None:
    """Times do not decide. A call without an answer hands its parents on. Other spans of the trace are no program."""
    ((program,), left_out) = imported(
        tmp_path,
        otlp(
            weft_call("a", 0.0, (10, 5), []),
            weft_call("b", 2.0, (10, 5), []),
            weft_call("failed", 4.0, (10, 0), ["a"]),
            weft_call("c", 6.0, (15, 5), ["failed", "b"]),
            otlp_span("http", "", 0.0, 9.0),
        ),
    )
    assert (program.program, left_out) == ("p", 1)
    assert shape(program.calls) == [
        ("a", (), 0.0, None, None),
        ("b", (), 2.0, None, None),
        ("c", ("a", "b"), 3.0, None, None),
    ]


def vllm(folder: Path, text: str) -> tuple[list[TraceProgram], int]:
    path = folder / "vllm.log"
    path.write_text(text)
    found = TraceImport([path])
    assert [importer.name for _, importer in found.files] == ["vllm"]
    return list(found), found.counts.calls_unused


def test_a_request_for_several_answers_ends_with_the_last_one(tmp_path: Path) -> None:
    """It is one call, with the tokens of all of them."""
    ((program,), left_out) = vllm(
        tmp_path,
        vllm_prompt("10:00:01", "a", [1, 2, 3], answers=2)
        + vllm_answer("10:00:02", "a", [4, 5])
        + vllm_answer("10:00:02", "a", [6]),
    )
    assert [(call.prompt_tokens, call.output_tokens) for call in program.calls] == [(3, 3)]
    assert left_out == 0


def test_a_request_of_responses_is_answered_under_another_id(tmp_path: Path) -> None:
    """And its tokens are in other brackets."""
    ((program,), left_out) = vllm(
        tmp_path, vllm_prompt("10:00:01", "resp_1_0", [1, 2, 3]) + vllm_answer("10:00:02", "resp_1", (4, 5))
    )
    assert (program.program, program.calls[0].output_tokens, left_out) == ("vllm-resp_1", 2, 0)


def test_requests_in_vllms_log_are_programs_that_share_blocks(tmp_path: Path) -> None:
    """Nothing says which belong together, and their tokens say what their prompts share. A stream's tokens are those of
    its parts, or a quarter of its characters. A request that was not answered is left out, and so is one without
    tokens."""
    prompt = list(range(40))
    (programs, left_out) = vllm(
        tmp_path,
        vllm_prompt("10:00:01", "a", prompt)
        + vllm_prompt("10:00:03", "b", [*prompt[:20], *prompt])
        + vllm_answer("10:00:04", "b", [4, 5], kind=" (streaming delta)")
        + vllm_answer("10:00:04", "b", [6], kind=" (streaming delta)")
        + vllm_answer("10:00:05", "b", None, kind=" (streaming complete)")
        + vllm_answer("10:00:06", "a", [1, 2])
        + vllm_prompt("10:00:07", "c", [9])
        + vllm_answer("10:00:08", "c", None, kind=" (streaming complete)")
        + vllm_prompt("10:00:09", "open", [9])
        + vllm_prompt("10:00:09", "embedded", None)
        + vllm_answer("10:00:09", "embedded", [7]),
    )
    assert left_out == 2
    assert [(program.program, program.arrival_s) for program in programs] == [
        ("vllm-b", 2.0), ("vllm-a", 0.0), ("vllm-c", 6.0),
    ]  # fmt: skip
    calls = [program.calls[0] for program in programs]
    assert [(call.prompt_tokens, call.output_tokens) for call in calls] == [(60, 3), (40, 2), (1, 4)]
    first, second = list(calls[0].hash_ids), list(calls[1].hash_ids)
    assert (len(first), len(second)) == (3, 2)
    assert first[0] == second[0]
    assert first[1] != second[1]


def test_a_log_that_goes_on_in_the_next_year_goes_on(tmp_path: Path) -> None:
    """vLLM's times have no year."""
    text = "".join(vllm_prompt("23:59:59", each, [1]) + vllm_answer("23:59:59", each, [1]) for each in "ab")
    lines = text.splitlines(keepends=True)
    lines = [line.replace("11-25", "12-31") for line in lines[:4]] + [
        line.replace("11-25 23:59:59", "01-01 00:00:01") for line in lines[4:]
    ]
    (programs, _) = vllm(tmp_path, "".join(lines))
    assert [program.arrival_s for program in programs] == [0.0, 2.0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (vllm_prompt("10:00:01", "a", [1]).splitlines()[1], "line 1: the prompt's tokens are not in the log; expected"),
        (vllm_prompt("10:00:61", "a", [1]), "line 1: the time is '11-25 10:00:61'"),
        (vllm_prompt("10:00:01", "a", [1]).replace("ids: [1], prompt_embeds", "ids: [1 2], prompt_embeds"), "'.1 2.'"),
        (vllm_prompt("10:00:01", "a", [1]), "no program, and 1 calls that failed"),
    ],
)
def test_a_log_of_vllm_that_says_too_little_is_refused(text: str, message: str, tmp_path: Path) -> None:
    """The error names the options that make a log say enough."""
    with pytest.raises(TraceError, match=rf"vllm\.log.*{message}"):
        vllm(tmp_path, text)


CALL = otlp_call("a", "", 1.0, 2.0, 10, 5)
NAMELESS = weft_call("c0", 1.0, (10, 5), [])
del NAMELESS["attributes"][-2]
REQUEST = litellm_row("a", 0.0, 1.0, 40, 9)
GENERATION = observation("g1", None, "GENERATION", ("00:01", "00:02"), {"input": 40, "output": 6})


@pytest.mark.parametrize(
    ("name", "rows", "message"),
    [
        ("opentelemetry", [otlp(CALL), {"resourceSpans": 7}], "line 2: resourceSpans is 7; expected a list"),
        ("opentelemetry", [otlp(CALL | {"spanId": None})], "line 1, span 1: spanId is None"),
        ("opentelemetry", [otlp(CALL | {"traceId": 7})], "line 1, span 1: traceId is 7"),
        ("opentelemetry", [otlp(CALL | {"startTimeUnixNano": "soon"})], "span 1: startTimeUnixNano is 'soon'"),
        ("opentelemetry", [otlp(otlp_call("a", "", 1.0, 2.0, -10, 5))], "input_tokens is '-10'"),
        ("opentelemetry", [otlp(CALL | {"attributes": [{"key": "gen_ai.x"}]})], "span 1: None is not an object"),
        (
            "opentelemetry",
            [otlp(otlp_call("a", "b", 1.0, 2.0, 1, 5), otlp_call("b", "a", 1.0, 2.0, 1, 5))],
            "line 1, span 1: spans are in one another in a circle",
        ),
        (
            "opentelemetry",
            [
                otlp(
                    *(otlp_span(f"s{n}", f"s{n - 1}", 0, 1, **AGENT) for n in range(3000)),
                    otlp_call("a", "s2999", 0, 1, 1),
                )
            ],
            "spans are nested too deeply",
        ),
        ("opentelemetry", [otlp(NAMELESS)], "span 1: weft.call.id is None; expected the id of a call"),
        ("litellm", [REQUEST, REQUEST | {"startTime": None}], "line 2: startTime is None"),
        ("litellm", [REQUEST | {"endTime": "2026-13-01"}], "line 1: endTime is '2026-13-01'; expected a date"),
        ("litellm", [REQUEST | {"prompt_tokens": 1.5}], "line 1: prompt_tokens is 1.5"),
        ("litellm", [7], "line 1: 7 is not an object; expected LiteLLM's"),
        ("langfuse", [GENERATION | {"type": None}], "line 1: type is None"),
        ("langfuse", [GENERATION | {"startTime": None}], "line 1: there is no startTime"),
        ("langfuse", [GENERATION | {"usageDetails": {"input": "many"}}], "line 1: input is 'many'; expected a whole"),
        ("langfuse", [{"observations": 7}], "line 1: observations is 7; expected a list"),
    ],
)
def test_a_wrong_log_is_refused(name: str, rows: list[Any], message: str, tmp_path: Path) -> None:
    """The error names the file, the line and what was expected."""
    with pytest.raises(TraceError, match=rf"log\.jsonl, .*{message}"):
        imported(tmp_path, *rows, name=name)


# -- what comes after what


@st.composite
def flat_spans(draw: st.DrawFn) -> list[LoggedSpan]:
    times = draw(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 8)), min_size=1, max_size=12))
    return [
        LoggedSpan("here", f"s{number}", None, float(begin), float(begin + length), is_call=True, lengths=(5, 5))
        for number, (begin, length) in enumerate(times)
    ]


@given(flat_spans())
def test_calls_wait_for_the_last_ones_that_ended_before(spans: list[LoggedSpan]) -> None:
    """A call's parents are all that ended before it began, without those after which another of them began."""
    (program,) = program_of("p", spans)
    assert isinstance(program, TraceProgram)
    start_s = min(span.begin_s for span in spans)
    begin = {call.call_id: start_s + (call.at_s or 0.0) for call in program.calls}
    in_order = sorted(spans, key=lambda span: (span.begin_s, span.end_s))
    by_id = {f"c{number}": span for number, span in enumerate(in_order)}
    for call in program.calls:
        span = by_id[call.call_id]
        assert begin[call.call_id] == span.begin_s
        over = {each for each, other in by_id.items() if other.end_s <= span.begin_s}
        last = {a for a in over if not any(by_id[a].end_s <= by_id[b].begin_s for b in over)}
        assert set(call.parents) == last


@st.composite
def nested_spans(draw: st.DrawFn) -> list[LoggedSpan]:
    """Spans in one another, whose times need not fit."""
    spans: list[LoggedSpan] = []
    for number in range(draw(st.integers(1, 15))):
        parent = draw(st.sampled_from([None, "gone", *(span.span_id for span in spans)]))
        begin, length = draw(st.integers(0, 20)), draw(st.integers(0, 8))
        span = LoggedSpan("here", f"s{number}", parent, float(begin), float(begin + length))
        span.is_call = draw(st.booleans())
        span.lengths = (draw(st.integers(0, 9)), draw(st.integers(0, 9))) if draw(st.booleans()) else None
        span.agent = draw(st.sampled_from([None, "a", "b"]))
        span.tool = draw(st.sampled_from([None, "t"]))
        spans.append(span)
    return draw(st.permutations(spans))


@given(nested_spans())
def test_every_call_has_a_place_or_is_counted(spans: list[LoggedSpan]) -> None:
    """However spans are in one another, calls come after their parents, and none is lost or there twice."""
    answered = sum(span.is_call and span.lengths is not None for span in spans)
    unanswered = sum(span.is_call and span.lengths is None for span in spans)
    found = list(program_of("p", spans))
    calls = [call for each in found if isinstance(each, TraceProgram) for call in each.calls]
    for number, call in enumerate(calls):
        assert set(call.parents) <= {each.call_id for each in calls[:number]}
        assert call.shared_prefix_tokens <= call.prompt_tokens
    assert len({call.call_id for call in calls}) == len(calls)
    assert bool(calls) or not answered
    assert sum(each.calls for each in found if isinstance(each, LeftOut)) <= unanswered
