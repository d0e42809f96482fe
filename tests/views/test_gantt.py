"""The Gantt chart of a simulation."""

from __future__ import annotations

import itertools
from xml.etree import ElementTree as ET

import pytest
from sim_programs import FIGURE_9, chain

from weft.core.policies import PolicyConfig
from weft.core.sim import SimSettings, SimulationError, TraceProgram, simulate
from weft.views.gantt import gantt

SVG = "{http://www.w3.org/2000/svg}"
UNIT = SimSettings(policy=PolicyConfig("rr", quanta_s=(2.0,)), batch_size=1, unit_steps=True)


def bars(svg: str) -> list[tuple[str, float, float, float]]:
    """The title, left edge and width (in simulated seconds, of which 8 fill the chart) and top edge of each bar."""
    root = ET.fromstring(svg)  # noqa: S314  our own
    found = []
    for rect in root.iter(f"{SVG}rect"):
        title = rect.find(f"{SVG}title")
        if title is not None and title.text is not None:
            left, width = (float(rect.get(key, "nan")) for key in ("x", "width"))
            found.append((title.text, (left - 120) / 112.5, width / 112.5, float(rect.get("y", "nan"))))
    return found


def test_bars_are_where_calls_ran() -> None:
    """Two programs whose calls take turns have a band each, with a bar for each execution."""
    result = simulate([chain("A", (4,)), chain("B<&", (4,))], UNIT, runs=True)
    found = bars(gantt(result))
    assert [(title, round(left, 3), round(width, 3)) for title, left, width, _ in found] == [
        ("A a1, engine 0: 0 to 2", 0, 2),
        ("A a1, engine 0: 4 to 6", 4, 2),
        ("B<& b<&1, engine 0: 2 to 4", 2, 2),
        ("B<& b<&1, engine 0: 6 to 8", 6, 2),
    ]
    assert [top for *_, top in found] == [11, 11, 35, 35]


def test_parallel_calls_are_below_each_other() -> None:
    """The bars of one program never cover each other."""
    result = simulate(FIGURE_9, SimSettings(policy=PolicyConfig("fcfs"), batch_size=2, unit_steps=True), runs=True)
    found = bars(gantt(result))
    assert len(found) == 7
    assert len({top for *_, top in found}) == 2
    for top in {top for *_, top in found}:
        lane = sorted((left, left + width) for _, left, width, at in found if at == top)
        assert all(end <= start + 0.01 for (_, end), (start, _) in itertools.pairwise(lane))


def test_any_name_is_written() -> None:
    """Characters that are not allowed in XML are replaced by spaces."""
    program = TraceProgram("a\x00\x1b]b", chain("A", (1,)).calls)
    assert bars(gantt(simulate([program], UNIT, runs=True)))[0][0].startswith("a  ]b a1")


def test_what_cannot_be_drawn() -> None:
    """A simulation that did not record its executions raises an error that says how to record them."""
    with pytest.raises(SimulationError, match="runs=True"):
        gantt(simulate([chain("A", (1,))], UNIT))
