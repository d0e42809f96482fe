"""Errors of the application behind the server, in the form that the clients of each path read."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest

from weft.core.identity.lineage import Lineage
from weft.engine.http.http_errors import typed_error
from weft.engine.serve.exchange import ServeRequests
from weft.engine.serve.keys import Authenticate, make_key_ring
from weft.engine.serve.requests import SharedLineage


def answer(path: str, status: int, *pieces: bytes) -> tuple[dict[bytes, bytes], Any]:
    """The headers and the body that a client gets when the application answers with these pieces."""
    sent: list[Any] = []

    async def app(_scope: Any, _receive: Any, send: Any) -> None:
        headers = [(b"content-type", b"text/plain"), (b"content-length", b"9"), (b"allow", b"POST")]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        for number, piece in enumerate(pieces, 1):
            await send({"type": "http.response.body", "body": piece, "more_body": number < len(pieces)})

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    requests = SimpleNamespace(get=lambda _key: None, end=lambda _key: None)
    engine: Any = SimpleNamespace(requests=requests, call_timeout_s=None, lineage=SharedLineage(Lineage()))
    scope = {"type": "http", "method": "POST", "path": path, "headers": []}
    guarded = Authenticate(ServeRequests(app, engine), make_key_ring(), on_refused=lambda _reason: None)
    asyncio.run(guarded(scope, receive, send))
    body = b"".join(message.get("body", b"") for message in sent[1:])
    headers = dict(sent[0]["headers"])
    assert int(headers[b"content-length"]) == len(body) or sent[0]["status"] < 400
    return headers, json.loads(body) if headers[b"content-type"] == b"application/json" else body


@pytest.mark.parametrize("pieces", [(b'{"detail": "Not Found"}',), (b'{"detail": ', b'"Not Found"}'), (b"Not Found",)])
def test_an_error_of_fastapis_gets_openais_form(pieces: tuple[bytes, ...]) -> None:
    """OpenAI's clients look for `error.message`. Other headers stay."""
    headers, body = answer("/nothing", 404, *pieces)
    assert body["error"] == {
        "message": "Not Found",
        "type": "invalid_request_error",
        "param": None,
        "code": "not_found",
    }
    assert headers[b"allow"] == b"POST"


def test_anthropics_clients_get_anthropics_form() -> None:
    """It does not matter whether FastAPI or vLLM wrote the error."""
    for body in (b'{"detail": "no"}', b'{"error": {"message": "no", "type": "BadRequestError", "code": 400}}'):
        assert answer("/v1/messages", 400, body)[1] == {
            "type": "error",
            "error": {"type": "invalid_request_error", "message": "no"},
        }


def test_a_typed_error_stays_as_it_is() -> None:
    """vLLM's own types and codes are what its users know."""
    for path, body in (
        ("/v1/models", b'{"error": {"message": "no", "type": "NotFoundError", "param": null, "code": 404}}'),
        ("/v1/messages", b'{"type": "error", "error": {"type": "not_found_error", "message": "no"}}'),
    ):
        assert typed_error(path, 404, body) == body


def test_an_answer_is_no_error() -> None:
    """Only the status decides."""
    assert answer("/nothing", 200, b"Not Found")[1] == b"Not Found"
