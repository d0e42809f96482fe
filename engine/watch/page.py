"""The page that shows an engine's programs: its files, and where they are served."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from weft.core.ids import ProgramId
from weft.core.show import Timeline
from weft.core.show.keeper import Timelines
from weft.core.show.perfetto import perfetto

_FOLDER: Final = Path(__file__).parent / "static"
_KINDS: Final = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
PAGE: Final = "index.html"
ASSETS: Final = frozenset(path.name for path in _FOLDER.iterdir() if path.suffix in _KINDS and path.name != PAGE)
PATHS: Final = frozenset({"/", "/weft", "/weft/", *(f"/weft/page/{name}" for name in ASSETS)})

# Scripts and styles from this server only, none inside the page, and no text that becomes markup.
_HEADERS: Final = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
    ),
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",  # the next version of Weft may have other files
}


def asset(name: str) -> Response:
    return _response(name, (_FOLDER / name).read_bytes())


def page(*, needs_key: bool, has_models: bool) -> Response:
    """Return the page itself, which tells its script whether the server wants a key, and whether it takes calls."""
    marks = b"<html " + b"data-needs-key " * needs_key + b"data-has-models " * has_models
    return _response(PAGE, (_FOLDER / PAGE).read_bytes().replace(b"<html ", marks, 1))


def _response(name: str, data: bytes) -> Response:
    return Response(data, media_type=_KINDS[Path(name).suffix], headers=_HEADERS)


_MOST_LETTERS: Final = 60  # of the name of a file


def page_routes(
    timelines: Timelines, scope_of: Callable[[Request], str], *, needs_key: bool = False, has_models: bool = False
) -> list[Route]:
    """The page, its files, and the timelines of programs.

    Args:
        scope_of: Returns what the ids of those programs begin with that a request may see. No answer shows this prefix.
        needs_key: Whether only clients with an API key are served.
        has_models: Whether clients may make calls here.
    """

    def index(_request: Request) -> Response:
        return page(needs_key=needs_key, has_models=has_models)

    def without_slash(_request: Request) -> Response:
        return RedirectResponse("../weft")  # to which the page's links are relative

    def root(_request: Request) -> Response:
        return RedirectResponse("weft")

    # Starlette runs plain functions on other threads, so encoding a long program does not stop the engine's event loop.

    def timeline(request: Request) -> Response:
        found = _timeline(timelines, request, scope_of)
        return _unknown(request) if found is None else _json(found.to_dict())

    def trace(request: Request) -> Response:
        found = _timeline(timelines, request, scope_of)
        if found is None:
            return _unknown(request)
        name = re.sub(r"[^A-Za-z0-9._-]+", "-", found.program_id)[:_MOST_LETTERS].strip("-.") or "program"
        file = f'attachment; filename="{name}.perfetto-trace.json"'
        return _json(perfetto([(found, 0.0)]), headers={"content-disposition": file})

    return [
        Route("/", root),
        Route("/weft", index),
        Route("/weft/", without_slash),
        *(Route(f"/weft/page/{name}", partial(_file, name)) for name in sorted(ASSETS)),
        Route("/weft/programs/{program_id:path}/timeline", timeline),
        Route("/weft/programs/{program_id:path}/perfetto", trace),
    ]


def _file(name: str, _request: Request) -> Response:
    return asset(name)


def _timeline(timelines: Timelines, request: Request, scope_of: Callable[[Request], str]) -> Timeline | None:
    scope = scope_of(request)
    return timelines.timeline(ProgramId(f"{scope}{request.path_params['program_id']}"), scope)


def _json(data: dict[str, Any], status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Answer with JSON in ASCII, because a name from a client may not be valid Unicode."""
    return Response(json.dumps(data), status, media_type="application/json", headers=headers)


def _unknown(request: Request) -> Response:
    program_id = request.path_params["program_id"]
    message = f"no program {program_id!r:.80} of yours is open, or among the newest that have ended."
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": "program_unknown"}
    return _json({"error": error}, 404)
