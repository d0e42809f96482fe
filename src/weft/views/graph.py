"""Read the graph of a program, and write it as a picture or as text: `weft graph TRACE --out graph.svg`."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from weft.core.errors import TraceError, WeftError
from weft.core.files import writing
from weft.core.program.graph import ProgramGraph
from weft.core.show import timeline
from weft.core.show.recorded import read_graphs
from weft.core.tables import one_line

_WAIT, _SERVICE, _REST, _GAP, _CRITICAL = "#f2b366", "#4c78a8", "#e8e8e8", "#9a9a9a", "#c0392b"
_TEXT, _LINE = "#555555", "#777777"
_HALF: Final = 0.28  # half the height of a bar, in lanes


def load(path: Path, program: str | None = None) -> ProgramGraph:
    """Read a graph from a file of `program.graph.to_json()`: one graph, or one on each line. `program` is an id or a
    name; the first that matches is read, by default the first of the file. Raises TraceError if it cannot be read,
    or has no such program."""
    graphs = read_graphs(path)
    if not graphs:
        raise TraceError(f"{path} is empty. Give a file that `program.graph.to_json()` wrote.")
    wanted = [graph for graph in graphs if program is None or program in (graph.program_id, graph.name)]
    if not wanted:
        there = ", ".join(f"{graph.program_id} ({graph.name})" for graph in graphs[:20])
        raise TraceError(f"{path} has no program {program}. Choose one that it has: {there}.")
    return wanted[0]


def save(graph: ProgramGraph, out: Path) -> None:
    """Write a graph in the format that the file's suffix names (see `FORMATS`), or raise WeftError."""
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
    """Draw the timeline of a graph into matplotlib axes.

    Each thread has a lane. Each call is a bar from arrival to completion, in which wait and service are shaded. Edges
    are arrows, dashed where they are guesses. Interceptions are thin lines with the names of the tools. The critical
    path is red.
    """
    graph = graph.copy()  # the program may go on
    shown = timeline(graph)
    ends_s = {call.call_id: shown.length_s if call.end_s is None else call.end_s for call in shown.calls}
    lanes = {call.call_id: call.lane for call in shown.calls}
    for call in shown.calls:
        length_s = ends_s[call.call_id] - call.start_s
        bar: dict[str, Any] = {"height": 2 * _HALF, "left": call.start_s}
        axes.barh(call.lane, length_s, color=_REST, **bar)
        for color, spans in ((_SERVICE, call.services), (_WAIT, call.waits)):
            for span in spans:
                axes.barh(call.lane, span.end_s - span.start_s, color=color, height=2 * _HALF, left=span.start_s)
        edge = {"edgecolor": _CRITICAL, "linewidth": 2} if call.is_critical else {"edgecolor": _TEXT, "linewidth": 0.5}
        axes.barh(call.lane, length_s, fill=False, **edge, **bar)
        _write(axes, call.start_s, call.lane - _HALF - 0.05, call.label or "call")
    critical = set(itertools.pairwise(shown.critical_path.calls))
    for call in shown.calls:
        for parent in call.parents:
            if parent.call_id in lanes:
                on_path = (parent.call_id, call.call_id) in critical
                arrow = {
                    "arrowstyle": "-|>",
                    "linestyle": "-" if parent.is_exact else "--",
                    "color": _CRITICAL if on_path else _LINE,
                    "linewidth": 1.6 if on_path else 0.8,
                    "shrinkA": 0,
                    "shrinkB": 0,
                }
                begin = ends_s[parent.call_id], lanes[parent.call_id]
                axes.annotate("", xy=(call.start_s, call.lane), xytext=begin, arrowprops=arrow)
    for gap in shown.gaps:
        below = lanes[gap.call_id] + _HALF + 0.06
        axes.hlines(below, gap.start_s, gap.end_s, color=_GAP, linewidth=2)
        if gap.tools:
            _write(axes, gap.start_s, below + 0.13, ", ".join(gap.tools), color=_TEXT, style="italic")
    count = len(shown.lanes)
    axes.set_yticks(range(count), [f"thread {number}" for number in range(count)])
    axes.set_ylim(max(count, 1) - 0.4, -0.6)
    axes.set_xlabel("seconds since the first call arrived")
    missing = sum(node.arrival_s is None for node in graph.calls)
    older, count = shown.calls_left_out - missing, len(shown.calls) + missing
    title = f"{graph.name}: {count} calls, critical path {shown.critical_path.service_s:.3f} s of service"
    title += f" ({missing} never reached the engine)" if missing else ""
    title += f", after {older} older calls" if older else ""
    title += f", inside {graph.parent_program_id}" if graph.parent_program_id is not None else ""
    axes.set_title(one_line(title), fontsize=10, parse_math=False)
    for color, meaning in ((_WAIT, "wait"), (_SERVICE, "service"), (_REST, "other time"), (_CRITICAL, "critical path")):
        axes.barh(0, 0, color=color, label=meaning)
    axes.plot([], [], color=_GAP, linewidth=2, label="interception")
    axes.plot([], [], "--", color=_LINE, linewidth=0.8, label="a guess")
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=8, frameon=False)


def _write(axes: Any, x: float, y: float, text: str, **style: Any) -> None:
    axes.text(x, y, one_line(text), fontsize=7, clip_on=True, parse_math=False, **style)
