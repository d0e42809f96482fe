"""The calls of a program as a table for people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from weft.core.process_view import state_cell
from weft.core.tables import Cell, Table, seconds

if TYPE_CHECKING:
    from weft.core.ids import CallId
    from weft.core.program.graph import CallNode, ProgramGraph

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
