"""Timelines of recorded programs."""

from __future__ import annotations

from weft.core.accounts import Account
from weft.core.errors import TraceError
from weft.core.ids import CallId, EngineId, ProgramId, SessionId, ThreadId
from weft.core.program.graph import CallNode, CallState, Edge, ProgramGraph
from weft.core.show.program_timeline import Timeline, timeline
from weft.core.trace.format import TraceCall, TraceProgram, in_order
from weft.core.trace.measured import Measured


def recorded(program: TraceProgram) -> Timeline:
    """Return the timeline of a program from a trace.

    Raises:
        TraceError: the trace does not say when its calls ran.
    """
    return timeline(graph_of(program), start_s=0.0)


def graph_of(program: TraceProgram) -> ProgramGraph:
    """Return the graph of a recorded program. Its clock begins when the program arrives.

    Raises:
        TraceError: the trace does not say when its calls ran.
    """
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
