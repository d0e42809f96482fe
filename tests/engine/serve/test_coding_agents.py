"""The requests of coding agents, written down from what their makers document, replayed against a live `weft serve`.

Claude Code: code.claude.com/docs/en/llm-gateway-protocol ("Request headers", "System prompt attribution block").
Codex: the `responses` client of github.com/openai/codex (`codex-rs`), which names its headers in `responses_metadata`.
"""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from served import KEY, Served

from weft.core.identity import Identity, identity_of
from weft.core.ids import ThreadId

SESSION = "b4e5aaaa-9a3e-47c4-84ad-3a70f38c676e"
MAIN, CHILD = "0197c0de-0000-7000-8000-00000000000a", "0197c0de-0000-7000-8000-00000000000b"
GRANDCHILD = "0197c0de-0000-7000-8000-00000000000c"

TOOLS_OF_CLAUDE_CODE = [
    {
        "name": "Bash",
        "description": "Executes a given bash command.",
        "input_schema": {
            "$schema": "http://json-schema.org/draft-07/schema#",
            "type": "object",
            "properties": {"command": {"type": "string"}, "timeout": {"type": "number"}},
            "required": ["command"],
            "additionalProperties": False,
        },
    },
    {
        "name": "Task",
        "description": "Launch a new agent.",
        "input_schema": {
            "type": "object",
            "properties": {"description": {"type": "string"}, "prompt": {"type": "string"}},
            "required": ["description", "prompt"],
            "additionalProperties": False,
        },
        "cache_control": {"type": "ephemeral"},
    },
]


