"""Something else than a `weft serve` answers, or a proxy spoils the answer: each is a `ServerError` that says what."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

import weft
from weft.core.errors import ServerError
from weft.integrations.langchain import ChatWeft

pytestmark = pytest.mark.anyio

MODELS = {"data": [{"id": "canned", "max_model_len": 64}]}
USAGE = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
HEAD = {"id": "chatcmpl-1", "model": "canned"}
CHOICE = {"index": 0, "message": {"role": "assistant", "content": "yes"}, "finish_reason": "stop"}
WHOLE = {**HEAD, "choices": [CHOICE], "usage": USAGE}
DELTA = {"index": 0, "delta": {"content": "yes"}, "finish_reason": None}
CHUNK = {**HEAD, "choices": [DELTA]}
LAST = {**HEAD, "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
TOOL = {"id": "call-1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
DEEP = b"[" * 100_000

Canned = tuple[int, str, bytes]  # status, content type, body


def data(value: Any, status: int = 200, kind: str = "application/json") -> Canned:
    return status, kind, value if isinstance(value, bytes) else json.dumps(value).encode()


def choice(**more: Any) -> dict[str, Any]:
    return {**WHOLE, "choices": [{**CHOICE, **more}]}


def message(**more: Any) -> dict[str, Any]:
    return choice(message={"role": "assistant", **more})


def without(value: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: each for key, each in value.items() if key != name}


def sse(*events: Any, end: bytes = b"data: [DONE]\n\n", kind: str = "text/event-stream") -> Canned:
    parts = (each if isinstance(each, bytes) else json.dumps(each).encode() for each in events)
    return 200, kind, b"".join(b"data: " + part + b"\n\n" for part in parts) + end


def delta(**more: Any) -> dict[str, Any]:
    return {**HEAD, "choices": [{"index": 0, "delta": more, "finish_reason": None}]}


# What no JSON answer of a `weft serve` looks like, whatever was asked, and what the error says of it.
NO_ANSWER: dict[str, tuple[Canned, str]] = {
    "moved": (data(b"", 302), "302.*http://elsewhere"),
    "moved for good": (data(b"", 308), "308.*http://elsewhere"),
    "nothing": (data(b""), "no JSON"),
    "204": (data(b"", 204), "no JSON"),
    "a page": (data(b"<html>", kind="text/html"), "no JSON.*html"),
    "null": (data(None), "None, not an object"),
    "a list": (data([]), r"\[\], not an object"),
    "a number": (data(1), "1, not an object"),
    "true": (data(True), "True, not an object"),
    "a text": (data("yes"), "'yes', not an object"),
    "broken": (data(b'{"choices": ['), "no JSON"),
    "deep": (data(DEEP), "nested too deeply"),
    "no utf-8": (data(b'{"id": "\xff"}'), "no JSON"),
    "a huge number": (data(b"1" * 10_000), "no JSON"),
    "empty": (data({}), "is missing"),
}
MODEL_LISTS: dict[str, tuple[Canned, str]] = {
    **NO_ANSWER,
    "not found": (data({"detail": "Not Found"}, 404), "no `weft serve`"),
    "no models": (data({"data": []}), "no model"),
    "data is null": (data({"data": None}), "data is missing"),
    "data is an object": (data({"data": {}}), "data is {}, not a list"),
    "a model is a text": (data({"data": ["canned"]}), r"data\[0\] is 'canned'"),
    "a model without id": (data({"data": [{}]}), r"data\[0\].id is missing"),
    "a length in words": (data({"data": [{"id": "m", "max_model_len": "long"}]}), "max_model_len is 'long'"),
}
ANSWERS: dict[str, tuple[Canned, str]] = {
    **NO_ANSWER,
    "an error without words": (data({"error": None}, 502), "502"),
    "choices null": (data({**WHOLE, "choices": None}), "choices is missing"),
    "choices an object": (data({**WHOLE, "choices": {}}), "choices is {}, not a list"),
    "choices a text": (data({**WHOLE, "choices": "yes"}), "choices is 'yes'"),
    "a choice is null": (data({**WHOLE, "choices": [None]}), r"choices\[0\] is None"),
    "a choice is a number": (data({**WHOLE, "choices": [1]}), r"choices\[0\] is 1"),
    "no choice": (data({**WHOLE, "choices": []}), "choices is empty"),
    "no message": (data({**WHOLE, "choices": [without(CHOICE, "message")]}), "message is missing"),
    "no index": (data({**WHOLE, "choices": [without(CHOICE, "index")]}), "index is missing"),
    "message a text": (data(choice(message="yes")), "message is 'yes'"),
    "content a number": (data(message(content=1)), "content is 1"),
    "content a list": (data(message(content=["yes"])), "content is"),
    "tool calls an object": (data(message(tool_calls={})), "tool_calls is {}"),
    "a tool call without function": (data(message(tool_calls=[without(TOOL, "function")])), "function is missing"),
    "arguments an object": (data(message(tool_calls=[{**TOOL, "function": {"name": "f", "arguments": {}}}])), "argum"),
    "no usage": (data(without(WHOLE, "usage")), "usage is missing"),
    "usage a number": (data({**WHOLE, "usage": 3}), "usage is 3"),
    "usage in words": (data({**WHOLE, "usage": {**USAGE, "prompt_tokens": "one"}}), "prompt_tokens is 'one'"),
    "no id": (data(without(WHOLE, "id")), "id is missing"),
    "no model": (data(without(WHOLE, "model")), "model is missing"),
    "a finish reason list": (data(choice(finish_reason=["stop"])), "finish_reason is"),
}
STREAMS: dict[str, tuple[Canned, str]] = {
    "moved": NO_ANSWER["moved"],
    "a page": (sse(kind="text/html"), "text/html"),
    "whole JSON": (data(WHOLE), "application/json"),
    "nothing": (sse(end=b""), "before its end"),
    "204": (data(b"", 204, "text/event-stream"), "before its end"),
    "only its end": (sse(), "before its end"),
    "no end": (sse(CHUNK, LAST, end=b""), "before its end"),
    "no finish reason": (sse(CHUNK), "before its end"),
    "cut in an event": (sse(CHUNK, end=b'data: {"id": "cha'), "before its end|no JSON"),
    "no JSON": (sse(CHUNK, b"yes"), "no JSON"),
    "no utf-8": (sse(b'{"id": "\xff", "choices": 1}'), "is missing|choices is 1"),
    "deep": (sse(DEEP), "nested too deeply"),
    "null": (sse(b"null"), "None, not an object"),
    "a list": (sse([]), "not an object"),
    "a text": (sse("error"), "'error', not an object"),
    "empty": (sse({}), "is missing"),
    "choices null": (sse({**CHUNK, "choices": None}), "choices is missing"),
    "choices an object": (sse({**CHUNK, "choices": {}}), "choices is {}"),
    "a choice is null": (sse({**CHUNK, "choices": [None]}), r"choices\[0\] is None"),
    "no delta": (sse({**CHUNK, "choices": [without(DELTA, "delta")]}), "delta is missing"),
    "delta a text": (sse({**CHUNK, "choices": [{**DELTA, "delta": "yes"}]}), "delta is 'yes'"),
    "content a number": (sse(delta(content=1)), "content is 1"),
    "tool calls without index": (sse(delta(tool_calls=[without(TOOL, "index")])), "index is missing"),
    "usage a text": (sse(CHUNK, LAST, {**HEAD, "choices": [], "usage": "2"}), "usage is '2'"),
    "no model": (sse(without(CHUNK, "model")), "model is missing"),
}


class OddServer(ThreadingHTTPServer):
    """Answers each path with canned bytes."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.canned = {"/v1/models": data(MODELS), "/weft/programs": data({"programs": []})}
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: OddServer

    def do_GET(self) -> None:
        self.rfile.read(int(self.headers.get("content-length", 0)))
        status, kind, body = self.server.canned.get(self.path, (204, "application/json", b""))
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("location", "http://elsewhere")
        self.end_headers()
        self.wfile.write(body)  # the end of the connection is the end of the body

    do_POST = do_GET  # noqa: N815  the name is that of the base class

    def log_message(self, *_args: Any) -> None:
        """Say nothing."""


