"""The middleware that checks ids over HTTP, with applications that read or do not read the body."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.core.errors import EngineStartError
from weft.engine.http.check_ids import CheckIds, read_limit
from weft.engine.http.identity import scope_of
from weft.engine.wire.call_header import SCOPE_LENGTH

Headers = list[tuple[bytes, bytes]]
KEY = [(b"authorization", b"Bearer key-1")]
SCOPE = scope_of(KEY)
OTHER_SCOPE = scope_of([(b"authorization", b"Bearer key-2")])
MULTIPART = [(b"content-type", b"multipart/form-data; boundary=frontier")]


class Exchange:
    """One request to `CheckIds` before an application that keeps what it gets and answers with status 200.

    Args:
        body: The request's body, in the pieces in which it arrives.
        leaves: Whether the client leaves before the last piece.
        begins_first: Whether the application begins its response before it reads the body.
        limit: The largest body in bytes.
        fails: Whether the application raises an exception when the client has gone.
        weft: The scheduler's settings, if the application has any.
    """

    def __init__(
        self,
        body: bytes | Iterable[bytes] = b"",
        headers: Headers = KEY,
        *,
        path: str = "/v1/chat/completions",
        reads: bool = True,
        begins_first: bool = False,
        leaves: bool = False,
        fails: bool = False,
        limit: int = 10_000,
        weft: dict[str, Any] | None = None,
    ) -> None:
        self.pieces = iter([body] if isinstance(body, bytes) else body)
        self.bytes_read, self.is_complete = 0, False
        self.leaves, self.fails, self.reads, self.begins_first = leaves, fails, reads, begins_first
        self.got: list[Any] = []  # by the application
        self.headers: dict[bytes, bytes] = {}  # as the application sees them
        self.sent: list[Any] = []  # to the client
        options = SimpleNamespace(state=SimpleNamespace(args=SimpleNamespace(additional_config={"weft": weft})))
        scope = {"type": "http", "method": "POST", "path": path, "headers": list(headers)}
        if weft is not None:
            scope["app"] = options
        asyncio.run(CheckIds(self._app, limit)(scope, self._receive, self._send))

    async def _receive(self) -> Any:
        piece = next(self.pieces, None)
        if piece is not None:
            self.bytes_read += len(piece)
            return {"type": "http.request", "body": piece, "more_body": True}
        if self.leaves or self.is_complete:
            return {"type": "http.disconnect"}
        self.is_complete = True
        return {"type": "http.request", "body": b"", "more_body": False}

    async def _send(self, message: Any) -> None:
        self.sent.append(message)

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:
        self.headers = dict(scope["headers"])
        start = {"type": "http.response.start", "status": 200, "headers": []}
        if self.begins_first:
            await send(start)
        while self.reads:
            self.got.append(await receive())
            if not self.got[-1].get("more_body"):
                break
        if self.fails and self.got[-1]["type"] == "http.disconnect":
            raise ConnectionResetError
        if not self.begins_first:
            await send(start)
        await send({"type": "http.response.body", "body": b"ok"})

    @property
    def status(self) -> int:
        """The status of the one response that the client got."""
        (start,) = (message for message in self.sent if message["type"] == "http.response.start")
        (_body,) = (message for message in self.sent if message["type"] == "http.response.body")
        status: int = start["status"]
        return status

    @property
    def error(self) -> str:
        """The message of the error that the client got."""
        message: str = json.loads(self.sent[-1]["body"])["error"]["message"]
        return message

    @property
    def request(self) -> Any:
        """The JSON that the application got."""
        (message,) = self.got
        return json.loads(message["body"])


def sending(request: object, headers: Headers = KEY, **options: Any) -> Exchange:
    """An exchange with a JSON body."""
    return Exchange(json.dumps(request).encode(), [*headers, (b"content-type", b"application/json")], **options)


@pytest.mark.parametrize(
    ("request_", "header"),
    [({"priority": 5}, None), ({"priority": "-1"}, None), ({}, b"5"), ({"priority": 0}, b"high")],
)
def test_a_priority_is_refused(request_: dict[str, Any], header: bytes | None) -> None:
    """Weft's scheduler ranks calls by their programs, and what has no effect is not ignored silently."""
    exchange = sending(request_, [*KEY, (b"x-vllm-priority", header)] if header is not None else KEY)
    assert exchange.status == 400
    assert "the policy ranks calls by their programs" in exchange.error
    assert [message["type"] for message in exchange.got] == ["http.disconnect"]


