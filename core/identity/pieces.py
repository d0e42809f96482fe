"""Finds pieces of known texts inside other texts, wherever they stand there.

A text is *folded*: without white space, quotes, and marks that clients add or drop. Its *pieces* are runs of 24 folded
bytes that are chosen by their hash (winnowing: Schleimer et al., SIGMOD 2003), so that the same pieces are chosen
wherever the text stands. Of each 55 bytes that two texts have in common, at least two pieces are found in both.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Final, Generic, TypeVar

import numpy as np
import numpy.typing as npt

PIECE: Final = 24  # folded bytes
_WINDOW: Final = 16  # runs, of which one piece is chosen
_CHUNK: Final = 1 << 16  # bytes that are hashed at once
_UNSAID: Final = b" \t\r\n\\\"'`>*_"
_POWERS: Final = {length: np.uint32(pow(0x9E3779B1, length, 1 << 32)) for length in (1, 2, 4, 8)}
_BITS: Final = 24  # of what was told
_MOST_TOLD: Final = 1_000_000  # pieces, of a generation
_MOST_OF_A_GROUP: Final = 8
_BYTES: Final = np.random.default_rng(0).integers(0, 1 << 32, 256, dtype=np.uint32)

Values = npt.NDArray[np.uint32]
R = TypeVar("R")


def folded(text: str) -> bytes:
    """A text without what changes when clients quote it: white space, escapes, quotes and marks of Markdown."""
    return text.replace("\\n", "").encode("utf-8", "surrogatepass").translate(None, _UNSAID)


def pieces_of(text: bytes) -> Values:
    """The hashes of the pieces of a folded text, in their order."""
    overlap = PIECE + _WINDOW - 2
    begins = range(0, max(1, len(text) - overlap), _CHUNK)
    found = [_chosen(_hashes(text[begin : begin + _CHUNK + overlap])) for begin in begins]
    return found[0] if len(found) == 1 else np.concatenate(found)


def placed_pieces_of(text: bytes) -> tuple[Values, list[int]]:
    """The pieces of a short folded text, and where in it they are."""
    hashes = _hashes(text)
    values = _chosen(hashes)
    places: list[int] = (hashes[None, :] == values[:, None]).argmax(axis=1).tolist() if len(values) else []
    return values, places


def span_of(text: bytes, keys: list[int]) -> tuple[int, int]:
    """Where the first and the last one of the pieces with these keys begin in a folded text; its end if one is not
    there."""
    hashes = _hashes(text)
    found = (np.flatnonzero(hashes == np.uint32(key & 0xFFFFFFFF)).tolist() for key in keys)
    places = [next(iter(each), len(text)) for each in found]
    return min(places), max(places)


def _hashes(text: bytes) -> Values:
    """The hashes of all runs of 24 bytes."""
    data = np.frombuffer(text, np.uint8)
    if len(data) < PIECE:
        return np.empty(0, np.uint32)
    runs = {1: _BYTES[data]}  # by their length
    for length in (1, 2, 4, 8):
        runs[2 * length] = runs[length][:-length] * _POWERS[length] + runs[length][length:]
    hashes = runs[16][:-8] * _POWERS[8] + runs[8][16:]
    hashes ^= hashes >> np.uint32(15)
    hashes *= np.uint32(0x2C1B3C6D)
    hashes ^= hashes >> np.uint32(13)
    return hashes


def _chosen(hashes: Values) -> Values:
    """The smallest hash of each window, once for the windows that follow each other and have it in common."""
    least, size = hashes, 1
    while size < _WINDOW and len(least) > size:
        least = np.minimum(least[:-size], least[size:])
        size *= 2
    if not len(least):
        return least
    is_new = np.empty(len(least), np.bool_)
    is_new[0] = True
    np.not_equal(least[1:], least[:-1], out=is_new[1:])
    return least[is_new]


class Told:
    """Which pieces were in requests lately, of each scope.

    It remembers a million pieces of a scope at least, in 4 MiB. It takes at most one piece of eight for told that was
    not.
    """

    def __init__(self) -> None:
        self._bits: dict[str, list[npt.NDArray[np.uint8]]] = {}
        self._counts: dict[str, int] = {}

    def add(self, scope: str, values: Values) -> npt.NDArray[np.bool_]:
        """Note pieces of a request. Returns which of them were told before."""
        known = self.has(scope, values)
        new = values[~known] >> np.uint32(32 - _BITS)
        if len(new):
            count = self._counts.get(scope, 0)
            if count + len(new) > _MOST_TOLD or scope not in self._bits:
                self._bits[scope] = [np.zeros(1 << (_BITS - 3), np.uint8), *self._bits.get(scope, ())[:1]]
                count = 0
            self._counts[scope] = count + len(new)
            np.bitwise_or.at(self._bits[scope][0], new >> np.uint32(3), _bit(new))
        return known

    def has(self, scope: str, values: Values) -> npt.NDArray[np.bool_]:
        """Which pieces were told."""
        places = values >> np.uint32(32 - _BITS)
        known = np.zeros(len(values), np.bool_)
        for bits in self._bits.get(scope, ()):
            known |= (bits[places >> np.uint32(3)] & _bit(places)) > 0
        return known


def _bit(places: Values) -> npt.NDArray[np.uint8]:
    return np.left_shift(np.uint8(1), (places & np.uint32(7)).astype(np.uint8))


class Index(Generic[R]):
    """Finds what was put under pieces. Pieces that were put for several things find none of them."""

    def __init__(self) -> None:
        self._found: dict[int, R | int] = {}  # a thing, or how many there are

    def __contains__(self, key: int) -> bool:
        return key in self._found

    def put(self, keys: Iterable[int], thing: R) -> None:
        """Put a thing under keys; `drop` follows with the same keys."""
        for key in keys:
            known = self._found.get(key)
            self._found[key] = thing if known is None else known + 1 if isinstance(known, int) else 2

    def drop(self, keys: Iterable[int]) -> None:
        """Forget a thing that was put under keys."""
        for key in keys:
            known = self._found.get(key)
            if isinstance(known, int) and known > 1:
                self._found[key] = known - 1  # what is left of two is not taken for the only one
            else:
                self._found.pop(key, None)

    def get(self, key: int) -> R | None:
        """Return what was put under a key, or None if that is nothing or several things."""
        known = self._found.get(key)
        return None if isinstance(known, int) else known

    def among(self, keys: Collection[int]) -> dict[int, R]:
        """What was put under each of some keys, without those that find nothing."""
        found = ((key, self.get(key)) for key in self._found.keys() & keys)  # in C, because most are not there
        return {key: thing for key, thing in found if thing is not None}


class Groups(Generic[R]):
    """Finds what was put under pieces last, up to eight things for each."""

    def __init__(self) -> None:
        self._found: dict[int, list[R]] = {}

    def put(self, keys: Iterable[int], thing: R) -> None:
        """Put a thing under keys; `drop` follows with the same keys."""
        for key in keys:
            group = self._found.setdefault(key, [])
            group.append(thing)
            del group[:-_MOST_OF_A_GROUP]

    def drop(self, keys: Iterable[int], thing: R) -> None:
        """Forget a thing."""
        for key in keys:
            group = self._found.get(key, [])
            if thing in group:
                group.remove(thing)
                if not group:
                    del self._found[key]

    def all(self, keys: Collection[int]) -> list[R]:
        """The things under any of the keys, each once."""
        known = self._found.keys() & keys  # in C, because most are not there
        return list({id(thing): thing for key in known for thing in self._found[key]}.values())


def keys_of(scope: str, values: Values) -> list[int]:
    """The keys of pieces in an index of all scopes."""
    base = np.uint64((hash(scope) & 0x7FFFFFFF) << 32)
    found: list[int] = (values.astype(np.uint64) | base).tolist()
    return found
