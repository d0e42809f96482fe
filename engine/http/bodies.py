"""The bodies of requests: bounds on those that are still arriving, and how large ones are read.

Their bytes are held before a request is admitted. One call into C holds Python's lock for as long as it takes, which is
milliseconds for each MiB. So that other threads go on, large JSON is read in steps, and without the middle of its
longest texts.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import numpy as np

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
_MOST_LEVELS: Final = 1000  # of lists and objects, as in Python's own reader
_MOST_CONTAINERS: Final = 50_000  # lists and objects of a large body: Python's collector looks at all of them at once
_CHANGES: Final = np.zeros(256, np.int8)  # of the level
_CHANGES[list(b"[{")], _CHANGES[list(b"]}")] = 1, -1
_CLOSING: Final = bytes.maketrans(b"[{", b"]}")
_MARK: Final = secrets.token_hex(8)  # stands for what was read before, and at the end of what goes on
_FIRST: Final = b'{"%s":' % _MARK.encode()
_MARKED: Final = {b"[": b',"%s"' % _MARK.encode(), b"{": b',"%s":"%s"' % (_MARK.encode(), _MARK.encode())}
_ESCAPE: Final = re.compile(rb"\\u[dD][89a-fA-F]")  # may be of half a pair
_HALF: Final = re.compile(  # the escape of half of a surrogate pair
    rb"\\u[dD](?:[89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])"
    rb"|[c-fC-F](?<!\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD].)[0-9a-fA-F]{2})"
)


class Arrivals:
    """Counts the bodies that are arriving, and their bytes, by sender and in all. Use it on the server's event loop.

    Args:
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
        return self._all_bytes

    @contextmanager
    def body(self, sender: str) -> Iterator[bytearray]:
        """A body begins to arrive from a sender, the scope of its API key. When the block is left, it is complete or
        given up, and counts no longer. Raises ArrivingError if too many are arriving."""
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
        """Count bytes that have arrived. Raises ArrivingError if they would be too many."""
        if self._all_bytes + count > self._most_bytes:
            raise ArrivingError(f"{self._all_bytes} bytes", "this server")
        if self._bytes[sender] + count > self._most_bytes // _SHARES:
            raise ArrivingError(f"{self._bytes[sender]} bytes", "this client")
        self._all_bytes += count
        self._bytes[sender] += count


def read_json(body: bytes | bytearray, changed: tuple[str, ...] = ()) -> Any:
    """The JSON in a body. In large ones, texts of more than 576 KiB have a digest in place of their middle. This does
    not hold for an object with one of the members `changed`, which is written again.

    Raises:
        InvalidRequestError: It is not in UTF-8, or has half of a surrogate pair. Python takes both, and nothing behind
            this place could send them on. Or it is large and has too many lists and objects.
        ValueError, RecursionError: It has no JSON.
    """
    encoding = json.detect_encoding(body)
    wrong = [] if encoding.startswith("utf-8") else [f"the request's JSON is in {encoding}."]
    if len(body) <= LARGE_BYTES or encoding != "utf-8":
        read = json.loads(body)
        wrong = wrong or _wrong_in(body, 0)
    else:
        read = _joined(_pieces(body, wrong))
    if wrong:
        raise InvalidRequestError(f"{wrong[0]} Send text in UTF-8.")
    is_changed = isinstance(read, dict) and any(name in read for name in changed)
    return json.loads(body) if read is None or is_changed else read


def release(held: list[Any]) -> None:
    """Free the JSON values in a list one after the other. Python frees one with all that is in it at once."""
    for each in held:
        inside = each.values() if isinstance(each, dict) else each if isinstance(each, list) else ()
        held.extend(value for value in inside if isinstance(value, dict | list))
    held.reverse()  # what is in others, after them
    while held:
        held.pop()


class _Piece(NamedTuple):
    text: bytes
    shared: int  # so many of the containers that were open at its beginning are still open at its end
    opened: bytes  # the brackets of all containers that are open at its end, in a list of the whole body


