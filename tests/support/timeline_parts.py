"""The graph of a program that thinks, makes two concurrent calls, and sums up."""

from __future__ import annotations

from weft.core.accounts import Account
from weft.core.ids import CallId, EngineId, ProgramId, SessionId, ThreadId
from weft.core.program.graph import CallNode, CallState, Edge, ProgramGraph


def run(  # noqa: PLR0917  the first ones are a row of a table
    graph: ProgramGraph,
    call: str,
    span: tuple[float, float],
    parents: str = "",
    thread: str = "t0",
    account: Account | None = None,
    tools: tuple[str, ...] = (),
) -> None:
    """Add a call that starts and ends; by default it waits for a quarter of its time."""
    edges = tuple(Edge(CallId(each), True) for each in parents.split())
    start_s, end_s = span
    took_s = end_s - start_s
    graph.open(CallNode(CallId(call), ThreadId(thread), edges, f"label of {call}", tools))
    graph.arrive(CallId(call), start_s)
    cost = account or Account(took_s * 0.75, took_s * 0.25, prompt_tokens=10, output_tokens=3, cached_tokens=2)
    graph.leave(CallId(call), end_s, cost, CallState.FINISHED, engine_id=EngineId("engine-1"))


def think_and_sum() -> ProgramGraph:
    made = ProgramGraph(ProgramId("prog-1"), SessionId("sess-1"), "answer")
    run(made, "think", (100.0, 104.0))
    run(made, "search", (105.0, 109.0), "think", tools=("web",))
    run(made, "compute", (104.0, 112.0), "think", "t1")
    run(made, "sum", (112.0, 116.0), "search compute")
    return made
