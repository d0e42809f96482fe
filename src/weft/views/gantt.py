"""Who ran when, as a picture (SVG): a band for each program, a bar for each run of a call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final
from xml.sax.saxutils import escape

from weft.core.errors import SimulationError
from weft.core.sim.records import Run
from weft.core.sim.simulator import SimResult

MOST_CALLS: Final = 10_000  # more bars than that are no picture
_LEFT, _WIDTH, _LANE, _TICKS = 120, 900, 18, 10


def gantt(result: SimResult) -> str:
    """The picture of a simulation that noted its runs. Parallel calls of a program stand below each other.

    Raises:
        SimulationError: the runs were not noted, or are too many to see.
    """
    if not 0 < len(result.runs) <= 2 * MOST_CALLS:
        raise SimulationError(f"{len(result.runs)} runs cannot be drawn; simulate up to {MOST_CALLS} calls, runs=True.")
    begin = min(row.arrival for row in result.programs.values())
    scale = _WIDTH / (result.makespan or 1.0)
    parts: list[str] = []
    top = 10
    for number, (name, row) in enumerate(result.programs.items()):
        lanes = _lanes([run for run in result.runs if run.program == name])
        color = f"hsl({number * 137 % 360} 55% 60%)"
        parts.append(f'<text x="{_LEFT - 8}" y="{top + 13}" text-anchor="end">{_text(name[:18])}</text>')
        x, width = _LEFT + (row.arrival - begin) * scale, (row.finish - row.arrival) * scale
        parts.append(f'<rect x="{x:.2f}" y="{top}" width="{width:.2f}" height="{len(lanes) * _LANE}" fill="#eee"/>')
        for lane, runs in enumerate(lanes):
            for run in runs:
                x, width = _LEFT + (run.start_s - begin) * scale, (run.end_s - run.start_s) * scale
                y = top + lane * _LANE + 1
                title = f"{name} {run.call_id}, engine {run.replica}: {run.start_s:g} to {run.end_s:g}"
                parts.append(
                    f'<rect x="{x:.2f}" y="{y}" width="{width:.2f}" height="{_LANE - 2}" fill="{color}" stroke="#fff">'
                    f"<title>{_text(title)}</title></rect>"
                )
        top += len(lanes) * _LANE + 6
    for tick in range(_TICKS + 1):
        x = _LEFT + tick * _WIDTH / _TICKS
        parts.append(f'<line x1="{x:.2f}" y1="6" x2="{x:.2f}" y2="{top}" stroke="#000" stroke-opacity="0.15"/>')
        at = begin + tick * result.makespan / _TICKS
        parts.append(f'<text x="{x:.2f}" y="{top + 14}" text-anchor="middle">{at:.4g}</text>')
    parts.append(f'<text x="{_LEFT}" y="{top + 32}">{result.policy}: grey waits, or is in a tool</text>')
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{_LEFT + _WIDTH + 30}" height="{top + 42}"'
    return f'{head} font-family="sans-serif" font-size="12">\n' + "\n".join(parts) + "\n</svg>\n"


def _lanes(runs: Sequence[Run]) -> list[list[Run]]:
    lanes: list[list[Run]] = []
    for run in sorted(runs, key=lambda run: run.start_s):
        free = next((lane for lane in lanes if lane[-1].end_s <= run.start_s), None)
        if free is None:
            lanes.append(free := [])
        free.append(run)
    return lanes


def _text(text: str) -> str:
    return escape("".join(each if each.isprintable() else " " for each in text))
