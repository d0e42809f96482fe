"""Graphs of programs as text, for tables of shapes."""

from __future__ import annotations

from weft.core.program.graph import ProgramGraph


def edges(graph: ProgramGraph, unnamed: str = "") -> set[str]:
    """The calls and edges of a graph by label: "a" is a call, "a>b" an edge, "a~b" a guess. A second "a" is "a2".

    Args:
        graph: The graph.
        unnamed: The label of calls without one.
    """
    names: dict[str, str] = {}
    for call in graph.calls:
        label = call.label or unnamed
        same = sum(name.rstrip("0123456789") == label for name in names.values())
        names[call.call_id] = f"{label}{same + 1}" if same else label
    arrows = (
        f"{names[edge.parent]}{'>' if edge.exact else '~'}{names[call.call_id]}"
        for call in graph.calls
        for edge in call.parents
    )
    return {*names.values(), *arrows}


def expected(text: str) -> set[str]:
    """The calls and edges that a text lists. A call is named by its edges, or alone if it has none."""
    arrows = text.split()
    return {*arrows, *(name for arrow in arrows for name in arrow.replace("~", ">").split(">"))}
