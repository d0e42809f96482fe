"""Writes recorded programs as a Perfetto trace: `weft trace export FILE --format perfetto --out OUT`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from weft.core.errors import TraceError
from weft.core.files import writing
from weft.core.program.graph.document import FORMAT
from weft.core.show import Timeline, timeline
from weft.core.show.perfetto import perfetto
from weft.core.show.recorded import recorded
from weft.core.trace.format import read
from weft.views.graph import load_all


def export(file: Path, out: Path) -> int:
    """Write the programs of a recording, or of a file of graphs, as a Perfetto trace.

    Returns how many programs there are.

    Raises:
        TraceError: The file cannot be read, holds something else, or does not say when calls ran.
        WeftError: The trace cannot be written.
    """
    programs = list(_graphs(file) if _has_graphs(file) else _recorded(file))
    with writing(out):
        out.write_text(json.dumps(perfetto(programs)), encoding="utf-8")
    return len(programs)


def _has_graphs(file: Path) -> bool:
    """Whether the file begins like one of graphs. One that cannot be read is left to the reader of traces."""
    try:
        with file.open(encoding="utf-8") as lines:
            return FORMAT in lines.read(100)
    except (OSError, UnicodeDecodeError):
        return False


def _graphs(file: Path) -> Iterator[tuple[Timeline, float]]:
    graphs = load_all(file)
    arrivals = [[node.arrival_s for node in graph.calls if node.arrival_s is not None] for graph in graphs]
    starts = [min(each, default=0.0) for each in arrivals]
    first_s = min(starts, default=0.0)
    for graph, start_s in zip(graphs, starts, strict=True):
        yield timeline(graph, start_s=start_s), start_s - first_s


def _recorded(file: Path) -> Iterator[tuple[Timeline, float]]:
    for program in read(file):
        try:
            yield recorded(program), program.arrival_s
        except TraceError as error:
            raise TraceError(f"{file}, {error}") from None
