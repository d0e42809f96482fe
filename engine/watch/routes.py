"""The routes of an engine that listens, like those of `weft serve`. Those who connect can see and end all programs."""

from __future__ import annotations

import ipaddress
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from weft.core.errors import MissingPackageError
from weft.core.ids import ProgramId
from weft.engine.watch.reader import LiveReader

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.types import ASGIApp, Receive, Scope, Send

    from weft.core.show.keeper import Timelines
    from weft.engine.watch.reader import WatchedEngine


def check_packages() -> None:
    """Raise MissingPackageError unless Starlette and uvicorn are installed."""
    try:
        import starlette
        import uvicorn
    except ImportError:
        packages = ("starlette", "uvicorn")
        raise MissingPackageError("an engine that listens", packages, "pip install starlette uvicorn") from None
    del starlette, uvicorn


def make_app(reader: LiveReader, engine: WatchedEngine, timelines: Timelines, *, checks_host: bool) -> ASGIApp:
    """Return the ASGI application of an engine that listens.

    Args:
        checks_host: Whether to refuse requests that name another host. A web page sends such requests if its own host
            name was made to resolve to this machine.
    """
    from starlette.applications import Starlette
    from starlette.responses import Response
    from starlette.routing import Route

    from weft.engine.watch.page import page_routes

    async def state(_request: Request) -> Response:
        return Response(await reader.read_json(), media_type="application/json")

    async def end(request: Request) -> Response:
        was_open = engine.end_program(ProgramId(request.path_params["program_id"]))
        return Response(status_code=204 if was_open else 404)

    app = Starlette(
        routes=[
            Route("/weft/state", state, methods=["GET"]),
            *page_routes(timelines, lambda _request: ""),
            Route("/weft/programs/{program_id:path}", end, methods=["DELETE"]),
        ]
    )

    async def for_this_host(scope: Scope, receive: Receive, send: Send) -> None:
        is_allowed = scope["type"] == "http" and _is_local(dict(scope["headers"]).get(b"host", b""))
        await (app if is_allowed else Response(status_code=403))(scope, receive, send)

    return for_this_host if checks_host else app


def _is_local(host_header: bytes) -> bool:
    try:
        host = urlsplit(f"//{host_header.decode('latin-1')}").hostname or ""
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
