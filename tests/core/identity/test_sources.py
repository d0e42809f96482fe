"""Which program a request belongs to, by the headers and fields that agents send."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.core.errors import InvalidIdError
from weft.core.identity import Evidence, Identity, Source, identity_of
from weft.core.identity.families import Families
from weft.core.identity.sources import SOURCES

SCOPE = "-"
SESSION = "3f1e2d4c-0000-4000-8000-123456789abc"
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


def found(body: dict[str, Any] | None = None, **headers: str) -> Identity | Evidence:
    """What a request carries. An underscore in the name of a header stands for a hyphen."""
    pairs = [(name.replace("_", "-").encode(), value.encode("latin-1")) for name, value in headers.items()]
    return identity_of(pairs, body or {}, SCOPE)


@pytest.mark.parametrize(
    ("headers", "body", "source", "program"),
    [
        ({"weft_program_id": "a"}, {}, Source.WEFT, "a"),
        ({}, {"vllm_xargs": {"program_id": "a"}}, Source.WEFT, "a"),
        ({"x_claude_code_session_id": "a"}, {}, Source.CLAUDE_CODE, "claude-code:a"),
        ({"session_id": "a", "thread_id": "t"}, {}, Source.CODEX, "codex:a"),
        ({"thread_id": "t"}, {}, Source.CODEX, "codex:t"),
        ({"x_session_id": "a"}, {}, Source.SESSION, "session:a"),
        ({}, {"session_id": "a"}, Source.SESSION, "session:a"),
        ({"weft_session_id": "a"}, {}, Source.SESSION, "session:a"),
        ({"x_dynamo_session_id": "a"}, {}, Source.DYNAMO, "dynamo:a"),
        ({"x_dynamo_trajectory_id": "a"}, {}, Source.DYNAMO, "dynamo:a"),
        ({"x_opencode_session": "a"}, {}, Source.OPENCODE, "opencode:a"),
        ({}, {"program_id": "a"}, Source.THUNDERAGENT, "thunderagent:a"),
        ({"x_litellm_session_id": "a"}, {}, Source.VENDOR, "vendor:a"),
        ({"x_acme_session_id": "a"}, {}, Source.VENDOR, "vendor:a"),
        ({"x_acme_agents_runtime_session_id": "a"}, {}, Source.VENDOR, "vendor:a"),
        ({"x_smg_routing_key": "a"}, {}, Source.GATEWAY, "gateway:a"),
        ({"x_aibrix_session_key": "a"}, {}, Source.GATEWAY, "gateway:a"),
        ({"x_session_affinity": "a"}, {}, Source.AFFINITY, "affinity:a"),
        (
            {},
            {"vllm_xargs": {"agentic_context": json.dumps({"program_id": "a"})}},
            Source.AGENTIC_CONTEXT,
            "agentic-context:a",
        ),
        ({"baggage": "k=v, gen_ai.conversation.id=a%20b;x=1"}, {}, Source.BAGGAGE, None),
        ({"baggage": "session.id=a"}, {}, Source.BAGGAGE, "baggage:a"),
        ({}, {"conversation": "a"}, Source.CONVERSATION, "conversation:a"),
        ({}, {"conversation": {"id": "a"}}, Source.CONVERSATION, "conversation:a"),
        ({}, {"metadata": {"thread_id": "a"}}, Source.METADATA, "metadata:a"),
        ({}, {"metadata": {"user_id": f"user_1_account__session_{SESSION}"}}, Source.METADATA, f"metadata:{SESSION}"),
    ],
)
def test_an_id_names_the_program(
    headers: dict[str, str], body: dict[str, Any], source: Source, program: str | None
) -> None:
    """Each of the names under which agents send an id is read, and two sources with one id are two programs."""
    identity = found(body, **headers)
    assert isinstance(identity, Identity)
    assert identity.source is source
    assert program is None or identity.program_id == f"{SCOPE}/{program}"


def test_the_reference_has_the_sources_in_their_order() -> None:
    """A reader of the table sees which of several ids counts."""
    page = Path(__file__).parents[3] / "docs" / "reference" / "program-ids.md"
    listed = re.findall(r"^\|.*\| `([a-z-]+)` \|$", page.read_text(encoding="utf-8"), re.MULTILINE)
    assert listed == [Source.WEFT, *(source for source, _ in SOURCES)]


def test_our_own_ids_precede_those_of_others() -> None:
    """A client that names a program means it."""
    identity = found({"metadata": {"thread_id": "m"}}, weft_program_id="a", x_claude_code_session_id="b")
    assert isinstance(identity, Identity)
    assert identity.program_id == "-/a"


def test_a_call_may_have_a_name() -> None:
    """In a header, or in the body as `weft.connect` sends it, with or without an id of its program."""
    named = found({"vllm_xargs": {"program_id": "a", "label": "planner"}})
    assert isinstance(named, Identity)
    assert named.label == "planner"
    assert found(weft_label="writer").label == "writer"
    with pytest.raises(InvalidIdError):
        found({"vllm_xargs": {"label": "two\nlines"}})


def test_a_sub_agent_is_a_thread_of_its_session() -> None:
    """Claude Code's agents share a session; each is a thread with its parent."""
    identity = found(
        x_claude_code_session_id="s", x_claude_code_agent_id="child", x_claude_code_parent_agent_id="parent"
    )
    assert isinstance(identity, Identity)
    assert (identity.program_id, identity.thread_id, identity.parent_thread_id) == (
        "-/claude-code:s",
        "child",
        "parent",
    )


