"""What an importer of a trace format is, and the caps that all importers obey."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from weft.core.errors import TraceError
from weft.core.trace.format import TraceProgram


@dataclass(frozen=True, slots=True)
class ImportOptions:
    """Caps on what is imported. A call beyond a cap is left out, and so are all calls that follow it.

    Raises:
        TraceError: A cap is not above 0.
    """

    max_context_tokens: float = math.inf  # of prompt and output of a call
    max_turns: float = math.inf  # calls of a program
    gap_cap_s: float = math.inf  # a longer gap is cut to this

    def __post_init__(self) -> None:
        for name in ("max_context_tokens", "max_turns"):
            if not getattr(self, name) >= 1:
                raise TraceError(f"{name} is {getattr(self, name)}; give at least 1.")
        if not self.gap_cap_s >= 0:
            raise TraceError(f"gap_cap_s is {self.gap_cap_s}; give seconds, 0 or more.")


class Importer(Protocol):
    """Reads one format. Texts are not kept: token counts, hashes of blocks, and times are."""

    name: str  # of the format, as `--format` takes it
    description: str  # one line for the help

    def matches(self, path: Path, head: str) -> bool:
        """Whether a file has this format.

        Args:
            path: the file.
            head: its first 64 KiB as text. The text may end within a line.
        """

    def read(self, path: Path, advance: Callable[[int], object]) -> Iterator[TraceProgram]:
        """Yield the programs of a file one by one, so that a long file is never held whole.

        Ids of programs are unique in the file. Hash ids of programs that share nothing differ.

        Args:
            path: the file.
            advance: called with the number of further bytes that were read.

        Raises:
            TraceError: the file is not of this format. The message names file and line, and what was expected.
        """