def _pieces(body: bytes | bytearray, wrong: list[str]) -> Iterator[_Piece]:
    """The parts of a body between commas, less the middles of long texts. A text that is longer than a step begins one,
    so that it is cut in the same places wherever it stands. What is no Unicode goes into `wrong`."""
    parts: list[bytes | bytearray] = []
    inside: list[bytes | bytearray] = []  # steps of a text, without its beginning and its end
    place, is_inside, shared, opened, containers = 0, False, 1, b"[", 0
    while place < len(body):
        step = body[place : place + _STEP_BYTES]
        plain = step.replace(rb"\\", b"__")
        if place + len(step) < len(body):
            plain = plain[:-16] + _OPEN.sub(b"", plain[-16:], 1)
        plain = plain.replace(rb"\"", b"__")
        quotes = plain.count(b'"')
        was_inside, is_inside = is_inside, is_inside ^ (quotes % 2 > 0)
        step, comma = step[: plain.rfind(b'"') + 1 if is_inside and quotes else len(plain)], 0
        if was_inside and not quotes and place + len(step) < len(body):
            inside.append(step)
        else:
            data = np.frombuffer(plain, np.uint8)[: len(step)]
            is_outside = (np.cumsum(data == ord('"'), dtype=np.int32) + was_inside) % 2 == 0
            changes = _CHANGES[data] * is_outside
            depths = np.cumsum(changes, dtype=np.int32)
            commas = np.flatnonzero((data == ord(",")) & is_outside)[::-1]
            if len(commas):  # the last of those that are in the fewest containers, in the second half if it has any
                commas = commas[commas >= min(len(step) // 2, commas[0])]
                step, comma, is_inside = step[: commas[depths[commas].argmin()]], 1, False
            changes, depths = changes[: len(step)], depths[: len(step)]
            containers += int(np.count_nonzero(changes > 0))
            least = np.minimum.accumulate(depths[::-1])[::-1]  # from there to the end
            low = len(opened) + min([0, *least[:1].tolist()])
            shared = min(shared, low)
            opened = opened[:low] + data[: len(step)][(changes > 0) & (depths == least)].tobytes()
            if low < 1 or (comma and len(opened) < 2):
                raise ValueError("a bracket or a comma is outside of all containers")
            if len(opened) > _MOST_LEVELS:
                raise RecursionError
            if containers > _MOST_CONTAINERS:
                raise InvalidRequestError(
                    f"the request has more than {_MOST_CONTAINERS} lists and objects. Send fewer."
                )
            if middle := inside[_KEPT:-_KEPT]:
                digest = hashlib.blake2b(digest_size=16)
                for each in middle:
                    digest.update(each)
                inside[_KEPT:-_KEPT] = [digest.hexdigest().encode()]
            parts += [*inside, step]
            inside.clear()
        wrong += _wrong_in(step, place)
        place += len(step) + comma
        if comma or place == len(body):
            yield _Piece(b"".join(parts), shared, opened)
            parts.clear()
            shared = len(opened)


def _joined(pieces: Iterable[_Piece]) -> Any:
    """What is in the pieces together; None if that is not clear, because an object has one name twice. Each piece is
    read by itself, inside of the containers that are open there."""
    path: list[Any] = [[]]  # the containers that are open
    whole, before = path[0], b"["
    for text, shared, opened in pieces:
        if text.lstrip()[:1] in (b"", b"]", b"}"):
            raise ValueError("nothing is behind a comma")
        mark = b"" if len(opened) == shared else _MARKED[opened[-1:]]
        begin = before[:-1].replace(b"{", _FIRST) + before[-1:]
        node = json.loads(b"".join((begin, text, mark, opened[::-1].translate(_CLOSING))))
        last = node
        for level, held in enumerate(path):
            child = node.pop(0 if isinstance(node, list) else _MARK) if level + 1 < len(path) else None
            held.extend(node) if isinstance(held, list) else held.update(node)
            last = node if level < shared else last
            node = child
        del path[shared:]
        while len(path) < len(opened):
            path.append(last := _last_in(last))
        if mark and _last_in(last) != _MARK:
            return None
        if mark:
            last.pop(-1 if isinstance(last, list) else _MARK)
        before = opened
    if len(path) > 1:
        raise ValueError("a list or an object has no end")
    return whole[0]


def _last_in(container: Any) -> Any:
    found = container.values() if isinstance(container, dict) else container if isinstance(container, list) else ()
    return next(reversed(found), None)


def _wrong_in(step: bytes | bytearray, place: int) -> list[str]:
    """What is no Unicode in the bytes at a place. Raises UnicodeDecodeError if it is no text at all."""
    try:
        step.decode()
    except UnicodeDecodeError as error:
        step.decode("utf-8", "surrogatepass")
        return [f"the request's JSON is no UTF-8: byte {place + error.start} is {step[error.start]:#04x}."]
    found = _HALF.search(step.replace(rb"\\", b"__")) if _ESCAPE.search(step) else None
    half = found[0].decode().lower() if found else ""
    return [f"the request has half of a surrogate pair, '{half}', which is no Unicode text."] if half else []
