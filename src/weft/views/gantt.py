"""The Gantt chart of a simulation (SVG): a band for each program, and in it a bar for each execution of a call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final
from xml.sax.saxutils import escape

from weft.core.errors import SimulationError
from weft.core.show.program_timeline import rows
from weft.core.sim.result import Execution, SimResult
from weft.core.tables import one_line

MOST_CALLS: Final = 10_000  # More bars cannot be distinguished.
_LEFT, _WIDTH, _LANE, _TICKS = 120, 900, 18, 10


def gantt(result: SimResult) -> str:
    """Draw a simulation whose executions were recorded as the text of an SVG file. Parallel calls of a program are
    drawn below each other. Raises SimulationError if the executions were not recorded, or they are too many."""
    if not 0 < len(result.runs) <= 2 * MOST_CALLS:
        raise SimulationError(
            f"{len(result.runs)} executions cannot be drawn; simulate up to {MOST_CALLS} calls, with runs=True."
        )
    begin = min(row.arrival for row in result.programs.values())
    scale = _WIDTH / (result.makespan or 1.0)
    parts: list[str] = []
    top = 10
    for number, (name, row) in enumerate(result.programs.items()):
        lanes = _lanes([execution for execution in result.runs if execution.program == name])
        color = f"hsl({number * 137 % 360} 55% 60%)"
        parts.append(f'<text x="{_LEFT - 8}" y="{top + 13}" text-anchor="end">{escape(one_line(name[:18]))}</text>')
        x, width = _LEFT + (row.arrival - begin) * scale, (row.finish - row.arrival) * scale
        parts.append(f'<rect x="{x:.2f}" y="{top}" width="{width:.2f}" height="{len(lanes) * _LANE}" fill="#eee"/>')
        for lane, executions in enumerate(lanes):
            for execution in executions:
                x, width = _LEFT + (execution.start_s - begin) * scale, (execution.end_s - execution.start_s) * scale
                y = top + lane * _LANE + 1
                title = (
                    f"{name} {execution.call_id}, engine {execution.replica}: {execution.start_s:g} to "
                    f"{execution.end_s:g}"
                )
                parts.append(
                    f'<rect x="{x:.2f}" y="{y}" width="{width:.2f}" height="{_LANE - 2}" fill="{color}" stroke="#fff">'
                    f"<title>{escape(one_line(title))}</title></rect>"
                )
        top += len(lanes) * _LANE + 6
    for tick in range(_TICKS + 1):
        x = _LEFT + tick * _WIDTH / _TICKS
        parts.append(f'<line x1="{x:.2f}" y1="6" x2="{x:.2f}" y2="{top}" stroke="#000" stroke-opacity="0.15"/>')
        time = begin + tick * result.makespan / _TICKS
        parts.append(f'<text x="{x:.2f}" y="{top + 14}" text-anchor="middle">{time:.4g}</text>')
    parts.append(f'<text x="{_LEFT}" y="{top + 32}">{result.policy}; grey: the program waits, or runs a tool</text>')
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{_LEFT + _WIDTH + 30}" height="{top + 42}"'
    return f'{head} font-family="sans-serif" font-size="12">\n' + "\n".join(parts) + "\n</svg>\n"


def _lanes(executions: Sequence[Execution]) -> list[list[Execution]]:
    """Distribute executions over lanes, so that none overlaps another in its lane."""
    ordered = sorted(executions, key=lambda execution: execution.start_s)
    lanes: dict[int, list[Execution]] = {}
    for execution, row in zip(ordered, rows((each.start_s, each.end_s) for each in ordered), strict=True):
        lanes.setdefault(row, []).append(execution)
    return list(lanes.values())
