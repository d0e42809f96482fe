"""A small file of each format that `weft trace import` reads, made up here, and ways to spoil it."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from typing import Any, Final

Files = dict[str, bytes]  # by name; the first one is imported


def _lines(*rows: object) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def _weka(at_s: float, ids: list[int], **values: Any) -> dict[str, Any]:
    row = {"t": at_s, "type": "n", "model": "m", "in": 4 * len(ids) + 1, "out": 7, "hash_ids": ids}
    return row | {"input_types": ["tool_result"], "output_types": ["text"], "api_time": 1.5, "think_time": 2.0} | values


_SUBAGENT: Final = {
    "t": 9.0, "type": "subagent", "agent_id": "agent_001", "subagent_type": "Explore", "duration_ms": 6000,
    "status": "completed", "requests": [_weka(0.0, [8]), _weka(3.0, [8, 9])],
}  # fmt: skip
_SESSION: Final = {
    "id": "session", "models": ["m"], "block_size": 4, "hash_id_scope": "local", "tool_tokens": 3, "system_tokens": 4,
    "requests": [_weka(0.0, [1, 2]), _SUBAGENT, _weka(10.0, [1, 2, 3], ttft=0.5), _weka(20.0, [1, 2, 3, 4])],
}  # fmt: skip
_EDGE: Final = {"request_id": "p:a", "trigger": "completion", "delay_ms": 500.0, "relation": "sequence"}
_NODE: Final = {
    "request_id": "p:a", "play_id": "p", "session_id": "p", "model": "m", "input_length": 8, "output_length": 3,
    "hash_ids": [1, 2], "not_before_ms": 0.0,
}  # fmt: skip
_MESSAGES: Final = [
    {"role": "system", "content": "You are an agent."},
    {"role": "user", "content": [{"type": "text", "text": "Book a flight."}]},
    {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "find", "arguments": "{}"}}]},
    {"role": "tool", "name": "find", "content": "Two flights."},
    {"role": "assistant", "content": "Done.", "action": "ls -F"},
]


def claude_line(kind: str, uuid: str, parent: str | None, at: str, content: Any, **values: Any) -> dict[str, Any]:
    """A line of Claude Code's log: a message, or with `usage` (input, cached, output tokens) a part of an answer."""
    message: dict[str, Any] = {"role": kind, "content": content}
    if kind == "assistant":
        keys = ("input_tokens", "cache_read_input_tokens", "output_tokens")
        usage = dict(zip(keys, values.pop("usage"), strict=True)) | {"cache_creation_input_tokens": 1}
        message |= {"id": values.pop("message", f"msg_{uuid}"), "model": "m", "usage": usage}
    row = {"type": kind, "uuid": uuid, "parentUuid": parent, "sessionId": "session", "isSidechain": False}
    return row | {"timestamp": f"2026-11-25T10:{at}Z", "message": message} | values


