"""What `weft trace import` and `weft advise` share: options for the logs that they read, and what was left out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

import typer

from weft.commands.choices import one_of
from weft.core.trace.importers import IMPORTERS, TraceImport

FormatOption = Annotated[
    str | None, one_of(IMPORTERS, help="What the files are (default: found by looking at each of them).")
]
GapCapOption = Annotated[float | None, typer.Option(min=0, help="Cut longer gaps to this many seconds.")]
ProgramsOption = Annotated[int | None, typer.Option(min=1, help="Stop after this many programs.")]


def left_out(found: TraceImport) -> Iterator[str]:
    """Say in lines what an import has left out, and why."""
    counts = found.counts
    if by_caps := [
        text
        for number, text in (
            (counts.programs_left_out, counted(counts.programs_left_out, "program")),
            (counts.calls_left_out, f"{counted(counts.calls_left_out, 'call')} of other programs"),
        )
        if number
    ]:
        yield f"left out by the caps: {', '.join(by_caps)}"
    if counts.calls_unused:
        calls = counted(counts.calls_unused, "call")
        yield f"left out as failed, without token counts or repeated from another file: {calls}"
    for reason, paths in (("no known format", found.left_out), ("without a call", found.empty)):
        if paths:
            yield f"left out as {reason}: {counted(len(paths), 'file')} (the first is {paths[0]})"


def counted(number: int, what: str) -> str:
    """A number of things in words."""
    return f"{number:,} {what}{'s'[: number != 1]}"
