"""The files of the page, and how they are served."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from starlette.responses import Response

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
    """A file of the page."""
    return _response(name, (_FOLDER / name).read_bytes())


def page(*, needs_key: bool, has_models: bool) -> Response:
    """The page itself, which tells its script whether the server wants a key, and whether it takes calls."""
    marks = b"<html " + b"data-needs-key " * needs_key + b"data-has-models " * has_models
    return _response(PAGE, (_FOLDER / PAGE).read_bytes().replace(b"<html ", marks, 1))


def _response(name: str, data: bytes) -> Response:
    return Response(data, media_type=_KINDS[Path(name).suffix], headers=_HEADERS)
