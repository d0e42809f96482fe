"""An engine that listens: its state over HTTP, for `weft top`, from the process that made the engine.

The routes are like those of `weft serve`. Those who connect can see and end all programs.
"""

from __future__ import annotations

import asyncio
import ipaddress
import os
import socket
import stat
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast
from urllib.parse import urlsplit

from weft.core.errors import EngineClosedError, ListenError, MissingPackageError
from weft.core.ids import ProgramId
from weft.core.program.state import nothing
from weft.core.show.keeper import Timelines
from weft.engine.processes.fork import not_in_forks
from weft.engine.processes.loop_thread import LoopThread
from weft.engine.watch.reader import LiveReader, WatchedEngine

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.types import ASGIApp, Receive, Scope, Send

_STOP_S: Final = 5.0
_MOST_CONNECTIONS: Final = 64


class Listener:
    """Serves an engine's state over HTTP, without keeping the engine alive. Raises ListenError if the address is no
    loopback address and no unix socket. Raises MissingPackageError if Starlette or uvicorn are not installed."""

    def __init__(self, listen: str) -> None:
        self._address = parse(listen)
        check_packages()
        self._bound: Bound | None = None
        self._loop: LoopThread | None = None
        self._server: _Server | None = None
        self._close: Callable[[], object] = nothing

    @property
    def url(self) -> str | None:
        """Where it listens, in the form that `weft top` takes; None before `bind`."""
        return self._bound.url if self._bound is not None else None

    def bind(self) -> None:
        """Listen from now on, or raise ListenError. Those who connect wait until `serve`."""
        self._bound = bind(self._address)
        self._close = weakref.finalize(self, not_in_forks(Bound.close), self._bound)
        _listeners.add(self)

    def serve(self, engine: WatchedEngine, loop: LoopThread) -> None:
        """Serve the state of an engine on its event loop from now on."""
        alive = cast("WatchedEngine", weakref.proxy(engine))
        # Methods of the proxy, if they were taken off it here, would keep the engine.
        timelines = Timelines(lambda program_id: alive.row(program_id), lambda: alive.now_s())  # noqa: PLW0108
        engine.observe(timelines)
        app = make_app(LiveReader(alive), alive, timelines, checks_host=self._address.path is None)
        if self._bound is not None:
            self._loop, self._server = loop, _Server(app, self._bound)
            loop.submit(self._server.begin()).result()

    def stop(self) -> None:
        """Stop serving, and remove the file of a unix socket. A second call changes nothing."""
        if self._loop is not None and self._server is not None:
            with suppress(TimeoutError, EngineClosedError):  # the loop hangs, or has ended
                self._loop.submit(self._server.end()).result(_STOP_S)
        self._close()

    def forget(self) -> None:
        """Close the socket in a forked child, which does not serve."""
        if self._bound is not None:
            close_in_fork(self._bound)


class _Server:
    """Serves an application.

    uvicorn's own server would look around ten times a second, and configure the loggers of the process, which are its
    user's. So this takes its protocol only.
    """

    def __init__(self, app: ASGIApp, bound: Bound) -> None:
        import uvicorn
        from uvicorn.server import ServerState

        config = uvicorn.Config(app, log_config=None, lifespan="off", ws="none", limit_concurrency=_MOST_CONNECTIONS)
        config.load()
        make: Any = config.http_protocol_class
        self._make = partial(make, config, app_state={})
        self._state = ServerState()
        self._bound = bound
        self._server: asyncio.Server | None = None

    async def begin(self) -> None:
        """Take connections from now on."""
        self._server = await asyncio.get_running_loop().create_server(self._connect, sock=self._bound.socket)

    def _connect(self) -> asyncio.Protocol:
        protocol = self._make(server_state=self._state)
        protocol.access_log = False  # a line a second for each viewer
        return cast("asyncio.Protocol", protocol)

    async def end(self) -> None:
        """Take no more connections, and close those that are open."""
        if self._server is not None:
            self._server.close()
        for connection in list(self._state.connections):
            cast("Any", connection).transport.abort()


