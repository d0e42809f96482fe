"""OpenAI clients whose transport is the engine instead of HTTP."""

from __future__ import annotations

from typing import TYPE_CHECKING

import httpx2
from openai import AsyncOpenAI, OpenAI

from weft.core.program import Program
from weft.integrations.openai.transport import AsyncTransport, Transport

if TYPE_CHECKING:
    from weft.engine.host.frontend import FrontEnd

_BASE_URL = "http://weft/v1"  # The host name is never resolved.


def openai_client(engine: FrontEnd, program: Program | None = None) -> AsyncOpenAI:
    """Make an `AsyncOpenAI` whose calls run on `engine` and belong to `program`.

    Cancelling a call, or closing its stream, aborts the call in the engine. Calls are not retried, and they do not time
    out, since a call may wait long in the scheduler's queue. `client.with_options(timeout=..., max_retries=...)`
    changes both; a call that times out is aborted. The client holds no resources, so it need not be closed, and it may
    be used from any number of event loops.

    Args:
        engine: The engine on which the calls run. Requests name its model, `engine.model`.
        program: The program, or the branch of one, to which the calls belong. None: Each call is a program of its own.

    Raises:
        ArgumentTypeError: `engine` is no engine, or `program` no program.
        openai.APIStatusError: (raised by the calls) One of Weft's errors, see `weft.core.errors`, with a status of
            OpenAI's API: 400 the request is wrong or, with the code `context_length_exceeded`, too long; 404 unknown
            model or path; 409 the program has ended or runs on another engine; 429 the engine has too many calls; 500
            the engine failed on the call; 503 the engine or a replica was shut down or died; 504 the call's deadline
            has passed. After the first event of a stream, it is an `openai.APIError` with the same code.
    """
    return async_client(AsyncTransport(engine, program))


def async_client(transport: AsyncTransport) -> AsyncOpenAI:
    """Make an `AsyncOpenAI` with a transport of Weft's."""
    http = httpx2.AsyncClient(transport=transport, timeout=None)
    return AsyncOpenAI(base_url=_BASE_URL, api_key="none", max_retries=0, timeout=None, http_client=http)


def sync_openai_client(engine: FrontEnd, program: Program | None = None) -> OpenAI:
    """Make an `OpenAI` client, for code without an event loop; otherwise as `openai_client`. It is thread-safe."""
    http = httpx2.Client(transport=Transport(engine, program), timeout=None)
    return OpenAI(base_url=_BASE_URL, api_key="none", max_retries=0, timeout=None, http_client=http)
