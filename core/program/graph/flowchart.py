"""A program's graph in text: a table of its calls, and pictures in Mermaid and DOT.

A picture has a box for each thread. Guesses are dashed, the critical path is thick, and edges are labelled with the
tools that ran in between.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from weft.core.ids import CallId
from weft.core.process_view import state_cell
from weft.core.tables import Cell, Table, seconds

if TYPE_CHECKING:
    from weft.core.program.graph import CallNode, ProgramGraph


def mermaid(graph: ProgramGraph) -> str:
    """Return a graph as a Mermaid flowchart."""
    graph = graph.copy()
    lines = ["flowchart TD"]
    if graph.parent_program_id is not None:
        lines.append(f'    outer["inside the program {_mermaid_text(graph.parent_program_id)}"]')
    if graph.folded.calls:
        lines.append(f'    folded["{_folded(graph)}"]')
    for number, calls in enumerate(_threads(graph)):
        lines.append(f'    subgraph t{number}["thread {number}"]')
        lines += [f'        {call}["{"<br/>".join(map(_mermaid_text, caption))}"]' for call, caption in calls]
        lines.append("    end")
    thick = []
    for number, edge in enumerate(_edges(graph)):
        arrow = "-->" if edge.exact else "-.->"
        label = f'|"{_mermaid_text(edge.label)}"|' if edge.label else ""
        lines.append(f"    {edge.parent} {arrow}{label} {edge.call}")
        thick += [str(number)] if edge.critical else []
    if thick:
        lines.append(f"    linkStyle {','.join(thick)} stroke-width:4px")
    return "\n".join(lines) + "\n"


def dot(graph: ProgramGraph) -> str:
    """Return a graph in the DOT language of Graphviz."""
    graph = graph.copy()
    lines = [f'digraph "{_dot_text(graph.name)}" {{', "    node [shape=box];"]
    if graph.parent_program_id is not None:
        lines.append(f'    label="inside the program {_dot_text(graph.parent_program_id)}";')
    if graph.folded.calls:
        lines.append(f'    folded [label="{_folded(graph)}"];')
    for number, calls in enumerate(_threads(graph)):
        lines.append(f'    subgraph cluster_{number} {{ label="thread {number}";')
        captions = ((call, "\\n".join(map(_dot_text, caption))) for call, caption in calls)
        lines += [f'        {call} [label="{caption}"];' for call, caption in captions]
        lines.append("    }")
    for edge in _edges(graph):
        style = [f'label="{_dot_text(edge.label)}"'] if edge.label else []
        style += [] if edge.exact else ["style=dashed"]
        style += ["penwidth=3"] if edge.critical else []
        lines.append(f"    {edge.parent} -> {edge.call}" + (f" [{', '.join(style)}]" if style else "") + ";")
    return "\n".join([*lines, "}"]) + "\n"


class _Edge(NamedTuple):
    parent: str  # short name
    call: str  # short name
    exact: bool
    critical: bool  # on the critical path
    label: str  # the tools that ran in between, and for how long


def _threads(graph: ProgramGraph) -> Iterator[list[tuple[str, tuple[str, ...]]]]:
    """For each thread, yield its calls, each as a short name and the lines of its caption."""
    names = _short_names(graph)
    for calls in graph.threads.values():
        yield [(names[call_id], graph[call_id].caption) for call_id in calls]


def _edges(graph: ProgramGraph) -> Iterator[_Edge]:
    names = _short_names(graph)
    critical = set(itertools.pairwise(graph.critical_path().calls))
    gaps = {(gap.after, gap.before): gap for gap in graph.interceptions if gap.tools}
    for node in graph.calls:
        for edge in node.parents:
            pair = (edge.parent, node.call_id)
            gap = gaps.get(pair)
            label = f"{', '.join(gap.tools)} {gap.duration_s:.3f} s" if gap else ""
            yield _Edge(names[edge.parent], names[node.call_id], edge.exact, pair in critical, label)


def _folded(graph: ProgramGraph) -> str:
    return f"{graph.folded.calls} older calls, {graph.folded.account.service_s:.3f} s"


def _short_names(graph: ProgramGraph) -> dict[CallId, str]:
    return {node.call_id: f"c{number}" for number, node in enumerate(graph.calls)}


def _mermaid_text(text: str) -> str:
    """Escape a text for Mermaid, which reads `#code;` as a character."""
    return "".join(each if each.isalnum() or each in " .,-_:()/" else f"#{ord(each)};" for each in text)


def _dot_text(text: str) -> str:
    """Escape a text for a quoted DOT string."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return "".join(each if each.isprintable() else " " for each in escaped)


MOST_CALLS: Final = 40
_MOST_PARENTS: Final = 3  # of a call that are named
_HEADINGS: Final = ("", "call", "thread", "after", "tools", "tokens\nin/out", "wait\ns", "service\ns", "state")


def calls(graph: ProgramGraph) -> Table:
    """The calls in the order of their starts; of many, the last 40. The table fits a terminal of 80 columns.

    A parent that is a guess has a question mark. The critical path is bold, and marked with a star.
    """
    graph = graph.copy()
    path = graph.critical_path()
    critical = set(path.calls)
    nodes, before = graph.calls, graph.folded.calls
    numbers = {node.call_id: number for number, node in enumerate(nodes, before + 1)}
    threads = {thread_id: str(number) for number, thread_id in enumerate(graph.threads, 1)}

    def row(node: CallNode) -> Sequence[str | Cell]:
        account = node.account
        is_critical = node.call_id in critical
        texts = (
            f"{numbers[node.call_id]}{'*' if is_critical else ''}",
            node.label or "call",
            threads[node.thread_id],
            _after(node, numbers),
            ", ".join(node.tools),
            f"{account.prompt_tokens}/{account.output_tokens}",
            seconds(account.wait_s),
            seconds(node.service_s),
        )
        style = "bold" if is_critical else ""
        return *(Cell(text, style) for text in texts), state_cell(node.state)

    shown = nodes[-MOST_CALLS:]
    total = before + len(nodes)
    of = f"the last {len(shown)} of " if len(shown) < total else ""
    title = f"{graph.name}: {of}{total} calls, * critical path of {seconds(path.service_s)} s"
    return Table(title, _HEADINGS, [row(node) for node in shown], frozenset({2, 5, 6, 7}), widest=13)


def _after(node: CallNode, numbers: dict[CallId, int]) -> str:
    named = [f"{numbers[parent]}{'' if exact else '?'}" for parent, exact in node.parents[-_MOST_PARENTS:]]
    more = len(node.parents) - len(named)
    return ", ".join([f"{more} more", *named] if more else named)
