"""What web pages may ask of a server without API keys.

A browser on the server's machine, or in its network, reaches the server for any page that it shows. The page of a
stranger could make calls, read programs and end them. It can do so in two ways: by a request to the server's address,
which has the page's origin in `Origin`; and by a name of its own that is made to mean the server's address, which then
is in `Host` (DNS rebinding).
"""

from __future__ import annotations

import ipaddress
import json
import socket
from collections.abc import Callable, Collection
from http import HTTPStatus
from typing import Final
from urllib.parse import urlsplit

from weft.core.routing.refusals import Refused
from weft.engine.server.check_ids import App, Receive, Scope, Send
from weft.engine.server.http_errors import error_for

# Nobody can buy a name that ends in one of these.
_PRIVATE: Final = frozenset({"localhost", "local", "internal", "lan", "arpa", "test", "example", "invalid"})


class RefuseForeignPages:
    """Refuses requests of other sites' pages. Clients that are no browser send no `Origin`, and pass.

    Args:
        app: The application.
        host: The name or address at which the server listens, if there is one.
        origins: Other origins whose pages are trusted, as in vLLM's `--allowed-origins`. Its default "*" trusts none.
        on_refused: Is told of requests that are refused.
    """

    def __init__(
        self, app: App, host: str | None, origins: Collection[str], *, on_refused: Callable[[Refused], None]
    ) -> None:
        self._app = app
        self._names = {name.lower() for name in (host, socket.gethostname()) if name}
        self._origins = frozenset(origins)
        self._on_refused = on_refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        message = self._reason(scope) if scope["type"] in ("http", "websocket") else None
        if message is None:
            await self._app(scope, receive, send)
            return
        self._on_refused(Refused.FOREIGN_PAGE)
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})  # before it was accepted: status 403
            return
        body = json.dumps(error_for(scope["path"], HTTPStatus.FORBIDDEN, message, "foreign_page")).encode()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),  # the body is not read
        ]
        await send({"type": "http.response.start", "status": HTTPStatus.FORBIDDEN, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    def _reason(self, scope: Scope) -> str | None:
        """Why a request is refused; None if it passes."""
        headers: dict[bytes, bytes] = {}
        for name, value in scope["headers"]:
            headers.setdefault(name, value)
        host = headers.get(b"host", b"").decode("latin-1")
        if host and not self._is_ours(host):
            return (
                f"this server has no API keys, so it does not answer to the name {host!r:.80}, which a web page "
                "may have made to mean it. Use its address, give its name as --host, or start it with --api-key."
            )
        origin = headers.get(b"origin", b"").decode("latin-1")
        if origin and not self._is_trusted(origin, host):
            return (
                f"this server has no API keys, so it takes no requests of pages of {origin!r:.80}. Name that origin in "
                "--allowed-origins, or start the server with --api-key."
            )
        return None

    def _is_ours(self, host: str) -> bool:
        """Whether a host is an address, or a name that no stranger can own."""
        name = _name_of(host)
        return name is not None and (
            _is_address(name) or "." not in name or name in self._names or name.rpartition(".")[2] in _PRIVATE
        )

    def _is_trusted(self, origin: str, host: str) -> bool:
        """Whether an origin is this server's own, one of this machine, no web page's, or one that is listed."""
        scheme, separator, place = origin.partition("://")
        if origin in self._origins or (separator and scheme not in ("http", "https")):
            return True
        name = _name_of(place)
        is_local = name == "localhost" or (
            name is not None and _is_address(name) and ipaddress.ip_address(name).is_loopback
        )
        return bool(separator) and (is_local or place.lower() == host.lower())


def _name_of(host: str) -> str | None:
    """The name or address in the value of a `Host` header, in lower case; None: it makes no sense."""
    try:
        name = urlsplit(f"//{host}").hostname
    except ValueError:
        return None
    return name.removesuffix(".") if name else None


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