def _claude_tool(number: int, name: str, **given: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": f"toolu_{number}", "name": name, "input": given}


def _claude_result(number: int) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": f"toolu_{number}", "content": "done"}


def otlp_span(name: str, parent: str, begin_s: float, end_s: float, **attributes: Any) -> dict[str, Any]:
    """A span of a trace in OTLP's JSON. Its id is its name, and `__` in the name of an attribute is a dot."""
    row = {"traceId": "t1", "spanId": name, "parentSpanId": parent, "name": name}
    row |= {f"{key}TimeUnixNano": str(round((1000 + at) * 1e9)) for key, at in (("start", begin_s), ("end", end_s))}
    return row | {
        "attributes": [
            {
                "key": f"gen_ai.{key.replace('__', '.')}",
                "value": {"intValue": str(value)} if isinstance(value, int) else {"stringValue": value},
            }
            for key, value in attributes.items()
        ]
    }


def otlp(*spans: dict[str, Any]) -> dict[str, Any]:
    return {"resourceSpans": [{"resource": {}, "scopeSpans": [{"scope": {"name": "s"}, "spans": list(spans)}]}]}


def otlp_call(name: str, parent: str, begin_s: float, end_s: float, *tokens: int, **more: Any) -> dict[str, Any]:
    keys = ("usage__input_tokens", "usage__output_tokens", "usage__cache_read__input_tokens")
    return otlp_span(
        name, parent, begin_s, end_s, operation__name="chat", **dict(zip(keys, tokens, strict=False)), **more
    )


def litellm_row(trace: str, begin_s: float, end_s: float, *tokens: int, **more: Any) -> dict[str, Any]:
    """A request in LiteLLM's log, with the tokens of its prompt and its output."""
    row = {"id": f"{trace}-{begin_s}", "trace_id": trace, "call_type": "acompletion", "status": "success"}
    row |= {"startTime": 1e9 + begin_s, "endTime": 1e9 + end_s, "prompt_tokens": tokens[0], "messages": None}
    return row | {"completion_tokens": tokens[1], "total_tokens": sum(tokens), "model": "m"} | more


def observation(
    name: str, parent: str | None, kind: str, times: tuple[str, str | None], usage: dict[str, Any] | None = None
) -> dict[str, Any]:
    """An observation of Langfuse."""
    row = {"id": name, "traceId": "t1", "parentObservationId": parent, "type": kind, "name": name}
    begin, end = (each and f"2026-11-25T10:{each}Z" for each in times)
    row |= {"startTime": begin, "endTime": end, "level": "DEFAULT"}
    return row | {"usageDetails": usage or {}, "input": None}


def vllm_line(at: str, message: str) -> str:
    """A line of vLLM's log, as version 0.32 writes it."""
    return f"(APIServer pid=7) DEBUG 11-25 {at} [entrypoints/.../utils/request_logger.py:55] {message}\n"


def vllm_prompt(at: str, request_id: str, tokens: list[int] | None, *, answers: int = 1) -> str:
    details = f"prompt: 'say prompt_token_ids: [1]', prompt_token_ids: {tokens}, prompt_embeds shape: None."
    received = f"Received request {request_id}: params: SamplingParams(n={answers}), lora_request: None."
    return vllm_line(at, f"Request {request_id} details: {details}") + vllm_line(at, received)


def vllm_answer(at: str, request_id: str, tokens: Sequence[int] | None, *, kind: str = "") -> str:
    name = f"Generated response {request_id}{kind}"
    return vllm_line(at, f"{name} details: output_token_ids: {tokens}") + vllm_line(
        at, f"{name}: output: 'It is a river', finish_reason: stop"
    )


_TALK: Final = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 2 + 2?"}]

_CLAUDE_AGENT: Final = {"isSidechain": True, "agentId": "a1"}

SAMPLES: Final[dict[str, Files]] = {
    "weka": {"session.json": _lines(_SESSION)},
    "mooncake": {
        "mooncake.jsonl": _lines(
            {"timestamp": 0, "input_length": 1100, "output_length": 5, "hash_ids": [0, 1, 2]},
            {"timestamp": 27, "input_length": 700, "output_length": 9, "hash_ids": [0, 3]},
            {"session_id": "s", "input_length": 600, "output_length": 9, "hash_ids": [0, 4], "delay": 30},
        )
    },
    "agentic-mooncake": {
        "agentic.jsonl": _lines(
            {"schema": "dynamo.agentic_mooncake", "version": 2, "block_size": 4, "hash_id_scope": "local"},
            _NODE,
            _NODE | {"request_id": "p:b", "session_id": "p:Explore", "dependencies": [_EDGE | {"trigger": "dispatch"}]},
            _NODE
            | {"request_id": "p:c", "dependencies": [_EDGE, _EDGE | {"request_id": "p:b"}], "not_before_ms": 900.5},
        )
    },
    "aiperf": {
        "aiperf.jsonl": _lines(
            {"session_id": "a", "input_length": 40, "output_length": 3, "hash_ids": [1, 2, 3], "timestamp": 5},
            {"session_id": "a", "input_length": 20, "output_length": 3, "hash_ids": [7, 8], "delay": 200.5},
            {"session_id": "b", "turns": [{"role": "system", "text": "s"}, {"text": "Hello", "output_length": 4}]},
        )
    },
    "azure": {
        "azure.csv": b"TIMESTAMP,ContextTokens,GeneratedTokens\r\n2023-11-16 18:17:03.9799600,4808,10\r\n"
        b"2023-11-16 18:17:04.0319600,3180,8\r\n"
    },
    "tau-bench": {"tau.json": json.dumps([{"task_id": 7, "traj": _MESSAGES}], indent=1).encode()},
    "bfcl": {
        "tasks.jsonl": _lines({"id": "multi_turn_base_0", "question": [_MESSAGES[:2], _MESSAGES[1:2]]}),
        "tasks.answers.jsonl": _lines({"id": "multi_turn_base_0", "ground_truth": [["cd(a='b')", "ls()"], ["rm()"]]}),
    },
    "swe-agent": {
        "run.traj": json.dumps(
            {"history": _MESSAGES, "trajectory": [{"execution_time": 0.25}, {}], "info": {}}
        ).encode()
    },
    "claude-code": {
        "session.jsonl": _lines(
            {"type": "queue-operation", "sessionId": "session", "timestamp": "2026-11-25T10:00:00.000Z"},
            claude_line("user", "u1", None, "00:00.500", "Look into it."),
            claude_line("assistant", "u2", "u1", "00:02.000", [_claude_tool(1, "Bash", command="ls")], usage=(9, 0, 5)),
            claude_line("user", "u3", "u2", "00:05.000", [_claude_result(1)]),
            claude_line(
                "assistant", "u4", "u3", "00:06.000", [{"type": "text", "text": "Ask."}], usage=(4, 14, 3), message="m2"
            ),
            claude_line(
                "assistant",
                "u5",
                "u4",
                "00:06.500",
                [_claude_tool(2, "Task", prompt="Find", subagent_type="Explore")],
                usage=(4, 14, 8),
                message="m2",
            ),
            claude_line(
                "user",
                "u6",
                "u5",
                "00:20.000",
                [_claude_result(2)],
                toolUseResult={"agentId": "a1", "status": "completed"},
            ),
            claude_line("assistant", "u7", "u6", "00:21.000", "Done.", usage=(6, 20, 2)),
        ),
        "agent-a1.jsonl": _lines(
            claude_line("user", "a1", None, "00:07.000", "Find", **_CLAUDE_AGENT),
            claude_line(
                "assistant", "a2", "a1", "00:09.000", [_claude_tool(3, "Grep")], usage=(30, 0, 4), **_CLAUDE_AGENT
            ),
            claude_line("user", "a3", "a2", "00:12.000", [_claude_result(3)], **_CLAUDE_AGENT),
            claude_line("assistant", "a4", "a3", "00:19.000", "Found.", usage=(9, 34, 6), **_CLAUDE_AGENT),
        ),
        "agent-a1.meta.json": json.dumps({"agentType": "Explore", "toolUseId": "toolu_2"}).encode(),
    },
    "opentelemetry": {
        "spans.jsonl": _lines(
            otlp(
                otlp_call("c1", "root", 0.5, 2.0, 100, 10, 60),
                otlp_span("search", "root", 2.0, 3.5, operation__name="execute_tool", tool__name="search"),
            ),
            otlp(
                otlp_call("s1", "sub", 3.7, 5.0, 40, 5),
                otlp_span("sub", "root", 3.6, 5.5, operation__name="invoke_agent", agent__name="writer"),
                otlp_call("c2", "root", 6.0, 7.0, 130, 20),
                otlp_span("root", "", 0.0, 7.5, operation__name="invoke_agent", agent__name="researcher"),
            ),
        )
    },
    "litellm": {
        "calls.jsonl": _lines(
            litellm_row("a", 0.0, 1.5, 12, 6, messages=_TALK),
            litellm_row("b", 1.0, 2.0, 7, 2) | {"startTime": "2001-09-09T01:46:41Z"},
            litellm_row("a", 3.0, 4.0, 30, 8, messages=[*_TALK, {"role": "assistant", "content": "4"}, _TALK[1]]),
            {"standard_logging_object": litellm_row("a", 4.0, 4.1, 0, 0, status="failure")},
        )
    },
    "langfuse": {
        "observations.json": json.dumps(
            [
                observation("agent", None, "AGENT", ("00:00", "00:09")),
                observation("g1", "agent", "GENERATION", ("00:01", "00:02"), {"input": 40, "output": 6, "total": 46}),
                observation("find", "agent", "TOOL", ("00:02", "00:05")),
                observation(
                    "g2",
                    "agent",
                    "GENERATION",
                    ("00:05", "00:08"),
                    {"input": 9, "input_cached_tokens": 50, "output": 3},
                ),
                observation("g3", "agent", "GENERATION", ("00:08", "00:09")),
            ],
            indent=1,
        ).encode()
    },
    "vllm": {
        "vllm.log": (
            "(APIServer pid=7) INFO 11-25 10:00:00 [vllm.py:1] Started\n"
            + vllm_prompt("10:00:01", "chatcmpl-a", list(range(40)))
            + vllm_answer("10:00:02", "chatcmpl-a", [1, 2, 3])
            + vllm_prompt("10:00:04", "chatcmpl-b", [*range(40), 1, 2, 3, 50])
            + vllm_answer("10:00:05", "chatcmpl-b", [4, 5], kind=" (streaming delta)")
            + vllm_answer("10:00:05", "chatcmpl-b", None, kind=" (streaming complete)")
            + vllm_prompt("10:00:06", "cmpl-c", [1, 2])
        ).encode()
    },
}

ODD: Final[list[Any]] = [
    None, True, False, 0, -1, 1, 3, 2**63, 10**15, 10**30, 10**400, 0.5, -0.5, 1e308, float("nan"), float("inf"), "",
    "x", "x" * 3000, "\ud800", "1", [], {}, [[]], [1], ["x"], {"a": 1}, [None], "completed", "subagent", "dispatch",
]  # fmt: skip


def spoiled(files: Files, rng: random.Random) -> Files:
    """The same files with some mistakes: odd values, missing and doubled parts, cuts, lines of other formats."""
    files = dict(files)
    for _ in range(rng.randint(1, 4)):
        name = rng.choice(list(files))
        files[name] = rng.choice(_WAYS)(files[name], rng)
    return files


def _value_changed(data: bytes, rng: random.Random) -> bytes:
    """Change values in the JSON document, or in the one on a line."""
    try:
        whole: Any = json.loads(data)
        _change(whole, rng)
        return json.dumps(whole).encode()
    except (ValueError, RecursionError):
        pass
    lines = data.splitlines()
    number = rng.randrange(len(lines)) if lines else 0
    try:
        row = json.loads(lines[number])
        _change(row, rng)
        lines[number] = json.dumps(row).encode()
    except (ValueError, RecursionError, IndexError):
        return data
    return b"\n".join(lines) + b"\n"


def _change(whole: Any, rng: random.Random) -> None:
    places: list[tuple[Any, Any]] = []

    def collect(at: Any) -> None:
        for key in list(at) if isinstance(at, dict) else range(len(at)):
            places.append((at, key))
            if isinstance(at[key], dict | list):
                collect(at[key])

    if isinstance(whole, dict | list):
        collect(whole)
    if not places:
        return
    at, key = rng.choice(places)
    way = rng.random()
    if way < 0.6:
        at[key] = rng.choice(ODD)
    elif way < 0.75:
        del at[key]
    elif way < 0.9:
        other, elsewhere = rng.choice(places)
        at[key] = json.loads(json.dumps(other[elsewhere]))
    elif isinstance(at, list):
        at.insert(key, json.loads(json.dumps(at[key])))
    else:
        at[rng.choice(["id", "t", "requests", "session_id", "hash_ids", "wait_for"])] = json.loads(json.dumps(at[key]))


def _cut(data: bytes, rng: random.Random) -> bytes:
    return data[: rng.randrange(len(data) + 1)]


def _flipped(data: bytes, rng: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        if changed:
            changed[rng.randrange(len(changed))] = rng.randrange(256)
    return bytes(changed)


def _mixed(data: bytes, rng: random.Random) -> bytes:
    """Put lines of any format between the lines, or repeat and move them."""
    lines = data.splitlines(keepends=True)
    other = rng.choice([data, *(next(iter(files.values())) for files in SAMPLES.values())]).splitlines(keepends=True)
    lines.insert(rng.randint(0, len(lines)), rng.choice(other) if other else b"\n")
    if rng.random() < 0.3:
        rng.shuffle(lines)
    return b"".join(lines)


def _deep(data: bytes, rng: random.Random) -> bytes:
    """Nest a value too deeply for Python."""
    at = data.find(b"[", rng.randrange(len(data) + 1))
    return data[:at] + b"[" * 3000 + b"]" * 3000 + data[at:] if at >= 0 else data


_WAYS: Final[list[Callable[[bytes, random.Random], bytes]]] = [
    *[_value_changed] * 12, *[_cut] * 2, *[_flipped] * 2, *[_mixed] * 4, _deep,
]  # fmt: skip
