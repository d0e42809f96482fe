"""Azure's LLM inference traces: a request on each line, with its time and its lengths."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from weft.core.errors import TraceError
from weft.core.trace.fields import MOST
from weft.core.trace.format import TraceCall, TraceProgram
from weft.core.trace.importers.contract import Blocks
from weft.core.trace.importers.reading import lines

_COLUMNS: Final = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


class Azure:
    """Reads requests, of which nothing says which belong together: each is a program."""

    name: str = "azure"
    description: str = "Azure's LLM inference traces, a CSV with TIMESTAMP, ContextTokens and GeneratedTokens"

    def matches(self, path: Path, head: str) -> bool:
        """Whether the file begins with the names of the columns."""
        del path
        return set(_COLUMNS) <= set(_cells(head.partition("\n")[0]))

    def read(self, path: Path, blocks: Blocks, advance: Callable[[int], object]) -> Iterator[TraceProgram]:
        """Yield a program for each request. The first one arrives at 0."""
        del blocks
        start: datetime | None = None
        places: list[int] = []
        for number, line in lines(path, advance):
            where, cells = f"{path}, line {number}", _cells(line)
            if not places:
                if not set(_COLUMNS) <= set(cells):
                    raise TraceError(f"{where}: the columns are {line.strip()!r:.80}; expected {', '.join(_COLUMNS)}.")
                places = [cells.index(column) for column in _COLUMNS]
                continue
            if len(cells) <= max(places):
                raise TraceError(f"{where}: {line.strip()!r:.80} has {len(cells)} cells; expected {max(places) + 1}.")
            at, prompt, output = (cells[place] for place in places)
            time = _time(at, where)
            start = start or time
            arrival_s = max(0.0, (time - start).total_seconds())
            prompt_tokens, output_tokens = _tokens(prompt, where), _tokens(output, where)
            call = TraceCall("c0", (), max(1, output_tokens), prompt_tokens, at_s=0.0)
            yield TraceProgram(f"{path.stem}-{number}", (call,), arrival_s=arrival_s)


def _cells(line: str) -> list[str]:
    return [cell.strip().strip('"') for cell in line.split(",")]  # no cell of these files has a comma


def _time(text: str, where: str) -> datetime:
    try:
        time = datetime.fromisoformat(text.strip())
    except ValueError:
        raise TraceError(
            f"{where}: TIMESTAMP is {text!r:.40}; expected a time such as 2023-11-16 18:17:03.9799."
        ) from None
    return time if time.tzinfo is not None else time.replace(tzinfo=UTC)


def _tokens(text: str, where: str) -> int:
    text = text.strip()
    if not text.isascii() or not text.isdecimal() or len(text) > len(str(MOST)) or int(text) > MOST:
        raise TraceError(f"{where}: {text!r:.40} is no number of tokens; expected a whole number, at most {MOST:.0e}.")
    return int(text)