_listeners: Final[weakref.WeakSet[Listener]] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for listener in list(_listeners):
        listener.forget()


os.register_at_fork(after_in_child=_after_fork_in_child)


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


# -- where an engine listens: a unix socket, or a port of this host


UNIX: Final = "unix:"
_CONNECT_S: Final = 1.0
_BACKLOG: Final = 64
_MOST_PORTS: Final = 2**16


class Address(NamedTuple):
    """Where to listen."""

    text: str  # as it was given
    path: Path | None = None  # of a unix socket
    host: ipaddress.IPv4Address | ipaddress.IPv6Address | None = None
    port: int = 0


class Bound(NamedTuple):
    """A socket that listens."""

    socket: socket.socket
    url: str  # "unix:/run/weft.sock" or "http://127.0.0.1:8001"
    path: Path | None = None  # of a unix socket
    inode: int = 0  # of that file

    def close(self) -> None:
        """Close the socket, and remove its file unless another engine's file is there by now."""
        self.socket.close()
        if self.path is not None:
            with suppress(OSError):
                if self.path.stat().st_ino == self.inode:
                    self.path.unlink()


def parse(listen: str) -> Address:
    """Read an address.

    Args:
        listen: "unix:/path", or "127.0.0.1:8001" with the address of a loopback interface; port 0 is any free one.

    Raises:
        ListenError: The text is neither, or the address is not that of a loopback interface.
    """
    if listen.startswith(UNIX):
        path = Path(listen.removeprefix(UNIX))
        if not path.is_absolute():
            raise ListenError(listen, "the path of a unix socket begins with a slash.")
        return Address(listen, path)
    host, _, port = listen.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    try:
        address = ipaddress.ip_address("127.0.0.1" if host == "localhost" else host)
        number = int(port) if port.isascii() and port.isdigit() else _MOST_PORTS
    except ValueError:
        number = _MOST_PORTS
    if number >= _MOST_PORTS:
        raise ListenError(listen, 'it is neither "unix:/path" nor an address with a port.')
    if not address.is_loopback:
        raise ListenError(listen, "it is no loopback address, and there is no authentication.")
    return Address(listen, None, address, number)


def bind(address: Address) -> Bound:
    """Listen at an address. Raises ListenError if it is in use, or this process may not listen there."""
    is_v6 = address.host is not None and address.host.version == 6
    family = socket.AF_UNIX if address.path is not None else socket.AF_INET6 if is_v6 else socket.AF_INET
    bound = socket.socket(family)
    try:
        if address.path is not None:
            _remove_stale(address, address.path)
            bound.bind(str(address.path))
            inode = address.path.stat().st_ino
            address.path.chmod(stat.S_IRUSR | stat.S_IWUSR)  # before it listens, so nobody else can have connected
            bound.listen(_BACKLOG)
            return Bound(bound, f"{UNIX}{address.path}", address.path, inode)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((str(address.host), address.port))
        bound.listen(_BACKLOG)
        host = f"[{address.host}]" if is_v6 else str(address.host)
        return Bound(bound, f"http://{host}:{bound.getsockname()[1]}")
    except BaseException as error:
        bound.close()
        if isinstance(error, OSError):
            raise ListenError(address.text, f"{error.strerror or error}.") from error
        raise


def _remove_stale(address: Address, path: Path) -> None:
    """Remove the socket file of an engine that was killed."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise ListenError(address.text, "the file is there, and is no socket.")
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(_CONNECT_S)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
            return
        except OSError:  # it is there, and busy
            pass
    raise ListenError(address.text, "another process listens there.")


def close_in_fork(bound: Bound) -> None:
    """Close a forked child's copy of the socket, which would otherwise stay open without anyone to answer."""
    with suppress(OSError):
        os.close(bound.socket.detach())
