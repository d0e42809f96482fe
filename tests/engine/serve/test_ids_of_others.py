"""The ids that others send, each over HTTP to the real server: docs/reference/program-ids.md has the table."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from typing import Any

import httpx
import pytest

from weft.core.process_rows import ProgramState
from weft.testing import ScriptedServer

pytestmark = pytest.mark.engine

# Headers and members of the body that name the program "a", and its id, in the table's order.
NAMES: list[tuple[dict[str, str], dict[str, Any], str]] = [
    ({"weft-program-id": "a"}, {}, "a"),
    ({}, {"vllm_xargs": {"program_id": "a"}}, "a"),
    ({"x-claude-code-session-id": "a"}, {}, "claude-code:a"),
    ({"session-id": "a"}, {}, "codex:a"),
    ({"thread-id": "a"}, {}, "codex:a"),
    ({}, {"program_id": "a"}, "thunderagent:a"),
    ({"x-opencode-session": "a"}, {}, "opencode:a"),
    ({"x-session-id": "a"}, {}, "session:a"),
    ({}, {"session_id": "a"}, "session:a"),
    ({"weft-session-id": "a"}, {}, "session:a"),
    ({"x-dynamo-session-id": "a"}, {}, "dynamo:a"),
    ({"x-dynamo-trajectory-id": "a"}, {}, "dynamo:a"),
    ({"x-session-affinity": "a"}, {}, "affinity:a"),
    ({}, {"vllm_xargs": {"agentic_context": json.dumps({"program_id": "a"})}}, "agentic-context:a"),
    ({"baggage": "gen_ai.conversation.id=a"}, {}, "baggage:a"),
    ({"baggage": "session.id=a"}, {}, "baggage:a"),
    ({}, {"metadata": {"session_id": "a"}}, "metadata:a"),
    ({}, {"metadata": {"conversation_id": "a"}}, "metadata:a"),
    ({}, {"metadata": {"thread_id": "a"}}, "metadata:a"),
    ({"x-litellm-session-id": "a"}, {}, "vendor:a"),
    ({"x-acme-session-id": "a"}, {}, "vendor:a"),
    ({"x-smg-routing-key": "a"}, {}, "gateway:a"),
    ({"x-aibrix-session-key": "a"}, {}, "gateway:a"),
]


@pytest.fixture(scope="module")
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer(lambda _request: "Yes.") as server:
        yield server


class Client:
    """Sends questions that nobody has asked before, so that only ids tell what belongs together."""

    def __init__(self, server: ScriptedServer) -> None:
        self.server = server
        self._count = 0

    def send(self, headers: Mapping[str, str] | None = None, body: Mapping[str, Any] | None = None) -> httpx.Response:
        self._count += 1
        asked = {"model": "scripted", "messages": [{"role": "user", "content": f"Question {id(self)} {self._count}"}]}
        return httpx.post(
            f"{self.server.url}/v1/chat/completions", json={**asked, **(body or {})}, headers=headers, timeout=120
        )

    def program(self, headers: Mapping[str, str] | None = None, body: Mapping[str, Any] | None = None) -> str:
        answer = self.send(headers, body)
        assert answer.status_code == 200, answer.text
        return answer.headers["weft-program-id"]

    def end(self, program: str) -> None:
        assert httpx.delete(f"{self.server.url}/weft/programs/{program}").status_code == 204


@pytest.fixture
def client(server: ScriptedServer) -> Client:
    return Client(server)


@pytest.mark.parametrize(("headers", "body", "program"), NAMES)
def test_each_name_makes_its_requests_one_program(
    client: Client, headers: dict[str, str], body: dict[str, Any], program: str
) -> None:
    """The requests share nothing else."""
    assert [client.program(headers, body) for _ in range(2)] == [program] * 2
    client.end(program)


def test_the_first_name_in_the_table_counts(client: Client) -> None:
    """With a name of each source in one request, then without the first, and so on."""
    firsts = {program: (headers, body) for headers, body, program in reversed(NAMES)}  # of each source
    programs = list(dict.fromkeys(program for _headers, _body, program in NAMES))
    for place, expected in enumerate(programs):
        headers: dict[str, str] = {}
        body: dict[str, Any] = {}
        for program in programs[place:]:
            headers |= firsts[program][0]
            body |= firsts[program][1]
        assert client.program(headers, body) == expected
        client.end(expected)


@pytest.mark.parametrize(
    ("session", "parent"),
    [
        ("x-opencode-session", "x-parent-session-id"),
        ("x-session-id", "x-parent-session-id"),
        ("x-session-affinity", "x-parent-session-id"),
        ("x-acme-session-id", "x-acme-parent-session-id"),
        ("x-acme-session-id", "x-parent-session-id"),
        ("x-dynamo-session-id", "x-dynamo-parent-session-id"),
        ("x-dynamo-trajectory-id", "x-dynamo-trajectory-parent"),
    ],
)
def test_a_session_that_another_has_started_is_its_thread(client: Client, session: str, parent: str) -> None:
    """Also in later requests, which do not name it again."""
    sent: list[dict[str, str]] = [{session: "root"}, {session: "child", parent: "root"}, {session: "child"}]
    (program,) = {client.program(headers) for headers in sent}
    root, child, again = client.server.calls[-3:]
    assert root.thread_id != child.thread_id == again.thread_id
    assert (child.parents, again.parents) == ((root.call_id,), (child.call_id,))
    client.end(program)


@pytest.mark.parametrize(
    ("headers", "body"),
    [
        ({"weft-program-end": "true"}, {}),
        ({"x-dynamo-session-final": "true"}, {}),
        ({"x-dynamo-trajectory-final": "1"}, {}),
        ({}, {"vllm_xargs": {"program_end": 1}}),
    ],
)
def test_a_last_call_ends_its_program(client: Client, headers: dict[str, str], body: dict[str, Any]) -> None:
    """The one before it does not."""

    def state() -> ProgramState:
        rows = [row for row in client.server.programs if row.info.program_id.endswith("dynamo:ends")]
        return rows[-1].state

    name = {"x-dynamo-session-id": "ends"}
    client.program(name)
    assert state() is ProgramState.IDLE
    client.program({**name, **headers}, body)
    while state() is not ProgramState.FINISHED:  # it ends after its answer
        time.sleep(0.01)


def test_a_fairness_id_is_the_tenant(client: Client) -> None:
    client.program({"x-llm-d-inference-fairness-id": "team", "x-session-id": "of-team"})
    (row,) = [row for row in client.server.programs if row.info.program_id.endswith("session:of-team")]
    assert row.info.tenant == "team"


def test_dynamos_priority_and_osl_change_nothing_and_are_no_error(client: Client) -> None:
    """A priority of vLLM's is refused, because the policy ranks programs."""
    hints = {"priority": 9, "osl": 10, "latency_sensitivity": 1}
    client.program({}, {"nvext": {"agent_hints": hints}})
    assert client.send({}, {"priority": 9}).status_code == 400
    assert client.send({"x-vllm-priority": "9"}).status_code == 400


