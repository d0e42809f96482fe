"""The bodies of requests: bounds on those that are still arriving, and how large ones are read.

Their bytes are held before a request is admitted. One call into C holds Python's lock for as long as it takes, which is
milliseconds for each MiB. So that other threads go on, large JSON is checked in steps, and read without the middle of
its longest texts.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from weft.core.errors import ArrivingError, InvalidRequestError

BODY_S: Final = 60.0  # until a body is complete; as long as a head has
_MOST_BODIES: Final = 1024
_MOST_BYTES: Final = 512 << 20
_LARGEST_BODIES: Final = 8  # so many of the largest size may arrive at once, even if that is more
_SHARES: Final = 2  # one sender may hold a half of all, so that the others' requests still arrive
LARGE_BYTES: Final = 512 << 10  # of a body; larger ones are read on another thread
_STEP_BYTES: Final = 64 << 10
_KEPT: Final = 4  # steps of a long text, of its beginning and of its end: it is in large bodies only
# What may go on in the next step: a character in UTF-8, an escape, a pair of them.
_OPEN: Final = re.compile(
    rb"(?:[\xc0-\xff][\x80-\xbf]{0,2}|(?:\\u[dD][89abAB][0-9a-fA-F]{2})?(?:\\(?:u[0-9a-fA-F]{0,3})?)?)\Z"
)
_ESCAPE: Final = re.compile(rb"\\u[dD][89a-fA-F]")  # may be of half a pair
_HALF: Final = re.compile(  # the escape of half of a surrogate pair
    rb"\\u[dD](?:[89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])"
    rb"|[c-fC-F](?<!\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD].)[0-9a-fA-F]{2})"
)


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
    def body(self, sender: str) -> Iterator[bytearray]:
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
        body = bytearray()  # those bytes that were held
        try:
            yield body
        finally:
            self._all_bytes -= len(body)
            self._bytes[sender] -= len(body)
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


def read_json(body: bytes, changed: tuple[str, ...] = ()) -> Any:
    """The JSON in a body. In large ones, texts of more than 576 KiB have a digest in place of their middle. This does
    not hold for an object with one of the members `changed`, which is written again.

    Raises:
        InvalidRequestError: It is not in UTF-8, or has half of a surrogate pair. Python takes both, and nothing behind
            this place could send them on.
        ValueError, RecursionError: It has no JSON.
    """
    encoding = json.detect_encoding(body)
    wrong = [] if encoding.startswith("utf-8") else [f"the request's JSON is in {encoding}."]
    if len(body) <= LARGE_BYTES or wrong:
        read = json.loads(body)
        wrong = wrong or _wrong_in(body, 0)
    else:
        read = json.loads(b"".join(_cut(body, wrong)))
    if wrong:
        raise InvalidRequestError(f"{wrong[0]} Send text in UTF-8.")
    return json.loads(body) if isinstance(read, dict) and any(name in read for name in changed) else read


def _cut(body: bytes, wrong: list[str]) -> Iterator[bytes]:
    """The parts of a body, less the middles of long texts. A text that is longer than a step begins one, so that it is
    cut in the same places wherever it stands. What is no Unicode goes into `wrong`."""
    inside: list[bytes] = []  # steps of a text, without its beginning and its end
    place, is_inside = 0, False
    while place < len(body):
        step = body[place : place + _STEP_BYTES]
        plain = step.replace(rb"\\", b"__")
        if place + len(step) < len(body):
            plain = plain[:-16] + _OPEN.sub(b"", plain[-16:], 1)
        wrong += _wrong_in(step[: len(plain)], place)
        plain = plain.replace(rb"\"", b"__")
        quotes = plain.count(b'"')
        goes_on = is_inside and not quotes
        is_inside ^= quotes % 2 > 0
        inside.append(step[: plain.rfind(b'"') + 1 if is_inside and quotes else len(plain)])
        place += len(inside[-1])
        if not goes_on or place == len(body):
            last = inside.pop()
            digest = hashlib.blake2b(digest_size=16)
            for each in (middle := inside[_KEPT:-_KEPT]):
                digest.update(each)
            yield from (*inside[:_KEPT], digest.hexdigest().encode(), *inside[-_KEPT:]) if middle else inside
            yield last
            inside.clear()


def _wrong_in(step: bytes, place: int) -> list[str]:
    """What is no Unicode in the bytes at a place.

    Raises:
        UnicodeDecodeError: It is no text at all.
    """
    try:
        step.decode()
    except UnicodeDecodeError as error:
        step.decode("utf-8", "surrogatepass")
        return [f"the request's JSON is no UTF-8: byte {place + error.start} is {step[error.start]:#04x}."]
    found = _HALF.search(step.replace(rb"\\", b"__")) if _ESCAPE.search(step) else None
    half = found[0].decode().lower() if found else ""
    return [f"the request has half of a surrogate pair, '{half}', which is no Unicode text."] if half else []