def claude_code(messages: list[Any], *, build: str, **agent: str) -> tuple[dict[str, str], dict[str, Any]]:
    """A request of Claude Code: headers and body. The first system block differs from request to request."""
    headers = {
        "x-api-key": KEY,
        "accept": "application/json",
        "user-agent": "claude-cli/2.1.88 (external, cli)",
        "x-app": "cli",
        "anthropic-version": "2023-06-01",
        "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14,context-management-2025-06-27",
        "anthropic-dangerous-direct-browser-access": "true",
        "x-stainless-lang": "js",
        "x-stainless-retry-count": "0",
        "x-stainless-timeout": "600",
        "x-client-request-id": f"request-{build}",
        "x-claude-code-session-id": SESSION,
        **{f"x-claude-code-{name.replace('_', '-')}": value for name, value in agent.items()},
    }
    body = {
        "model": "tiny",
        "max_tokens": 6,
        "stream": True,
        "system": [
            {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2.1.88.{build}; cc_entrypoint=cli;"},
            {"type": "text", "text": "You are Claude Code.", "cache_control": {"type": "ephemeral"}},
        ],
        "messages": messages,
        "tools": TOOLS_OF_CLAUDE_CODE,
        "metadata": {"user_id": json.dumps({"device_id": "d", "account_uuid": "", "session_id": SESSION})},
    }
    return headers, body


def codex(items: list[Any], thread: str, parent: str | None = None) -> tuple[dict[str, str], dict[str, Any]]:
    """A request of Codex: headers and body. It keeps the conversation itself, and sends all of it each time."""
    headers = {
        "authorization": f"Bearer {KEY}",
        "accept": "text/event-stream",
        "originator": "codex_cli_rs",
        "user-agent": "codex_cli_rs/0.121.0 (Debian 13.0.0; x86_64) xterm",
        "session-id": MAIN,
        "thread-id": thread,
        "x-client-request-id": thread,
        "x-codex-window-id": f"{thread}:0",
        "x-codex-turn-metadata": json.dumps({"turn_id": "turn-1", "session_id": MAIN, "thread_id": thread}),
        **({"x-codex-parent-thread-id": parent, "x-openai-subagent": "collab_spawn"} if parent else {}),
    }
    body = {
        "model": "tiny",
        "instructions": "You are Codex.",
        "input": items,
        "tools": [
            {
                "type": "function",
                "name": "shell",
                "description": "Runs a shell command and returns its output.",
                "strict": False,
                "parameters": {
                    "type": "object",
                    "properties": {"command": {"type": "array", "items": {"type": "string"}}},
                    "required": ["command"],
                    "additionalProperties": False,
                },
            }
        ],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "store": False,
        "stream": True,
        "include": [],
        "prompt_cache_key": MAIN,
        "max_output_tokens": 6,  # Codex leaves it out; the model here would never end
    }
    return headers, body


def codex_message(text: str, role: str = "user") -> dict[str, Any]:
    kind = "input_text" if role == "user" else "output_text"
    return {"type": "message", "role": role, "content": [{"type": kind, "text": text}]}


def identity(request: tuple[dict[str, str], dict[str, Any]]) -> Identity:
    headers = [(name.encode(), value.encode()) for name, value in request[0].items()]
    found = identity_of(headers, request[1], "scope")
    assert isinstance(found, Identity)
    return found


USER = [
    {"role": "user", "content": [{"type": "text", "text": "List the files.", "cache_control": {"type": "ephemeral"}}]}
]
SUBAGENT = [{"role": "user", "content": "Count the tests."}]
RESULT = [
    {
        "role": "assistant",
        "content": [{"type": "tool_use", "id": "toolu_1", "name": "Bash", "input": {"command": "ls"}}],
    },
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": "a\nb"}]},
]
NESTED = [{"role": "user", "content": "Count the slow tests."}]
CLAUDE_CODE = [
    claude_code(USER, build="aaa"),
    claude_code(SUBAGENT, build="bbb", agent_id="a1b2c3"),
    claude_code(NESTED, build="ccc", agent_id="d4e5f6", parent_agent_id="a1b2c3"),
    claude_code(USER + RESULT, build="ddd"),
]
SHELL = [
    {"type": "function_call", "name": "shell", "arguments": '{"command":["ls"]}', "call_id": "call_1"},
    {"type": "function_call_output", "call_id": "call_1", "output": "a\nb"},
]
CODEX = [
    codex([codex_message("List the files.")], MAIN),
    codex([codex_message("Count the tests.")], CHILD, parent=MAIN),
    codex([codex_message("Count the slow tests.")], GRANDCHILD, parent=CHILD),
    codex([codex_message("List the files."), *SHELL], MAIN),
]


@pytest.mark.parametrize(
    ("requests", "program", "threads"),
    [
        (CLAUDE_CODE, f"scope/claude-code:{SESSION}", [None, "a1b2c3", "d4e5f6", None]),
        (CODEX, f"scope/codex:{MAIN}", [MAIN, CHILD, GRANDCHILD, MAIN]),
    ],
    ids=["Claude Code", "Codex"],
)
def test_a_sub_agent_is_a_thread_of_its_session(
    requests: list[Any], program: str, threads: list[ThreadId | None]
) -> None:
    """The session is the program; the sub-agent names its thread and the thread that started it."""
    found = [identity(request) for request in requests]
    assert {each.program_id for each in found} == {program}
    assert [each.thread_id for each in found] == threads
    assert [each.parent_thread_id for each in found] == [None, threads[0], threads[1], None]


@pytest.mark.engine
@pytest.mark.parametrize(
    ("requests", "path", "program", "agents"),
    [
        (CLAUDE_CODE, "/v1/messages?beta=true", f"claude-code:{SESSION}", ["a1b2c3", "d4e5f6"]),
        (CODEX, "/v1/responses", f"codex:{MAIN}", [CHILD, GRANDCHILD]),
    ],
    ids=["Claude Code", "Codex"],
)
def test_a_session_is_served_as_one_program(
    served: Served, requests: list[Any], path: str, program: str, agents: list[str]
) -> None:
    """The streams are whole, and the server shows one program with all calls and a thread for each sub-agent.

    An agent's first call comes after that of the agent which started it, and the main agent goes on after both.
    """
    with httpx.Client(base_url=served.url, timeout=120) as client:
        for headers, body in requests:
            response = client.post(path, headers=headers, json=body)
            assert response.status_code == 200, response.text
            events = [json.loads(line[5:]) for line in response.text.splitlines() if line.startswith("data: {")]
            assert {"message_stop", "response.completed"} & {event.get("type") for event in events}
            assert response.headers["weft-program-id"] == program
    programs = served.client.get("/weft/state").json()["programs"]
    (row,) = [each for each in programs if each["program_id"] == program]
    assert (row["calls"], row["threads"]) == (4, 3)
    timeline = served.client.get(f"/weft/programs/{program}/timeline").json()
    lanes = [lane["thread_id"] for lane in timeline["lanes"]]
    assert lanes[1:] == agents
    assert [call["lane"] for call in timeline["calls"]] == [0, 1, 2, 0]
    first, sub, nested, again = timeline["calls"]
    ids = [[parent["call_id"] for parent in call["parents"]] for call in (first, sub, nested, again)]
    assert ids == [[], [first["call_id"]], [sub["call_id"]], [nested["call_id"]]]
    assert all(parent["is_exact"] for call in timeline["calls"] for parent in call["parents"])
    assert served.client.delete(f"/weft/programs/{program}").status_code == 204


@pytest.mark.engine
@pytest.mark.parametrize("prefix", ["x-dynamo-", "x-"])
def test_a_session_names_the_session_that_started_it(served: Served, prefix: str) -> None:
    """Dynamo's clients, vLLM's and opencode start one for a sub-agent, which is a thread of the program then."""
    call = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}
    sessions = (("root", None), ("child", "root"), ("grandchild", "child"), ("root", None))
    program_ids = set()
    for session, parent in sessions:
        headers = {f"{prefix}session-id": session, **({f"{prefix}parent-session-id": parent} if parent else {})}
        response = served.client.post("/v1/chat/completions", json=call, headers=headers)
        assert response.status_code == 200, response.text
        program_ids.add(response.headers["weft-program-id"])
    (program,) = program_ids
    timeline = served.client.get(f"/weft/programs/{program}/timeline").json()
    assert [call["lane"] for call in timeline["calls"]] == [0, 1, 2, 0]
    assert [lane["thread_id"] for lane in timeline["lanes"]][1:] == ["child", "grandchild"]
    first, sub, nested, again = timeline["calls"]
    ids = [[parent["call_id"] for parent in call["parents"]] for call in (first, sub, nested, again)]
    assert ids == [[], [first["call_id"]], [sub["call_id"]], [nested["call_id"]]]
    assert served.client.delete(f"/weft/programs/{program}").status_code == 204


@pytest.mark.engine
def test_clients_of_thunderagent_name_and_release_their_programs(served: Served) -> None:
    """In the body and on a path of its own. Dynamo's hint that the next call comes soon is taken along."""
    call = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "Hello"}],
        "max_tokens": 2,
        "program_id": "job-1",
        "nvext": {"agent_hints": {"priority": 3, "osl": 10, "speculative_prefill": True}},
    }
    programs = [served.client.post("/v1/chat/completions", json=call).headers["weft-program-id"] for _turn in range(2)]
    assert programs == ["thunderagent:job-1"] * 2
    for released in (True, False):
        answer = served.client.post("/programs/release", json={"program_id": "job-1"})
        assert answer.json() == {"program_id": "job-1", "released": released}
    assert served.client.post("/programs/release", json={}).status_code == 400
    assert served.client.post("/programs/release", content="{}").status_code == 415
