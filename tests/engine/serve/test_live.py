"""`weft serve` with a real engine: vLLM's routes, admission, deadlines, keys, the end of programs, and its own end."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
from served import KEY, MAX_CALLS, Served
from tiny_engine import ENDLESS_TOKENS

from weft.views.top_client import STATES

pytestmark = pytest.mark.engine

MESSAGES: Any = [{"role": "user", "content": "Hello"}]


def body(max_tokens: int = 4, **more: Any) -> dict[str, Any]:
    """A chat request that produces as many tokens as it asks for."""
    return {"model": "tiny", "messages": MESSAGES, "max_tokens": max_tokens, "ignore_eos": True, **more}


def sdk(served: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{served.url}/v1", api_key=KEY, max_retries=0)


def test_openais_client_gets_an_answer(served: Served) -> None:
    """The answer has text and usage, as from vLLM's server."""
    with sdk(served) as client:
        answer = client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=4)
    assert answer.choices[0].message.content
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 4


def test_openais_client_gets_a_stream(served: Served) -> None:
    """The parts of a stream are those of the whole answer."""
    with sdk(served) as client:
        whole = client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=6, temperature=0)
        parts = client.chat.completions.create(
            model="tiny", messages=MESSAGES, max_tokens=6, temperature=0, stream=True
        )
        text = "".join(part.choices[0].delta.content or "" for part in parts)
    assert text == whole.choices[0].message.content


@pytest.mark.parametrize(
    ("path", "request_body", "shown"),
    [
        ("/v1/completions", {"prompt": ["a", "b"], "max_tokens": 2}, "text_completion"),
        ("/v1/responses", {"input": "hi", "max_output_tokens": 4}, '"output_text"'),
        ("/v1/messages", {"messages": MESSAGES, "max_tokens": 4}, '"type":"message"'),
        ("/tokenize", {"prompt": "hi"}, '"tokens"'),
    ],
)
def test_the_other_routes_are_vllms(served: Served, path: str, request_body: dict[str, Any], shown: str) -> None:
    """Completions, Responses, Anthropic's Messages and the tokenizer answer in their own forms."""
    response = served.client.post(path, json={"model": "tiny", **request_body})
    assert response.status_code == 200, response.text
    assert shown in response.text


def test_the_models_are_listed(served: Served) -> None:
    """The server lists the name that it was given."""
    assert [each["id"] for each in served.client.get("/v1/models").json()["data"]] == ["tiny"]


def test_a_program_lives_from_call_to_call_until_it_is_ended(served: Served) -> None:
    """The client names a program in a header, and ends it; a second end finds nothing."""
    headers = {"weft-program-id": "trip"}
    for _ in range(2):
        response = served.client.post("/v1/chat/completions", json=body(), headers=headers)
        assert response.headers["weft-program-id"] == "trip"
    assert served.client.delete("/weft/programs/trip").status_code == 204
    assert served.client.delete("/weft/programs/trip").status_code == 404


def test_the_state_shows_the_programs_of_a_key(served: Served) -> None:
    """A program with its calls and tokens, the replica's queue, and nothing of other keys' programs."""
    headers = {"weft-program-id": "seen"}
    served.client.post("/v1/chat/completions", json=body(), headers=headers)
    answer = served.client.get("/weft/state")
    assert answer.status_code == 200, answer.text
    state = STATES.validate_json(answer.content)
    assert (state.model, state.policy) == ("tiny", "fair")
    (replica,) = state.replicas
    assert (replica.state, replica.running, replica.waiting, replica.calls) == ("ready", 0, 0, 0)
    seen = next(each for each in state.programs if each.program_id == "seen")
    assert (seen.state, seen.calls, seen.output_tokens) == ("idle", 1, 4)
    assert seen.service_s > 0
    other = STATES.validate_json(served.client.get("/weft/state", headers={"authorization": "Bearer key-2"}).content)
    assert "seen" not in {each.program_id for each in other.programs}
    assert httpx.get(f"{served.url}/weft/state").status_code == 401
    assert served.client.delete("/weft/programs/seen").status_code == 204
    ended = STATES.validate_json(served.client.get("/weft/state").content).ended
    assert ended[0].program_id == "seen"
    assert ended[0].state == "finished"


def test_the_programs_of_a_key_are_listed(served: Served) -> None:
    """With their calls and what they cost; other keys do not see them."""
    for _ in range(2):
        served.client.post("/v1/chat/completions", json=body(), headers={"weft-program-id": "listed"})
    (row,) = [each for each in served.client.get("/weft/programs").json()["programs"] if each["program_id"] == "listed"]
    assert (row["calls"], row["calls_in_flight"]) == (2, 0)
    assert row["service_s"] > 0
    with httpx.Client(base_url=served.url, headers={"authorization": "Bearer key-2"}) as other:
        assert other.get("/weft/programs").json() == {"programs": []}
    assert served.client.delete("/weft/programs/listed").status_code == 204