@pytest.mark.parametrize(("request_", "header"), [({}, None), ({"priority": 0}, b"0"), ({"priority": None}, None)])
def test_a_priority_that_says_nothing_passes(request_: dict[str, Any], header: bytes | None) -> None:
    """SDKs may send the default."""
    exchange = sending(request_, [*KEY, (b"x-vllm-priority", header)] if header is not None else KEY)
    assert exchange.status == 200


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/inference/v1/generate", "/invocations", "/prefix/v1/any"])
@pytest.mark.parametrize(
    ("request_", "named"),
    [
        ({"vllm_xargs": {"program_id": ""}}, "program_id"),
        ({"vllm_xargs": {"session_id": 7}}, "session_id"),
        ({"vllm_xargs": {"tenant": "x" * 257}}, "tenant"),
        ({"vllm_xargs": {"call_id": "a\nb"}}, "call_id"),
        ({"vllm_xargs": {"wait_s": 1e9}}, "wait_s"),
        ({"session_id": ["s"]}, "session_id"),
        ({"sampling_params": {"extra_args": {"program_id": 7}}}, "program_id"),
    ],
)
def test_a_malformed_field_is_refused_on_every_route(path: str, request_: dict[str, Any], named: str) -> None:
    """The client gets one response, a 400 that names the field. The application gets no request to act on."""
    exchange = sending(request_, path=path)
    assert exchange.status == 400
    assert named in exchange.error
    assert [message["type"] for message in exchange.got] == ["http.disconnect"]


def test_ids_get_the_scope_of_the_key() -> None:
    """Whatever names a program, a session or a tenant reaches the scheduler with a digest of the key before it, and so
    does a tool, whose times one client could otherwise falsify for others."""
    ids = {"program_id": "p", "session_id": "s", "tenant": "t", "tool_started": "search", "tool_ended": "run"}
    others = {"call_id": "c", "thread_id": "h", "parents": ["c0"], "program_name": "agent", "program_end": 1}
    scoped = {name: f"{SCOPE}/{value}" for name, value in ids.items()}
    exchange = sending(
        {"vllm_xargs": {**ids, **others}, "session_id": "s", "sampling_params": {"extra_args": dict(ids)}, "n": 1.5},
        [*KEY, (b"x-session-id", b"s")],
    )
    assert exchange.status == 200
    assert exchange.request == {
        "vllm_xargs": {**scoped, **others},
        "session_id": f"{SCOPE}/s",
        "sampling_params": {"extra_args": scoped},
        "n": 1.5,
    }
    assert exchange.headers[b"x-session-id"] == f"{SCOPE}/s".encode()
    assert len(SCOPE) + 1 == SCOPE_LENGTH
    assert b"key-1" not in exchange.got[0]["body"]


def test_clients_with_different_keys_share_no_program() -> None:
    """A client that knows another's program and even its scope names neither: its own scope comes first."""
    for forged in ("p", f"{OTHER_SCOPE}/p", f"/{OTHER_SCOPE}/p"):
        got = sending({"vllm_xargs": {"program_id": forged}}).request["vllm_xargs"]["program_id"]
        assert got == f"{SCOPE}/{forged}" != f"{OTHER_SCOPE}/p"
    without_key = sending({"vllm_xargs": {"program_id": f"{OTHER_SCOPE}/p"}}, []).request
    assert without_key == {"vllm_xargs": {"program_id": f"-/{OTHER_SCOPE}/p"}}


def test_a_key_has_one_scope() -> None:
    """The scheme's case does not matter, as in vLLM's authentication, and of two headers the first one counts."""
    assert scope_of([(b"authorization", b"bearer key-1"), (b"authorization", b"Bearer key-2")]) == SCOPE != OTHER_SCOPE
    assert scope_of([]) == scope_of([(b"host", b"localhost")]) == "-"


