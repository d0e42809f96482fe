"""The routes of an engine that listens, like those of `weft serve`. Those who connect can see and end all programs."""

from __future__ import annotations

import ipaddress
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from weft.core.errors import MissingPackageError
from weft.core.ids import ProgramId
from weft.engine.live.reader import LiveReader

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

    from weft.engine.live.listener import ListeningEngine


def check_packages() -> None:
    """Check that what serves HTTP is installed.

    Raises:
        MissingPackageError: It is not.
    """
    try:
        import starlette
        import uvicorn
    except ImportError:
        packages = ("starlette", "uvicorn")
        raise MissingPackageError("an engine that listens", packages, "pip install starlette uvicorn") from None
    del starlette, uvicorn


def make_app(reader: LiveReader, engine: ListeningEngine, *, checks_host: bool) -> Starlette:
    """The application.

    Args:
        reader: Reads the engine's state.
        engine: Ends programs.
        checks_host: Refuse requests for other hosts: those of a page that a browser shows and whose host's name was
            made to mean this one.
    """
    from starlette.applications import Starlette
    from starlette.responses import Response
    from starlette.routing import Route

    async def state(request: Request) -> Response:
        if checks_host and not _is_local(request):
            return Response(status_code=403)
        return Response(await reader.read_json(), media_type="application/json")

    async def end(request: Request) -> Response:
        if checks_host and not _is_local(request):
            return Response(status_code=403)
        was_open = engine.end_program(ProgramId(request.path_params["program_id"]))
        return Response(status_code=204 if was_open else 404)

    return Starlette(
        routes=[
            Route("/weft/state", state, methods=["GET"]),
            Route("/weft/programs/{program_id:path}", end, methods=["DELETE"]),
        ]
    )


def _is_local(request: Request) -> bool:
    try:
        host = urlsplit(f"//{request.headers.get('host', '')}").hostname or ""
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