def test_the_last_call_ends_its_program(served: Served) -> None:
    """`weft-program-end` on a call leaves nothing open."""
    headers = {"weft-program-id": "short", "weft-program-end": "true"}
    assert served.client.post("/v1/chat/completions", json=body(), headers=headers).status_code == 200
    assert served.client.delete("/weft/programs/short").status_code == 404


def test_another_key_does_not_end_a_program(served: Served) -> None:
    """Ids are scoped by key, and without a key nothing is done."""
    served.client.post("/v1/chat/completions", json=body(), headers={"weft-program-id": "mine"})
    with httpx.Client(base_url=served.url, headers={"x-api-key": "key-2"}) as other:
        assert other.delete("/weft/programs/mine").status_code == 404
    assert served.client.delete("/weft/programs/mine").status_code == 204


def test_either_header_carries_the_key(served: Served) -> None:
    """Anthropic's clients send `x-api-key`; the program is the same one for both."""
    with httpx.Client(base_url=served.url, timeout=120, headers={"x-api-key": KEY}) as other:
        response = other.post("/v1/messages", json={**body(), "max_tokens": 4}, headers={"weft-program-id": "both"})
        assert response.status_code == 200, response.text
    assert served.client.delete("/weft/programs/both").status_code == 204


@pytest.mark.parametrize("credential", [{}, {"authorization": "Bearer no key"}, {"x-api-key": "no key"}])
@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/chat/completions"),
        ("POST", "/v1/messages"),
        ("GET", "/v1/models"),
        ("POST", "/tokenize"),
        ("POST", "/invocations"),
        ("GET", "/weft/programs"),
        ("GET", "/version"),
        ("GET", "/openapi.json"),
        ("OPTIONS", "/v1/models"),
        ("GET", "/no/such/path"),
    ],
)
def test_no_route_answers_without_a_key(served: Served, credential: dict[str, str], method: str, path: str) -> None:
    """vLLM's own server guards some routes only. The answer has the form of the route's API."""
    response = httpx.request(
        method, f"{served.url}{path}", headers=credential, content=b"{" if method == "POST" else b""
    )
    assert response.status_code == 401
    error = response.json()["error"]
    assert error["type"] == ("authentication_error" if path == "/v1/messages" else "invalid_request_error")
    assert "API key" in error["message"]


def test_probes_and_metrics_need_no_key(served: Served) -> None:
    """As under vLLM's server. A browser's question before a request gets vLLM's answer, which allows no page."""
    for path in ("/health", "/ping", "/metrics"):
        assert httpx.get(f"{served.url}{path}", follow_redirects=True).status_code == 200
    asked = {"origin": "http://page", "access-control-request-method": "POST"}
    assert "CORS" in httpx.options(f"{served.url}/v1/chat/completions", headers=asked).text


def test_an_untrusted_key_names_no_tenant(served: Served) -> None:
    """A client that could choose its tenant could choose its share."""
    response = served.client.post("/v1/chat/completions", json=body(), headers={"weft-tenant": "boss"})
    assert response.status_code == 400
    assert "trusted = true" in response.json()["error"]["message"]


def test_an_ended_program_aborts_its_calls(served: Served) -> None:
    """A call in flight gets status 409 when its program is ended."""
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(
            served.client.post, "/v1/chat/completions", json=body(ENDLESS_TOKENS), headers={"weft-program-id": "long"}
        )
        while served.client.delete("/weft/programs/long").status_code == 404:
            assert not call.done()
        assert call.result().status_code == 409


def test_calls_that_are_too_many_are_told_when_to_retry(served: Served) -> None:
    """The first call above the limit gets status 429 with `retry-after`. When the others have left, the next call gets
    its answer."""

    def call(**request: Any) -> httpx.Response:
        return served.client.post("/v1/chat/completions", **request)

    def in_flight() -> int:
        rows = served.client.get("/weft/programs").json()["programs"]
        return sum(row["calls_in_flight"] for row in rows if row["program_id"] == "many")

    with ThreadPoolExecutor(MAX_CALLS) as pool:
        endless = {"json": body(ENDLESS_TOKENS), "headers": {"weft-program-id": "many"}}
        calls = [pool.submit(call, **endless) for _ in range(MAX_CALLS)]
        while in_flight() < MAX_CALLS:
            assert not any(each.done() for each in calls)
        refused = call(json=body())
        assert served.client.delete("/weft/programs/many").status_code == 204
        assert [each.result().status_code for each in calls] == [409] * MAX_CALLS
    assert refused.status_code == 429
    assert int(refused.headers["retry-after"]) >= 1
    assert refused.json()["error"]["code"] == "overloaded"
    assert call(json=body()).status_code == 200  # all places are free again