# Headers that aiperf 0.13.0 sent in its AgentX scenario, and what it adds with
# AIPERF_HTTP_X_DYNAMO_SESSION_ID_FROM_CORRELATION_ID=1. The conversation's id is the same in all but x-request-id.
AIPERF_SESSION, AIPERF_PARENT = "f2013a34-94d4-4f08-8337-9789e8795968", "52556b27-0bae-4ce1-881d-d110c0be26e3"
AIPERF = {
    "user_agent": "aiperf/0.13.0",
    "x_request_id": "afa23678-7912-455f-adf6-2622aae92941",
    "x_correlation_id": AIPERF_SESSION,
    "x_session_affinity": AIPERF_SESSION,
}


def test_a_conversation_of_aiperf_is_a_program() -> None:
    """Its turns have one id, whatever the id of the request, and a sub-agent may name the conversation above it."""
    identity = found(**AIPERF)
    assert isinstance(identity, Identity)
    assert identity.program_id == f"-/affinity:{AIPERF_SESSION}"
    child = found(**AIPERF, x_dynamo_session_id=AIPERF_SESSION, x_dynamo_parent_session_id=AIPERF_PARENT)
    assert isinstance(child, Identity)
    assert (child.program_id, child.starter_id) == (f"-/dynamo:{AIPERF_SESSION}", f"-/dynamo:{AIPERF_PARENT}")


@pytest.mark.parametrize(
    "names",
    [
        ("x_dynamo_session_id", "x_dynamo_parent_session_id"),
        ("x_dynamo_trajectory_id", "x_dynamo_trajectory_parent"),
        ("x_session_id", "x_parent_session_id"),
        ("x_opencode_session", "x_parent_session_id"),
        ("x_session_affinity", "x_parent_session_id"),
        ("x_litellm_session_id", "x_parent_session_id"),
        ("x_litellm_session_id", "x_litellm_parent_session_id"),
    ],
)
def test_a_session_that_another_one_started_is_a_thread_of_it(names: tuple[str, str]) -> None:
    """Also if that one was started itself, and if a later request names no parent. It does not end the program."""
    families = Families()

    def joined(session: str, parent: str | None = None, **headers: str) -> tuple[str, str | None, str | None, bool]:
        identity = found(**{names[0]: session}, **({names[1]: parent} if parent else {}), **headers)
        assert isinstance(identity, Identity)
        identity = families.joined(identity, SCOPE)
        return identity.program_id, identity.thread_id, identity.parent_thread_id, identity.ends

    root = joined("root", "root")[0]
    assert root.endswith(":root")
    assert joined("child", "root") == (root, "child", None, False)
    assert joined("grandchild", "child") == (root, "grandchild", "child", False)
    assert joined("grandchild") == (root, "grandchild", None, False)
    assert joined("child", "root", x_dynamo_session_final="true") == (root, "child", None, False)
    assert joined("root") == (root, None, None, False)
    assert joined("other")[0] != root


def test_sessions_that_started_each_other_end_nowhere() -> None:
    """Nonsense is bounded, and each request has a program of its own key."""
    families = Families(most=10)
    for number in range(100):
        for session, parent in ((number, number + 1), (number + 1, number)):
            identity = found(x_session_id=f"s{session}", x_parent_session_id=f"s{parent}")
            assert isinstance(identity, Identity)
            assert families.joined(identity, SCOPE).program_id.startswith("-/session:s")
    assert len(families) <= 10


def test_what_gateways_share_an_engine_by_is_no_program() -> None:
    """llm-d's header names a tenant."""
    evidence = found(x_llm_d_inference_fairness_id="team")
    assert isinstance(evidence, Evidence)
    assert evidence.flow == "team"


@pytest.mark.parametrize(
    ("header", "first", "later"),
    [
        ("x_stainless_retry_count", "0", "1"),  # OpenAI's and Anthropic's SDKs
        ("amz_sdk_request", "attempt=1; max=3", "attempt=2; max=3"),
        ("x_envoy_attempt_count", "1", "2"),
    ],
)
def test_a_request_may_say_that_it_is_sent_again(header: str, first: str, later: str) -> None:
    """Retries count from zero, attempts from one."""
    said = [found(**{header: value}) for value in (first, later, "x", "-1")]
    assert [isinstance(each, Evidence) and each.is_retry for each in said] == [False, True, False, False]


