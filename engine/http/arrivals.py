"""Bounds on the bodies of requests that are still arriving: their bytes are held before a request is admitted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from weft.core.errors import ArrivingError

BODY_S: Final = 60.0  # until a body is complete; as long as a head has
_MOST_BODIES: Final = 1024
_MOST_BYTES: Final = 512 << 20
_LARGEST_BODIES: Final = 8  # so many of the largest size may arrive at once, even if that is more
_SHARES: Final = 2  # one sender may hold a half of all, so that the others' requests still arrive


class Arrivals:
    """Counts the bodies that are arriving, and their bytes, by sender and in all. Use it on the server's event loop.

    Args:
        max_body_bytes: The largest body that the server takes.
        body_s: Seconds within which a body must be complete.
        most_bodies: How many bodies may arrive at once. One sender may have half of them.
        most_bytes: How many bytes of them may be held; None: 512 MiB, or 8 of the largest bodies if that is more.
            One sender may hold half of them.
    """

    def __init__(
        self,
        max_body_bytes: int,
        *,
        body_s: float = BODY_S,
        most_bodies: int = _MOST_BODIES,
        most_bytes: int | None = None,
    ) -> None:
        self.body_s = body_s
        self._most_bodies = most_bodies
        self._most_bytes = max(_MOST_BYTES, _LARGEST_BODIES * max_body_bytes) if most_bytes is None else most_bytes
        self._bodies: Counter[str] = Counter()  # by sender; it holds no sender of whom nothing arrives
        self._bytes: Counter[str] = Counter()
        self._all_bytes = 0

    def __len__(self) -> int:
        return self._bodies.total()

    @property
    def held_bytes(self) -> int:
        """The bytes of all bodies that are arriving."""
        return self._all_bytes

    @contextmanager
    def body(self, sender: str) -> Iterator[ArrivingBody]:
        """A body begins to arrive. When the block is left, it is complete or given up, and counts no longer.

        Args:
            sender: Who sends it: the scope of the API key.

        Raises:
            ArrivingError: Too many bodies are arriving.
        """
        if len(self) >= self._most_bodies:
            raise ArrivingError(f"{len(self)} requests", "this server")
        if self._bodies[sender] >= max(1, self._most_bodies // _SHARES):
            raise ArrivingError(f"{self._bodies[sender]} requests", "this client")
        self._bodies[sender] += 1
        body = ArrivingBody(self, sender)
        try:
            yield body
        finally:
            self._all_bytes -= len(body.data)
            self._bytes[sender] -= len(body.data)
            self._bodies[sender] -= 1
            if not self._bodies[sender]:
                del self._bodies[sender], self._bytes[sender]

    def hold(self, sender: str, count: int) -> None:
        """Count bytes that have arrived.

        Raises:
            ArrivingError: They would be too many.
        """
        if self._all_bytes + count > self._most_bytes:
            raise ArrivingError(f"{self._all_bytes} bytes", "this server")
        if self._bytes[sender] + count > self._most_bytes // _SHARES:
            raise ArrivingError(f"{self._bytes[sender]} bytes", "this client")
        self._all_bytes += count
        self._bytes[sender] += count


class ArrivingBody:
    """What has arrived of one body.

    Attributes:
        data: Its bytes so far.
    """

    def __init__(self, arrivals: Arrivals, sender: str) -> None:
        self.data = bytearray()
        self._arrivals = arrivals
        self._sender = sender

    def add(self, piece: bytes) -> None:
        """The next piece is there.

        Raises:
            ArrivingError: The server holds too many bytes of unfinished requests.
        """
        self._arrivals.hold(self._sender, len(piece))
        self.data += piece
