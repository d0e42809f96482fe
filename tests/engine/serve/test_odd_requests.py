"""Requests that vLLM's application fails on: each gets a typed error that says what was wrong with it."""

from __future__ import annotations

import ast
import asyncio
import inspect
import json
from argparse import Namespace
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from served import Served

from weft.core.errors import CallFailedError, InvalidRequestError
from weft.engine.serve.answers import add_report_to_events, choices_that_end
from weft.engine.serve.server import serve

CHAT = "/v1/chat/completions"
MESSAGE = {"role": "user", "content": "hi"}
SMALL = {"model": "tiny", "messages": [MESSAGE], "max_tokens": 3}


@pytest.mark.engine
@pytest.mark.parametrize(
    ("path", "change"),
    [
        (CHAT, {"vllm_xargs": {"a": "\ud800"}}),
        (CHAT, {"messages": [{"role": "user", "content": "\udfff"}]}),
        (CHAT, {"messages": []}),
        (CHAT, {"priority": 7}),
        ("/v1/messages", {"messages": [{"role": "user", "content": ""}]}),
        ("/v1/messages", {"messages": []}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "\ud800"}]}),
        ("/v1/completions", {"prompt": ""}),
        ("/v1/completions", {"prompt": []}),
        ("/v1/completions", {"prompt": "hi", "priority": -1}),
        ("/v1/responses", {"input": "\ud800"}),
        ("/tokenize", {"prompt": "\ud800"}),
    ],
)
def test_an_odd_request_gets_a_typed_error_of_the_client(served: Served, path: str, change: dict[str, Any]) -> None:
    """No answer names a member that vLLM's application lacks, and none is an error of the server."""
    body = json.dumps({**SMALL, **change})
    answer = served.client.post(path, content=body, headers={"content-type": "application/json"})
    if answer.status_code != 200:  # of some of these vLLM makes a prompt
        assert 400 <= answer.status_code < 500, answer.text
        assert answer.json()["error"]["message"]
    assert "has no attribute" not in answer.text
    assert served.client.post(CHAT, json=SMALL).status_code == 200


@pytest.mark.engine
def test_an_answer_has_its_account_once(served: Served) -> None:
    """Stock vLLM leaves `kv_transfer_params` null. A stream of two choices has the account of the whole call."""
    whole = served.client.post(CHAT, json={**SMALL, "n": 2}).json()
    assert whole.get("kv_transfer_params") is None
    assert whole["weft"]["output_tokens"] == whole["usage"]["completion_tokens"]
    stream = {"stream": True, "stream_options": {"include_usage": True}, "n": 2, "ignore_eos": True}
    text = served.client.post(CHAT, json={**SMALL, **stream}).text
    chunks = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    (reported,) = (chunk for chunk in chunks if "weft" in chunk)
    assert reported["choices"][0]["finish_reason"]
    assert reported["weft"]["output_tokens"] == 6


@pytest.mark.engine
def test_a_priority_in_a_header_is_refused(served: Served) -> None:
    """It has no effect, and nothing is ignored silently."""
    answer = served.client.post(CHAT, json=SMALL, headers={"x-vllm-priority": "5"})
    assert answer.status_code == 400
    assert "the policy ranks calls by their programs" in answer.json()["error"]["message"]


def test_an_event_that_ends_two_choices_has_one_report() -> None:
    """It is in the last of them."""
    events = b'data: {"finish_reason":"stop"}\n\ndata: {"a":1}\n\ndata: {"finish_reason":"length"}\n\ndata: [DONE]\n\n'
    assert choices_that_end(events) == 2
    assert add_report_to_events(events, {"x": 1}).split(b"\n\n") == [
        b'data: {"finish_reason":"stop"}',
        b'data: {"a":1}',
        b'data: {"finish_reason":"length","weft":{"x":1}}',
        b"data: [DONE]",
        b"",
    ]


@pytest.mark.engine
def test_every_handler_of_vllms_errors_finds_the_state_that_it_reads() -> None:
    """Each kind of error gets an answer of its own, from vLLM's handlers over the state that Weft's server sets."""
    from fastapi import FastAPI

    from weft.engine.vllm_compat.names import EngineDeadError, EngineGenerateError
    from weft.engine.vllm_compat.server_names import init_exception_handler

    app = FastAPI()
    before = set(app.exception_handlers.values())
    init_exception_handler(app)
    handlers = {handler for handler in app.exception_handlers.values() if handler not in before}
    read = {
        node.attr
        for module in map(inspect.getmodule, handlers)
        if module is not None
        for node in ast.walk(ast.parse(inspect.getsource(module)))
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Attribute)
        and node.value.attr == "state"
        and isinstance(node.value.value, ast.Attribute)  # `req.app.state`
    }
    assert read == {"args", "server", "engine_client"}  # of which Weft's server sets `server`, and vLLM the others
    assert "app.state.server" in inspect.getsource(inspect.getmodule(serve))  # type: ignore[arg-type]  # a module

    errors = (EngineGenerateError(), EngineDeadError(), ValueError("x"), TypeError("x"))
    app.state.args = Namespace(log_error_stack=False)
    app.state.engine_client = SimpleNamespace(errored=False, is_running=True)
    app.state.server = SimpleNamespace(should_exit=False)

    @app.get("/{number}")
    async def fail(number: int) -> None:
        raise errors[number]

    async def statuses() -> list[tuple[int, bool]]:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            answers = [await client.get(f"/{number}") for number in range(len(errors))]
        return [(answer.status_code, "has no attribute" in answer.text) for answer in answers]

    assert asyncio.run(statuses()) == [(500, False)] * 2 + [(400, False)] * 2
    assert not app.state.server.should_exit


@pytest.mark.engine
@pytest.mark.parametrize(
    ("cause", "kind"), [(ValueError("an empty prompt"), InvalidRequestError), (KeyError("x"), CallFailedError)]
)
def test_an_error_of_vllms_engine_is_told_by_its_cause(cause: Exception, kind: type[Exception]) -> None:
    """vLLM hides every error of a call in one without a text."""
    from weft.engine.serve.client import _typed
    from weft.engine.vllm_compat.names import EngineGenerateError

    error = EngineGenerateError()
    error.__cause__ = cause
    found = _typed(error)
    assert type(found) is kind
    assert str(cause) in str(found)