@pytest.mark.parametrize(
    ("headers", "body"),
    [
        ({"weft_program_id": "x" * 300}, {}),
        ({"x_session_id": "x" * 300}, {}),
        ({}, {"session_id": 7}),
        ({}, {"vllm_xargs": {"program_id": ["a"]}}),
        ({"weft_program_end": "maybe"}, {}),
    ],
)
def test_our_own_malformed_ids_are_refused(headers: dict[str, str], body: dict[str, Any]) -> None:
    """A client that names a program wrongly is told so."""
    with pytest.raises(InvalidIdError):
        found(body, **headers)


@pytest.mark.parametrize(
    ("headers", "body"),
    [
        ({"x_claude_code_session_id": "x" * 2000}, {}),
        ({"baggage": "=,;=;,%zz"}, {"metadata": 3, "conversation": [1]}),
        ({}, {"vllm_xargs": {"agentic_context": "{"}, "metadata": {"user_id": "{"}}),
        ({"traceparent": "00-0-0-0"}, {}),
    ],
)
def test_malformed_ids_of_others_are_ignored(headers: dict[str, str], body: dict[str, Any]) -> None:
    """Agents know nothing of Weft, so what they send breaks no request."""
    evidence = found(body, **headers)
    assert isinstance(evidence, Evidence)
    assert evidence.trace_id is None


def test_what_says_less_than_an_id_is_evidence() -> None:
    """A trace, an earlier response, a key for the prompt cache, and a name help to find the program."""
    evidence = found(
        {"previous_response_id": "resp_1", "prompt_cache_key": "key"},
        x_correlation_id="correlation",
        traceparent=f"00-{TRACE}-00f067aa0ba902b7-01",
        weft_program_name="coder",
        weft_tenant="team",
    )
    assert isinstance(evidence, Evidence)
    assert (evidence.previous_response_id, evidence.prompt_cache_key) == ("resp_1", "key")
    assert evidence.correlation_id == "correlation"
    assert (evidence.trace_id, evidence.program_name, evidence.tenant) == (TRACE, "coder", "team")


@pytest.mark.parametrize(
    ("headers", "body"),
    [
        ({"weft_program_end": "true"}, {}),
        ({"x_dynamo_session_final": "true"}, {}),
        ({"x_dynamo_trajectory_final": "1"}, {}),
        ({}, {"vllm_xargs": {"program_end": 1}}),
    ],
)
def test_the_last_call_says_so(headers: dict[str, str], body: dict[str, Any]) -> None:
    """A program ends with the call that says so."""
    assert found(body, **headers).ends


@pytest.mark.parametrize(
    ("agent", "name"),
    [
        ("AsyncOpenAI/Python 3.57.0", "openai-python"),
        ("QwenCode/0.15.10 (linux; x64)", "qwencode"),
        ("opencode/1.18.33 ai-sdk/provider-utils/4.0.46", "opencode"),
        ("codex_exec/0.169.0 (Debian 12.0.0; x86_64)", "codex_exec"),
        ("a b/c", None),
        ("<script>/1.0", None),
        ("x" * 40 + "/1.0", None),
        ("", None),
    ],
)
def test_a_program_without_a_name_is_named_after_its_client(agent: str, name: str | None) -> None:
    """As the client calls itself, unless it is a coding agent that is known by its ids, or the request has a name."""
    assert found(user_agent=agent).program_name == name
    assert found(user_agent=agent, x_claude_code_session_id="s").program_name == "claude-code"
    assert found(user_agent=agent, weft_program_name="mine").program_name == "mine"


@given(
    st.dictionaries(
        st.sampled_from(
            [
                *("x_claude_code_session_id", "baggage", "traceparent", "thread_id", "x_dynamo_session_id"),
                *("x_session_affinity", "x_correlation_id", "x_parent_session_id", "x_acme_session_id"),
                *("x_opencode_session", "x_smg_routing_key", "x_llm_d_inference_fairness_id"),
            ]
        ),
        st.text(st.characters(max_codepoint=255)),
    ),
    st.dictionaries(
        st.sampled_from(["metadata", "conversation", "previous_response_id", "prompt_cache_key", "program_id"]),
        st.recursive(st.none() | st.integers() | st.text(), lambda each: st.dictionaries(st.text(), each)),
    ),
)
def test_nothing_that_others_send_breaks_a_request(headers: dict[str, str], body: dict[str, Any]) -> None:
    """Whatever the values are, the answer is an identity of this key, or evidence."""
    identity = found(body, **headers)
    assert isinstance(identity, Evidence) or identity.program_id.startswith("-/")