def test_a_body_without_ids_is_passed_on_as_it_is() -> None:
    """The very bytes: spaces, escapes and bodies that are not JSON are the server's business."""
    for body in (b'{ "n":1.50, "text": "\\u00e9" }', b"[1]", b"{", b"", b"\xff\xfe", b'{"vllm_xargs": 7}', b"1" * 5000):
        exchange = Exchange([body[:1], body[1:]])
        assert exchange.status == 200
        assert [message["body"] for message in exchange.got] == [body]


def test_of_a_key_that_occurs_twice_the_last_value_is_checked_and_passed_on() -> None:
    """A parser that took the first one instead would otherwise see ids that were never checked."""
    twice = b'{"vllm_xargs": {"program_id": "a"}, "vllm_xargs": {"program_id": "b", "program_id": "c"}}'
    exchange = Exchange(twice)
    assert exchange.got[0]["body"] == json.dumps({"vllm_xargs": {"program_id": f"{SCOPE}/c"}}).encode()
    assert Exchange(b'{"session_id": "a", "session_id": ""}').status == 400


@given(st.binary(max_size=40) | st.text("é\n a", max_size=300).map(str.encode))
def test_the_session_of_a_header_is_checked(value: bytes) -> None:
    """vLLM takes the session from X-Session-ID where the body names none. No value reaches it without its scope."""
    exchange = sending({}, [*KEY, (b"x-session-id", value)])
    if exchange.status == 200:
        assert exchange.headers[b"x-session-id"] == (f"{SCOPE}/".encode() + value if value else b"")
    else:
        assert "X-Session-ID" in exchange.error


def test_an_application_that_refuses_reads_nothing() -> None:
    """Authentication is inside. It answers before the body is read, and its answer comes through unchanged."""
    exchange = Exchange(b"x" * 100_000, [(b"x-session-id", b"a\tb")], reads=False)
    assert exchange.status == 200
    assert exchange.bytes_read == 0


def test_a_body_that_says_it_is_too_large_is_not_read() -> None:
    """The size is refused before a byte is read, and the connection closes, because the rest is not read either."""
    for length in (b"10001", b"0010001", b"9" * 5000):
        exchange = Exchange(b"x", [*KEY, (b"content-length", length)])
        assert (exchange.status, exchange.bytes_read) == (413, 0)
        assert "more than 10000 bytes" in exchange.error
        assert "WEFT_MAX_BODY_BYTES" in exchange.error
        assert (b"connection", b"close") in exchange.sent[0]["headers"]
    assert Exchange(b"x" * 10_000, [*KEY, (b"content-length", b"0010000")]).status == 200


def test_a_body_without_end_is_read_up_to_the_limit() -> None:
    """The bytes are counted as they come, so a client that announces no size, or a wrong one, fills no memory."""
    exchange = Exchange((b"x" * 1000 for _ in iter(int, 1)), [*KEY, (b"content-length", b"5")])
    assert (exchange.status, exchange.bytes_read) == (413, 11_000)
    assert [message["type"] for message in exchange.got] == ["http.disconnect"]


def test_a_client_that_leaves_gets_no_answer_of_ours() -> None:
    """The application hears that the client has gone, and nothing of half a body."""
    exchange = Exchange([b'{"vllm_xargs": {"program', b'_id": ""}}'], leaves=True)
    assert [message["type"] for message in exchange.got] == ["http.disconnect"]
    assert exchange.status == 200  # what the application sends then; the server drops it


def test_an_application_that_fails_because_the_request_ended_does_no_harm() -> None:
    """Some routes fail when a request ends early. The server would then close the connection of the client, and log a
    traceback. The same holds if the client has left."""
    assert sending({"session_id": ""}, fails=True).status == 400
    assert sending({}, leaves=True, fails=True).sent == []


def test_a_response_that_has_begun_is_the_only_one() -> None:
    """A second response would break the connection, so the application only loses the rest of the request."""
    exchange = sending({"session_id": ""}, begins_first=True)
    assert exchange.status == 200
    assert [message["type"] for message in exchange.got] == ["http.disconnect"]