@pytest.fixture
def odd() -> Iterator[OddServer]:
    with OddServer() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("path", "name"),
    [
        *(("/v1/models", name) for name in MODEL_LISTS),
        *(("/weft/programs", name) for name in NO_ANSWER if name != "empty"),  # the list is not read
    ],
)
async def test_what_is_no_weft_serve_is_not_connected_to(odd: OddServer, path: str, name: str) -> None:
    """The error has the address and what was wrong."""
    odd.canned[path], reason = MODEL_LISTS[name]
    with pytest.raises(ServerError, match=reason) as caught:
        await asyncio.to_thread(weft.connect, odd.url)
    assert caught.value.url == odd.url
    assert odd.url in str(caught.value)


async def ask(odd: OddServer, canned: Canned, *, stream: bool) -> list[Any]:
    odd.canned["/v1/chat/completions"] = canned
    with await asyncio.to_thread(weft.connect, odd.url) as engine:
        model = ChatWeft(engine=engine)
        return [each async for each in model.astream("Hi")] if stream else [await model.ainvoke("Hi")]


@pytest.mark.parametrize("name", ANSWERS)
async def test_an_odd_answer_is_an_error_with_its_fault(odd: OddServer, name: str) -> None:
    """Code behind the connection reads answers without looking, so they are looked at where they come in."""
    canned, reason = ANSWERS[name]
    with pytest.raises(ServerError, match=reason) as caught:
        await ask(odd, canned, stream=False)
    assert caught.value.url == odd.url


@pytest.mark.parametrize("name", STREAMS)
async def test_an_odd_stream_is_an_error_with_its_fault(odd: OddServer, name: str) -> None:
    """As for whole answers. A stream that breaks off is no whole answer."""
    canned, reason = STREAMS[name]
    with pytest.raises(ServerError, match=reason) as caught:
        await ask(odd, canned, stream=True)
    assert caught.value.url == odd.url


@pytest.mark.parametrize(
    "report", [None, 1, [], {"service_s": "long"}, {"service_s": float("nan")}, {"wait_s": 10**400}]
)
async def test_an_odd_account_counts_nothing(odd: OddServer, report: Any) -> None:
    """The answer is good, and no figure is made up."""
    body = json.dumps({**WHOLE, "weft": report}).encode()
    (answer,) = await ask(odd, data(body), stream=False)
    assert answer.text == "yes"
    assert answer.response_metadata["weft"][0]["service_s"] == 0.0


async def test_a_good_answer_is_taken_whole_and_streamed(odd: OddServer) -> None:
    """The same server, with what a `weft serve` says."""
    (answer,) = await ask(odd, data(WHOLE), stream=False)
    chunks = await ask(odd, sse(CHUNK, LAST), stream=True)
    assert answer.text == "".join(chunk.text for chunk in chunks) == "yes"
