"""Read the graph of a program, and write it as a picture or as text: `weft graph TRACE --out graph.svg`."""

from __future__ import annotations

import itertools
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from weft.core.errors import TraceError, WeftError
from weft.core.files import writing
from weft.core.ids import CallId
from weft.core.program.graph import CallNode, ProgramGraph
from weft.core.show import Span
from weft.core.show.program_timeline import pieces

_WAIT, _SERVICE, _REST, _GAP, _CRITICAL = "#f2b366", "#4c78a8", "#e8e8e8", "#9a9a9a", "#c0392b"
_HALF: Final = 0.28  # half the height of a bar, in lanes


def load(path: Path, program: str | None = None) -> ProgramGraph:
    """Read a graph from a file of `program.graph.to_json()`: one graph, or one on each line.

    Args:
        program: Id or name of the program; the first that matches is read. Default: the first of the file.

    Raises:
        TraceError: The file cannot be read, holds something else, or has no such program.
    """
    graphs = load_all(path)
    if not graphs:
        raise TraceError(f"{path} is empty. Give a file that `program.graph.to_json()` wrote.")
    wanted = [graph for graph in graphs if program is None or program in (graph.program_id, graph.name)]
    if not wanted:
        there = ", ".join(f"{graph.program_id} ({graph.name})" for graph in graphs[:20])
        raise TraceError(f"{path} has no program {program}. Choose one that it has: {there}.")
    return wanted[0]


def load_all(path: Path) -> list[ProgramGraph]:
    """Read all graphs of a file, as `load` does.

    Raises:
        TraceError: The file cannot be read, or holds something else.
    """
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


def save(graph: ProgramGraph, out: Path) -> None:
    """Write a graph in the format that the file's suffix names (see `FORMATS`).

    Raises:
        WeftError: There is no such format, the file cannot be written, or matplotlib is not installed.
    """
    write = FORMATS.get(out.suffix)
    if write is None:
        raise WeftError(f"{out}: no such format of a graph; end the name in one of {', '.join(FORMATS)}.")
    with writing(out):
        write(graph, out)


def _save_picture(graph: ProgramGraph, out: Path) -> None:
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError as error:
        raise WeftError("pictures need matplotlib: pip install matplotlib, or use .mmd or .dot.") from error
    lanes = len(graph.threads)
    with rc_context({"svg.hashsalt": "weft", "svg.fonttype": "none"}), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # matplotlib warns of characters that the font does not have
        figure = Figure(figsize=(12, 1.6 + 0.8 * max(lanes, 1)), layout="constrained")
        draw(graph, figure.add_subplot())
        figure.savefig(out, metadata={"Date": None} if out.suffix == ".svg" else None)


FORMATS: Final[dict[str, Callable[[ProgramGraph, Path], object]]] = {
    ".svg": _save_picture,
    ".png": _save_picture,
    ".mmd": lambda graph, out: out.write_text(graph.to_mermaid(), encoding="utf-8"),
    ".dot": lambda graph, out: out.write_text(graph.to_dot(), encoding="utf-8"),
    ".json": lambda graph, out: out.write_text(graph.to_json() + "\n", encoding="utf-8"),
}


