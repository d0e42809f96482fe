"""Any HTTP request gets one response from `CheckIds`, and no id reaches the application unchecked or without its
scope."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from values import ByteReader, value

from weft.core.ids import MAX_ID_LENGTH, is_id
from weft.engine.http.check_ids import CheckIds
from weft.engine.http.identity import scope_of
from weft.engine.wire.call_header import FIELDS

ARGUMENTS = ("vllm_xargs", "sampling_params", "extra_args", "session_id")
WORDS = (*ARGUMENTS * 3, *FIELDS)
KEY = (b"authorization", b"Bearer key")
SCOPE = scope_of([KEY])
LIMIT_BYTES = 2000
CONTENT_TYPES = (b"application/json", b"multipart/form-data; boundary=b", b"application/x-www-form-urlencoded")


def one_input(data: bytes) -> None:
    """Send the request that the bytes describe: a byte of options, the session's header, then the body."""
    reader = ByteReader(data)
    options = reader.byte()
    headers = [KEY, (b"content-type", CONTENT_TYPES[options % 3])]
    if options & 4:
        headers.append((b"x-session-id", reader.take(reader.byte())))
    body = reader.take(LIMIT_BYTES * 2) if options & 8 else _json(reader)
    if options & 16:
        headers.append((b"content-length", reader.take(3) if options & 32 else b"%d" % len(body)))
    asyncio.run(_exchange(headers, body, pieces=1 + options // 64))


def _json(reader: ByteReader) -> bytes:
    request = value(reader, WORDS)
    try:
        return json.dumps(request).encode()
    except (ValueError, RecursionError):  # too many digits, or too deep
        return b'{"session_id":' * reader.byte() * 20


async def _exchange(headers: list[tuple[bytes, bytes]], body: bytes, pieces: int) -> None:
    size = len(body) // pieces + 1
    arriving = [body[start : start + size] for start in range(0, len(body), size)]
    sent: list[Any] = []
    received: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": arriving.pop(0) if arriving else b"", "more_body": bool(arriving)}

    async def send(message: Any) -> None:
        sent.append(message)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        received.append(await receive())
        _check_header(scope["headers"])
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    scope = {"type": "http", "method": "POST", "path": "/", "headers": headers}
    await CheckIds(app, LIMIT_BYTES)(scope, receive, send)
    assert [message["type"] for message in sent] == ["http.response.start", "http.response.body"]
    if received[0]["type"] == "http.request":
        assert sent[0]["status"] == 200
        _check_body(received[0]["body"], body)
    else:
        assert sent[0]["status"] in (400, 413)
        assert len(sent[1]["body"]) < 2000


def _check_header(headers: list[tuple[bytes, bytes]]) -> None:
    for name, session in headers:
        if name == b"x-session-id" and session:
            assert _is_scoped(session.decode("latin-1"))


def _check_body(passed: bytes, sent: bytes) -> None:
    assert len(sent) <= LIMIT_BYTES
    try:
        request = json.loads(passed)
    except (ValueError, RecursionError):
        assert passed == sent
        return
    if not isinstance(request, dict):
        assert passed == sent
        return
    parameters = request.get("sampling_params")
    extra_args = parameters.get("extra_args") if isinstance(parameters, dict) else None
    for fields in (request.get("vllm_xargs"), extra_args):
        if isinstance(fields, dict):
            for name in ("program_id", "session_id", "tenant"):
                assert fields.get(name) is None or _is_scoped(fields[name])
            for name in ("thread_id", "call_id", "program_name"):
                assert name not in fields or is_id(fields[name])
    assert request.get("session_id") is None or _is_scoped(request["session_id"])


def _is_scoped(text: str) -> bool:
    return text.startswith(f"{SCOPE}/") and is_id(text, len(SCOPE) + 1 + MAX_ID_LENGTH)


def seeds() -> list[bytes]:
    """Requests as clients send them, malformed ids in each place, forms, deep nesting, and bodies over the limit."""
    ids = {"program_id": "p", "parents": ["c"], "service_s": 1.5, "program_end": 1}
    requests: list[dict[str, Any]] = [
        {"model": "m", "messages": []},
        {"vllm_xargs": ids, "session_id": "s"},
        {"sampling_params": {"extra_args": ids}},
        {"vllm_xargs": {"session_id": "a\nb"}},
        {"vllm_xargs": {"program_calls": -1}},
        {"session_id": "x" * 300},
    ]
    form = b'--b\r\nContent-Disposition: form-data; name="vllm_xargs"\r\n\r\n{"program_id": "p"}\r\n--b--\r\n'
    return [
        *(b"\x08" + json.dumps(request).encode() for request in requests),
        b"\x48" + b'{"session_id": "a", "session_id": "b"}',
        b"\x0c\x03s-1{}",
        b"\x0c\x03a\tb{}",
        b"\x09" + form,
        b"\x0a" + b"vllm_xargs=%7B%22tenant%22:7%7D",
        b"\x08" + b"[" * 1999,
        b"\x18" + b"x" * 3000,
        b"\x38" + b"999" + b"x",
        b"\xc8" + b"x" * 3000,
    ]