@pytest.mark.parametrize("depth", [5000, 100_000])
def test_deep_nesting_is_refused(depth: int) -> None:
    """Python's parser raises RecursionError, which the server would answer with status 500."""
    for body in (b"[" * depth, b'{"a":' * depth, b'{"session_id": "s", "a": ' + b"[" * depth + b"]" * depth + b"}"):
        exchange = Exchange(body, limit=1_000_000)
        assert exchange.status == 400
        assert "nested too deeply" in exchange.error


def test_figures_are_refused_where_the_scheduler_ignores_them() -> None:
    """A client that sends figures is told, not silently ignored. The server's own options say whether they count."""
    request = {"vllm_xargs": {"program_id": "p", "service_s": 1.0}}
    refused = sending(request, weft={"policy": "atlas"})
    assert refused.status == 400
    assert "service_s" in refused.error
    assert '"trust_clients": true' in refused.error
    assert sending(request, weft={"policy": "atlas", "trust_clients": True}).status == 200
    deadline = {"vllm_xargs": {"program_id": "p", "program_time_left_s": 30}}
    assert sending(deadline, weft={"policy": "fair"}).status == 400
    assert sending(deadline, weft={"policy": "fair", "trust_clients": True}).status == 200
    assert sending(request).status == 200  # the options are unknown: the scheduler decides, and logs what it ignores


def multipart(**fields: str) -> bytes:
    parts = [f'--frontier\r\nContent-Disposition: form-data; name="{k}"\r\n\r\n{v}\r\n' for k, v in fields.items()]
    return "".join([*parts, "--frontier--\r\n"]).encode()


def test_ids_in_a_form_are_refused() -> None:
    """Routes for audio take forms. Their ids cannot get a scope, so the client is told to leave them out."""
    pytest.importorskip("starlette")
    form = multipart(model="m", vllm_xargs=json.dumps({"program_id": "p", "service_s": 1.0}))
    urlencoded = [(b"content-type", b"application/x-www-form-urlencoded; charset=utf-8")]
    for body, headers in ((form, MULTIPART), (b'{"x":"&vllm_xargs={%22session_id%22:7}&"}', urlencoded)):
        exchange = Exchange(body, [*KEY, *headers])
        assert exchange.status == 400
        assert "leave the fields out" in exchange.error.lower()
    for body in (multipart(vllm_xargs='{"other": 1}'), multipart(file="program_id"), multipart(vllm_xargs="{"), b"--x"):
        assert Exchange(body, [*KEY, *MULTIPART]).got[0]["body"] == body


def test_other_connections_pass() -> None:
    """Websockets and the application's start-up carry no ids and are none of this middleware's business."""
    seen = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append((scope, receive, send))

    asyncio.run(CheckIds(app)({"type": "websocket"}, None, None))  # type: ignore[arg-type]  # what it would pass on
    assert seen == [({"type": "websocket"}, None, None)]


def test_the_limit_comes_from_the_environment() -> None:
    """64 MiB, or what the operator says. A wrong value is an error when the server starts."""
    assert read_limit({}) == 64 * 2**20
    assert read_limit({"WEFT_MAX_BODY_BYTES": "1000"}) == 1000
    for text in ("", "0", "-1", "64MB", "1e6", "²", "9" * 5000):
        with pytest.raises(
            EngineStartError, match=r"^WEFT_MAX_BODY_BYTES must be a number of bytes, at least 1, not '"
        ):
            read_limit({"WEFT_MAX_BODY_BYTES": text})


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/weft/events"])
@pytest.mark.parametrize("body", [rb'{"a": "\ud800"}', rb'[{"\udfFf": 1}]', rb'{"a": [["\uD83D"]]}'])
def test_half_of_a_surrogate_pair_is_refused_on_every_route(path: str, body: bytes) -> None:
    """It can be read and not be sent on, so it would fail anywhere behind this place."""
    exchange = Exchange(body, path=path)
    assert exchange.sent[0]["status"] == 400
    assert b"half of a surrogate pair" in exchange.sent[1]["body"]
    assert Exchange(rb'{"a": "\ud83d\ude00", "b": "\\ud800"}').sent[0]["status"] == 200
