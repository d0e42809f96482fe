"""Timelines of programs that were written to a file: as a trace, or as graphs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from weft.core.accounts import Account
from weft.core.errors import TraceError
from weft.core.ids import CallId, EngineId, ProgramId, SessionId, ThreadId
from weft.core.program.graph import CallNode, CallState, Edge, ProgramGraph
from weft.core.program.graph.document import FORMAT
from weft.core.show.program_timeline import Timeline, timeline
from weft.core.trace.format import Measured, TraceCall, TraceProgram, in_order, read


def timelines_in(file: Path) -> Iterator[tuple[Timeline, float]]:
    """Yield the timelines of a file, a trace of an engine or what `read_graphs` reads, each with the start of its
    program in seconds from the first one's. Raises TraceError if it cannot be read, or does not say when calls ran."""
    if not _has_graphs(file):
        for program in read(file):
            try:
                yield recorded(program), program.arrival_s
            except TraceError as error:
                raise TraceError(f"{file}, {error}") from None
        return
    graphs = read_graphs(file)
    arrivals = ([node.arrival_s for node in graph.calls if node.arrival_s is not None] for graph in graphs)
    starts = [min(each, default=0.0) for each in arrivals]
    first_s = min(starts, default=0.0)
    for graph, start_s in zip(graphs, starts, strict=True):
        yield timeline(graph, start_s=start_s), start_s - first_s


def _has_graphs(file: Path) -> bool:
    """Whether a file begins like one of graphs. One that cannot be read is left to the reader of traces."""
    try:
        with file.open(encoding="utf-8") as lines:
            return FORMAT in lines.read(100)
    except (OSError, UnicodeDecodeError):
        return False


def read_graphs(path: Path) -> list[ProgramGraph]:
    """Read the graphs of a file of `program.graph.to_json()`, one a line, or raise TraceError."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = (error.strerror or str(error)) if isinstance(error, OSError) else "it is not UTF-8 text"
        raise TraceError(f"{path} cannot be read: {reason}. Write it with `program.graph.to_json()`.") from None
    try:
        json.loads(text)
        texts = [text]
    except (ValueError, RecursionError):
        texts = [line for line in text.splitlines() if line.strip()]
    graphs = []
    for number, each in enumerate(texts, 1):
        try:
            graphs.append(ProgramGraph.from_json(each))
        except TraceError as error:
            raise TraceError(f"{path}, line {number}: {error}") from None
    return graphs


def recorded(program: TraceProgram) -> Timeline:
    """Return the timeline of a program from a trace, or raise TraceError if it does not say when the calls ran."""
    return timeline(graph_of(program), start_s=0.0)


def graph_of(program: TraceProgram) -> ProgramGraph:
    """Return the graph of a recorded program. Its clock begins when the program arrives. A trace that does not say when
    the calls ran raises TraceError."""
    graph = ProgramGraph(ProgramId(program.program), SessionId(""), program.name or "program")
    timed = [(call, call.measured) for call in in_order(program.calls) if call.measured is not None]
    if len(timed) < len(program.calls):
        raise TraceError(
            f"program {program.program!r:.80}: the trace says how long the calls are, but not when they ran. It was "
            "generated, or recorded by an older Weft; record the program with `weft record`."
        )
    for call, measured in sorted(timed, key=lambda each: each[1].arrival_s):
        _add(graph, call, measured)
    return graph


def _add(graph: ProgramGraph, call: TraceCall, measured: Measured) -> None:
    call_id = CallId(call.call_id)
    parents = tuple(Edge(CallId(parent), True) for parent in call.parents)
    tools = (call.tool,) if call.tool is not None else ()
    account = Account(
        measured.service_s,
        measured.wait_s,
        measured.preemptions,
        call.prompt_tokens,
        call.output_tokens,
        measured.cached_tokens,
        waits=measured.waits,
    )
    graph.open(CallNode(call_id, ThreadId(measured.thread), parents, measured.label, tools))
    graph.arrive(call_id, measured.arrival_s)
    engine_id = EngineId(measured.engine) if measured.engine else None
    graph.leave(call_id, measured.end_s, account, CallState(measured.state), engine_id=engine_id)
