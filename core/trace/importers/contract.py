"""What an importer of a trace format is, and the caps that all importers obey."""

from __future__ import annotations

import itertools
import math
from array import array
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from weft.core.errors import TraceError
from weft.core.trace.format import TraceProgram
from weft.core.trace.prefixes import common_prefix


@dataclass(frozen=True, slots=True)
class ImportOptions:
    """Caps on what is imported, all above 0 (TraceError). A call beyond a cap is left out, and so are all calls that
    follow it."""

    max_context_tokens: float = math.inf  # of prompt and output of a call
    max_turns: float = math.inf  # calls of a program
    gap_cap_s: float = math.inf  # a longer gap is cut to this
    ends_unknown: bool = False  # say of all programs that nobody tells when they end

    def __post_init__(self) -> None:
        for name in ("max_context_tokens", "max_turns"):
            if not getattr(self, name) >= 1:
                raise TraceError(f"{name} is {getattr(self, name)}; give at least 1.")
        if not self.gap_cap_s >= 0:
            raise TraceError(f"gap_cap_s is {self.gap_cap_s}; give seconds, 0 or more.")


class BlockScope:
    """Numbers the blocks of prompts. Two blocks get the same number if they and all blocks before them are the same."""

    def __init__(self, counter: Iterator[int]) -> None:
        self._counter = counter
        self._known: dict[tuple[int, Hashable], int] = {}  # by the number of the block before
        self._last: list[Hashable] = []  # the ids given last, which most often begin the next ones
        self._last_numbers = array("q")

    def numbers(self, ids: Sequence[Hashable]) -> array[int]:
        """Return a number for each block of a prompt.

        `ids` are what the format calls each of its blocks, from the first one on.
        """
        ids = list(ids)
        found = self._last_numbers[: common_prefix(self._last, ids)]
        before = found[-1] if found else -1
        for each in ids[len(found) :]:
            number = self._known.get((before, each))
            if number is None:
                number = self._known[before, each] = next(self._counter)
            found.append(number)
            before = number
        self._last, self._last_numbers = ids, found
        return found


class Blocks:
    """What the files of an import share: the numbers of blocks, and which calls have come already.

    Blocks of different scopes never have the same number.
    """

    def __init__(self) -> None:
        self._counter = itertools.count()
        self._scopes: dict[Hashable, BlockScope] = {}
        self._seen: set[int] = set()

    def scope(self, key: Hashable = None) -> BlockScope:
        """Return the scope within which a format's ids mean the same.

        Args:
            key: names the scope, which lasts as long as the import. Without a key it is a new one, shared with nothing.
        """
        if key is None:
            return BlockScope(self._counter)
        return self._scopes.setdefault(key, BlockScope(self._counter))

    def is_new(self, key: Hashable) -> bool:
        """Whether this is asked for the first time. Logs that continue others may repeat their calls."""
        known = len(self._seen)
        self._seen.add(hash(key))
        return len(self._seen) > known


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Calls that failed, or without token counts, or that were in an earlier file."""

    calls: int


@dataclass(frozen=True, slots=True)
class Importer:
    """Reads one format. Texts of users are not kept: token counts, hashes of blocks, and times are.

    Attributes:
        name: of the format, as `--format` takes it.
        description: one line for the help.
        matches: whether a file has this format, by its path and its first 256 KiB as text, which may end within a line.
        read: yields the programs of a file one by one, so that a long file is never held whole, and what it leaves out.
            It takes the file, the numbers of blocks, and what is called with the number of further bytes that were
            read. Calls come after their parents. An id of a program that another one has already is changed later. It
            raises TraceError if the file is not of this format; the message names file and line, and what was expected.
        start_s: for logs whose times are dates, so that arrivals are seconds since 1970: a time that is not after the
            arrival of the file's first program; None if the file has no time. Its errors are those of `read`.
    """

    name: str
    description: str
    matches: Callable[[Path, str], bool]
    read: Callable[[Path, Blocks, Callable[[int], object]], Iterator[TraceProgram | LeftOut]]
    start_s: Callable[[Path], float | None] | None = None


def begins(first: str | tuple[str, ...], *keys: str) -> Callable[[Path, str], bool]:
    """Return what tells a format by the first character of a file, and by keys that are near its beginning."""
    return lambda _, head: head.lstrip().startswith(first) and all(f'"{key}"' in head for key in keys)