@pytest.mark.parametrize(
    ("headers", "body"),
    [
        ({"x-acme-agent-run": "a"}, {"acme_run": "a"}),
        ({"x-session": "a", "x-program-id": "a"}, {"nvext": {"unknown": "a"}}),
        ({"x-session-affinity": "a" * 2000, "baggage": "gen_ai.conversation.id"}, {"metadata": {"run": "a"}}),
        ({"x-smg-routing-key": "a" * 2000}, {"metadata": {"session_id": ["a"]}}),
    ],
)
def test_what_is_unknown_or_malformed_is_ignored(client: Client, headers: dict[str, str], body: dict[str, Any]) -> None:
    """The requests are answered, and are two programs."""
    assert client.program(headers, body) != client.program(headers, body)


def test_a_correlation_id_joins_once_it_is_known(client: Client) -> None:
    one, other = ({"x-correlation-id": name} for name in ("one", "other"))
    first, unknown, again = map(client.program, (one, other, one))
    assert first == again != unknown


def test_a_trace_joins_once_it_is_known(client: Client) -> None:
    one, other = ({"traceparent": f"00-{digit * 32}-{digit * 16}-01"} for digit in "12")
    first, unknown, again = map(client.program, (one, other, one))
    assert first == again != unknown


@pytest.mark.parametrize("member", ["conversation", "previous_response_id"])
def test_responses_names_a_conversation_or_an_answer(client: Client, member: str) -> None:
    def ask(text: str, **more: Any) -> tuple[str, str]:
        answer = httpx.post(
            f"{client.server.url}/v1/responses", json={"model": "scripted", "input": text, **more}, timeout=120
        )
        return answer.headers.get("weft-program-id", answer.text), answer.json().get("id", "")

    if member == "conversation":
        first, _ = ask("One", conversation={"id": "conv-1"})
        assert first == ask("Two", conversation="conv-1")[0] == "conversation:conv-1"
    else:
        first, name = ask("One more", store=True)
        assert first == ask("Another", previous_response_id=name)[0]
