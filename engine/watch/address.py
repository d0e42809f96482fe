"""Where an engine listens: a unix socket, or a port of this host."""

from __future__ import annotations

import ipaddress
import os
import socket
import stat
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

from weft.core.errors import ListenError

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
