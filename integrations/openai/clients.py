"""OpenAI clients whose transport is the engine instead of HTTP."""

from __future__ import annotations

from typing import TYPE_CHECKING

import httpx2
from openai import AsyncOpenAI, OpenAI

from weft.core.program import Program
from weft.integrations.openai.transport import AsyncTransport, Transport

if TYPE_CHECKING:
    from weft.engine.engine import Engine

_BASE_URL = "http://weft/v1"  # nothing is looked up


def openai_client(engine: Engine, program: Program | None = None) -> AsyncOpenAI:
    """An `AsyncOpenAI` whose calls run on `engine` and belong to `program`.

    Cancelling a call, or closing its stream, aborts it in the engine. A call is never retried and never times out, for
    it may wait for its turn: `client.with_options(timeout=..., max_retries=...)` changes that; a call that timed out is
    aborted. It holds nothing open, so it need not be closed, and may be used from any number of event loops.

    Args:
        engine: where the calls run. Requests name its model, `engine.model`.
        program: the program, or a branch of one, that the calls belong to. None: each call is a program of its own.

    Raises:
        openai.APIStatusError: (of the calls) Weft's errors, see `weft.core.errors`, under OpenAI's status codes: 400 a
            request that is wrong or, with the code `context_length_exceeded`, too long; 404 another model or path; 409
            the program has ended or runs on another engine; 500 the engine failed on the call; 503 the engine was shut
            down or died. Once a stream has begun, it is an `openai.APIError` with the same code.
    """
    http = httpx2.AsyncClient(transport=AsyncTransport(engine, program), timeout=None)
    return AsyncOpenAI(base_url=_BASE_URL, api_key="none", max_retries=0, timeout=None, http_client=http)


def sync_openai_client(engine: Engine, program: Program | None = None) -> OpenAI:
    """`openai_client` for code without an event loop: an `OpenAI`, which may be used from any thread."""
    http = httpx2.Client(transport=Transport(engine, program), timeout=None)
    return OpenAI(base_url=_BASE_URL, api_key="none", max_retries=0, timeout=None, http_client=http)