def test_a_deadline_ends_a_call(served: Served) -> None:
    """A call that takes longer than it may gets status 504, and clients do not try it again."""
    response = served.client.post("/v1/chat/completions", json=body(ENDLESS_TOKENS), headers={"weft-timeout-s": "0.05"})
    assert response.status_code == 504
    assert response.headers["x-should-retry"] == "false"


@pytest.mark.parametrize("headers", [{"weft-timeout-s": "soon"}, {"weft-program-id": "x" * 300}])
def test_a_malformed_header_is_refused(served: Served, headers: dict[str, str]) -> None:
    """The client is told which header is wrong."""
    response = served.client.post("/v1/chat/completions", json=body(), headers=headers)
    assert response.status_code == 400
    assert next(iter(headers)) in response.json()["error"]["message"]


def test_figures_of_a_client_are_refused(served: Served) -> None:
    """No client gets a better place by what it says of itself."""
    response = served.client.post("/v1/chat/completions", json=body(vllm_xargs={"service_s": 0.0}))
    assert response.status_code == 400


def answer_of(response: httpx.Response, *, stream: bool) -> str:
    """The text of an answer, whole or from its parts."""
    if not stream:
        return str(response.json()["choices"][0]["message"]["content"])
    events = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: {")]
    choices = [choice for event in events for choice in json.loads(event)["choices"]]
    return "".join(choice["delta"].get("content") or "" for choice in choices)


@pytest.mark.parametrize("stream", [False, True])
def test_a_conversation_without_ids_is_one_program(served: Served, stream: bool) -> None:
    """The second request quotes the first answer, and gets its program; a stranger with the same words does not."""
    messages = [{"role": "user", "content": f"Where is the Nile? {stream}"}]
    first = served.client.post("/v1/chat/completions", json=body(8, messages=messages, stream=stream))
    stranger = served.client.post("/v1/chat/completions", json=body(8, messages=messages, stream=stream))
    told = [*messages, {"role": "assistant", "content": answer_of(first, stream=stream)}]
    second = served.client.post(
        "/v1/chat/completions", json=body(8, messages=[*told, {"role": "user", "content": "And?"}])
    )
    programs = [each.headers["weft-program-id"] for each in (first, stranger, second)]
    assert programs[0] == programs[2]
    assert programs[1] != programs[0]


def test_anthropics_messages_are_continued(served: Served) -> None:
    """The answer's blocks come back in the next request, as Anthropic's clients send them."""
    request = {"model": "tiny", "messages": [{"role": "user", "content": "Anthropic?"}], "max_tokens": 8}
    first = served.client.post("/v1/messages", json=request)
    told = [*request["messages"], {"role": "assistant", "content": first.json()["content"]}]
    second = served.client.post(
        "/v1/messages", json={**request, "messages": [*told, {"role": "user", "content": "And?"}]}
    )
    assert second.headers["weft-program-id"] == first.headers["weft-program-id"]


def test_responses_are_continued(served: Served) -> None:
    """The answer's items come back as input."""
    request: dict[str, Any] = {"model": "tiny", "max_output_tokens": 8}
    told = [{"role": "user", "content": "Responses?"}]
    first = served.client.post("/v1/responses", json={**request, "input": told})
    output = first.json()["output"]
    second = served.client.post(
        "/v1/responses", json={**request, "input": [*told, *output, {"role": "user", "content": "And?"}]}
    )
    assert second.status_code == 200, second.text
    assert second.headers["weft-program-id"] == first.headers["weft-program-id"]


@pytest.mark.parametrize(
    "headers",
    [{"x-claude-code-session-id": "s"}, {"session-id": "s"}, {"x-session-id": "s"}, {"x-dynamo-session-id": "s"}],
)
def test_the_ids_of_agents_name_programs(served: Served, headers: dict[str, str]) -> None:
    """Agents that send an id of their own need nothing of Weft, and may end their program by it."""
    found = {
        served.client.post("/v1/chat/completions", json=body(), headers=headers).headers["weft-program-id"]
        for _ in range(2)
    }
    assert len(found) == 1
    assert served.client.delete(f"/weft/programs/{found.pop()}").status_code == 204


def test_a_sigterm_lets_calls_end(last_served: Served) -> None:
    """The stream that is open ends as it would have, then the server ends with exit code 0."""
    served = last_served
    with served.client.stream("POST", "/v1/chat/completions", json=body(400, stream=True)) as stream:
        lines = stream.iter_lines()
        next(lines)
        served.process.terminate()
        rest = list(lines)
    assert rest[-2:] == ["data: [DONE]", ""]
    assert served.stop() == 0
    with pytest.raises(httpx.TransportError):
        served.client.get("/health")
