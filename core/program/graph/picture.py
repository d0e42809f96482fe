"""The picture of a program's graph as SVG, which notebooks show.

A row has the calls that come equally late in the longest chains. The picture stays small: of a long program it has the
last rows, and of a wide row some calls, those on the critical path before others.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from html import escape
from statistics import fmean
from typing import TYPE_CHECKING, Final

from weft.core.tables import one_line, seconds

if TYPE_CHECKING:
    from weft.core.ids import CallId, ThreadId
    from weft.core.program.graph import CallNode, ProgramGraph

MOST_ROWS: Final = 25
MOST_BOXES: Final = 7  # in a row; one more stands for the rest of the row
_WIDTH, _HEIGHT, _GAP, _BELOW, _MARGIN, _TOP = 136, 40, 20, 44, 24, 60  # pixels
_TOOLS, _LEAST_WIDTH = 60, 480  # pixels: room for the names of tools at the right, and for the title
_MOST_CHARACTERS: Final = 18  # of a label in a box
_FILLS: Final = {"failed": "#f6cfca", "cancelled": "#fbeec2", "running": "#d3ecd0", "named": "#ffffff"}
_FILL, _REST, _LINE, _CRITICAL, _TEXT, _FAINT = "#e4edf7", "#eeeeee", "#8a8a8a", "#c0392b", "#222222", "#666666"


@dataclass(slots=True)
class _Box:
    """A call, or the calls of a row that have no box of their own."""

    calls: Sequence[CallNode]
    x: float = 0.0  # of the middle
    y: float = 0.0  # of the upper side
    parents: dict[int, bool] = field(default_factory=dict)  # numbers of boxes; whether all edges from one are exact


def svg(graph: ProgramGraph) -> str:
    """Return a picture of a graph in SVG."""
    graph = graph.copy()
    path = graph.critical_path()
    rows = _rows(graph.calls)
    boxes: list[_Box] = []
    box_of: dict[CallId, int] = {}  # the number of a call's box
    for number, calls in enumerate(rows[-MOST_ROWS:]):
        row = [_Box(each, y=_TOP + number * (_HEIGHT + _BELOW)) for each in _split(calls, set(path.calls))]
        for box in row:
            _find_parents(box, box_of)
        _place(row, boxes)
        for box in row:
            box_of |= dict.fromkeys((call.call_id for call in box.calls), len(boxes))
            boxes.append(box)
    critical = {(box_of[a], box_of[b]) for a, b in itertools.pairwise(path.calls) if a in box_of and b in box_of}
    on_path = {box_of[call_id] for call_id in path.calls if call_id in box_of}
    threads = {thread_id: number for number, thread_id in enumerate(graph.threads, 1)}
    left = min((box.x for box in boxes), default=0.0) - _WIDTH / 2 - _MARGIN
    right = max((box.x for box in boxes), default=0.0) + _WIDTH / 2 + _MARGIN
    right += _TOOLS if any(call.tools for box in boxes for call in box.calls) else 0
    width = max(right - left, _LEAST_WIDTH)
    height = max((box.y for box in boxes), default=_TOP) + _HEIGHT + 40
    earlier = graph.folded.calls + sum(len(calls) for calls in rows[:-MOST_ROWS])
    total = graph.folded.calls + len(graph)
    notes = [f"inside the program {graph.parent_program_id}"] if graph.parent_program_id is not None else []
    notes += [f"{earlier} earlier calls are not drawn"] if earlier else []
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="{left:.0f} 0 {width:.0f} {height:.0f}" font-family="sans-serif" font-size="11" fill="{_TEXT}">',
        f'<rect x="{left:.0f}" y="0" width="{width:.0f}" height="{height:.0f}" fill="#ffffff"/>',
        _write(
            left + 12, 20, f"{graph.name[:36]}: {total} calls, critical path of {seconds(path.service_s)} s", "bold"
        ),
        _write(left + 12, 36, ", ".join(notes), color=_FAINT) if notes else "",
    ]
    # The critical edges come last, so that they cover others.
    edges = [(box.parents[parent], parent, number) for number, box in enumerate(boxes) for parent in box.parents]
    for exact, parent, number in sorted(edges, key=lambda edge: edge[1:] in critical):
        parts.append(_edge(boxes[parent], boxes[number], boxes, exact, (parent, number) in critical))
    for number, box in enumerate(boxes):
        parts += _draw(box, graph, threads, is_critical=number in on_path)
    guesses = ", dashed: a guess" if not all(exact for exact, _, _ in edges) else ""
    legend = f"red: critical path{guesses}, colours at the left: threads"
    return "\n".join([*filter(None, parts), _write(left + 12, height - 12, legend, color=_FAINT), "</svg>\n"])


def _rows(calls: Sequence[CallNode]) -> list[list[CallNode]]:
    """The calls by the number of calls in the longest chain before them."""
    rows: list[list[CallNode]] = []
    row_of: dict[CallId, int] = {}
    after: dict[int, int] = {}  # by the identity of a tuple of parents, which calls may share
    for call in calls:
        row = after.get(id(call.parents))
        if row is None:
            known = (row_of[edge.parent] + 1 for edge in call.parents if edge.parent in row_of)
            row = after[id(call.parents)] = max(known, default=0)
        row_of[call.call_id] = row
        if row == len(rows):
            rows.append([])
        rows[row].append(call)
    return rows


def _split(calls: list[CallNode], critical: set[CallId]) -> Iterator[list[CallNode]]:
    """Distribute the calls of a row over boxes."""
    if len(calls) <= MOST_BOXES + 1:
        yield from ([call] for call in calls)
        return
    first = sorted(calls, key=lambda call: call.call_id not in critical)[:MOST_BOXES]
    own = {call.call_id for call in first}
    yield from ([call] for call in calls if call.call_id in own)
    yield [call for call in calls if call.call_id not in own]


def _find_parents(box: _Box, box_of: dict[CallId, int]) -> None:
    for edges in {id(call.parents): call.parents for call in box.calls}.values():
        for edge in edges:
            number = box_of.get(edge.parent)
            if number is not None:
                box.parents[number] = box.parents.get(number, True) and edge.exact


def _place(row: list[_Box], above: list[_Box]) -> None:
    """Put the boxes of a row side by side, each as near below its parents as the others allow."""
    wished = {id(box): fmean(above[number].x for number in box.parents) if box.parents else 0.0 for box in row}
    row.sort(key=lambda box: wished[id(box)])
    at = -float("inf")
    for box in row:
        at = box.x = max(wished[id(box)], at + _WIDTH + _GAP)
    shift = fmean(box.x - wished[id(box)] for box in row)
    for box in row:
        box.x -= shift


def _draw(box: _Box, graph: ProgramGraph, threads: dict[ThreadId, int], *, is_critical: bool) -> Iterator[str]:
    x, y = box.x - _WIDTH / 2, box.y
    call = box.calls[0]
    rest = len(box.calls) > 1
    border = f'stroke="{_CRITICAL if is_critical else _LINE}" stroke-width="{2 if is_critical else 1}"'
    fill = _REST if rest else _FILLS.get(call.state, _FILL)
    service_s = sum(each.service_s for each in box.calls)
    yield f'<g><rect x="{x:.1f}" y="{y:.1f}" width="{_WIDTH}" height="{_HEIGHT}" rx="4" fill="{fill}" {border}/>'
    if rest:
        yield _write(x + 12, y + 16, f"{len(box.calls)} more calls", "bold")
        yield _write(x + 12, y + 31, f"{seconds(service_s)} s in all")
    else:
        thread = threads[call.thread_id]
        color = f"hsl({thread * 137 % 360}, 55%, 55%)"
        yield f'<rect x="{x + 3:.1f}" y="{y + 3:.1f}" width="4" height="{_HEIGHT - 6}" rx="2" fill="{color}"/>'
        yield _write(x + 12, y + 16, _short(call.label or "call"), "bold")
        yield _write(x + 12, y + 31, _figures(call))
        account = call.account
        text = (
            f"{call.label or 'call'} {call.state}, thread {thread}, {call.call_id}: service {seconds(service_s)} s, "
            f"wait {seconds(account.wait_s)} s, {account.prompt_tokens} tokens in, {account.output_tokens} out"
        )
        yield f"<title>{escape(one_line(text))}</title>"
        gap = graph.interception(call.call_id)
        if call.tools:
            took = f" {seconds(gap.duration_s)} s" if gap is not None else ""
            yield _write(box.x + 8, y - 8, _short(", ".join(call.tools)) + took, color=_FAINT)
    yield "</g>"


def _figures(call: CallNode) -> str:
    state = "" if call.state == "finished" else f"{call.state}, "
    wait_s = call.account.wait_s
    waited = f", waited {seconds(wait_s)}" if wait_s >= 0.01 and not state else ""
    return f"{state}{seconds(call.service_s)} s{waited}"


def _edge(parent: _Box, box: _Box, boxes: list[_Box], exact: bool, is_critical: bool) -> str:
    from_y, to_y = parent.y + _HEIGHT, box.y
    bend_y, aside, bend = from_y, 0.0, _BELOW / 2
    if to_y - from_y > _BELOW:
        between = (each for each in boxes if from_y < each.y < to_y)
        if any(abs(each.x - parent.x) < _WIDTH / 2 + 4 for each in between):
            aside, bend = (_WIDTH + _GAP) * 0.75, (to_y - from_y) / 3  # around the boxes between
        else:
            bend_y = to_y - _BELOW
    color = _CRITICAL if is_critical else _LINE
    dashes = "" if exact else ' stroke-dasharray="5 4"'
    curve = (
        f"M{parent.x:.1f} {from_y:.1f} V{bend_y:.1f} C{parent.x + aside:.1f} {bend_y + bend:.1f} "
        f"{box.x + aside:.1f} {to_y - bend:.1f} {box.x:.1f} {to_y - 5:.1f}"
    )
    return (
        f'<path d="{curve}" fill="none" stroke="{color}" stroke-width="{2 if is_critical else 1}"{dashes}/>'
        f'<path d="M{box.x - 4:.1f} {to_y - 7:.1f} h8 l-4 7 z" fill="{color}"/>'
    )


def _short(text: str) -> str:
    return text if len(text) <= _MOST_CHARACTERS else f"{text[: _MOST_CHARACTERS - 1]}…"


def _write(x: float, y: float, text: str, weight: str = "normal", color: str = _TEXT) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" font-weight="{weight}" fill="{color}">{escape(one_line(text))}</text>'