def draw(graph: ProgramGraph, axes: Any) -> None:
    """Draw a graph over time into matplotlib axes.

    Each thread has a lane. Each call is a bar from arrival to completion, in which wait and service are shaded. Edges
    are arrows, dashed where they are guesses. Interceptions are thin lines with the names of the tools. The critical
    path is red.
    """
    graph = graph.copy()  # the program may go on
    lanes = {thread_id: number for number, thread_id in enumerate(graph.threads)}
    timed = {node.call_id: node for node in graph.calls if node.arrival_s is not None}
    begin_s = min((_start_s(node) for node in timed.values()), default=0.0)
    last_s = max((node.completion_s or _start_s(node) for node in timed.values()), default=0.0)
    path = graph.critical_path()
    on_critical_path = set(path.calls)

    def position(node: CallNode) -> tuple[float, float, int]:
        end_s = last_s if node.completion_s is None else node.completion_s
        return _start_s(node) - begin_s, end_s - begin_s, lanes[node.thread_id]

    for node in timed.values():
        start, end, lane = position(node)
        on_path = node.call_id in on_critical_path
        bar: dict[str, Any] = {"height": 2 * _HALF, "left": start}
        axes.barh(lane, end - start, color=_REST, **bar)
        waits, services = pieces(Span(start, end), node.account)
        for color, spans in ((_SERVICE, services), (_WAIT, waits)):
            for span in spans:
                axes.barh(lane, span.end_s - span.start_s, color=color, height=2 * _HALF, left=span.start_s)
        edge = {"edgecolor": _CRITICAL if on_path else "#555555", "linewidth": 2 if on_path else 0.5}
        axes.barh(lane, end - start, fill=False, **edge, **bar)
        _write(axes, start, lane - _HALF - 0.05, node.label or "call")
    critical = set(itertools.pairwise(path.calls))
    _draw_edges(graph, timed, position, critical, axes)
    for gap in graph.interceptions:
        below = lanes[graph[gap.before].thread_id] + _HALF + 0.06
        axes.hlines(below, gap.start_s - begin_s, gap.end_s - begin_s, color=_GAP, linewidth=2)
        if gap.tools:
            _write(axes, gap.start_s - begin_s, below + 0.13, ", ".join(gap.tools), color="#555555", style="italic")
    axes.set_yticks(range(len(lanes)), [f"thread {number}" for number in range(len(lanes))])
    axes.set_ylim(max(len(lanes), 1) - 0.4, -0.6)
    axes.set_xlabel("seconds since the first call arrived")
    missing = len(graph) - len(timed)
    title = f"{graph.name}: {len(graph)} calls, critical path {path.service_s:.3f} s of service"
    title += f" ({missing} never reached the engine)" if missing else ""
    title += f", after {graph.folded.calls} older calls" if graph.folded.calls else ""
    title += f", inside {graph.parent_program_id}" if graph.parent_program_id is not None else ""
    axes.set_title(_one_line(title), fontsize=10, parse_math=False)
    for color, meaning in ((_WAIT, "wait"), (_SERVICE, "service"), (_REST, "other time"), (_CRITICAL, "critical path")):
        axes.barh(0, 0, color=color, label=meaning)
    axes.plot([], [], color=_GAP, linewidth=2, label="interception")
    axes.plot([], [], "--", color="#777777", linewidth=0.8, label="a guess")
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=8, frameon=False)


def _draw_edges(
    graph: ProgramGraph,
    timed: dict[CallId, CallNode],
    position: Callable[[CallNode], tuple[float, float, int]],  # start and end in seconds, and the lane
    critical: set[tuple[CallId, CallId]],
    axes: Any,
) -> None:
    edges = ((edge, timed[call_id]) for call_id in timed for edge in graph[call_id].parents if edge.parent in timed)
    for edge, node in edges:
        _, from_s, from_lane = position(timed[edge.parent])
        to_s, _, to_lane = position(node)
        on_path = (edge.parent, node.call_id) in critical
        arrow = {
            "arrowstyle": "-|>",
            "linestyle": "-" if edge.exact else "--",
            "color": _CRITICAL if on_path else "#777777",
            "linewidth": 1.6 if on_path else 0.8,
            "shrinkA": 0,
            "shrinkB": 0,
        }
        axes.annotate("", xy=(to_s, to_lane), xytext=(from_s, from_lane), arrowprops=arrow)


def _start_s(node: CallNode) -> float:
    return node.arrival_s or 0.0


def _write(axes: Any, x: float, y: float, text: str, **style: Any) -> None:
    axes.text(x, y, _one_line(text), fontsize=7, clip_on=True, parse_math=False, **style)


def _one_line(text: str) -> str:
    return "".join(character if character.isprintable() else " " for character in text)
