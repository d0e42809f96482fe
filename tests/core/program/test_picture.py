"""What terminals and notebooks show of a program and its graph."""

from __future__ import annotations

import io
import itertools
import re
from collections import defaultdict
from xml.etree import ElementTree as ET

from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

import weft
from weft.core.accounts import Account
from weft.core.ids import CallId, ProgramId, SessionId, ThreadId
from weft.core.program.graph import CallNode, CallState, Edge, ProgramGraph
from weft.core.program.graph.flowchart import MOST_CALLS
from weft.core.program.graph.picture import MOST_BOXES, MOST_ROWS
from weft.testing import FakeClock, RecordingBackend

SVG = "{http://www.w3.org/2000/svg}"
RED = "#c0392b"


def graph(name: str = "answer") -> ProgramGraph:
    return ProgramGraph(ProgramId("prog-1"), SessionId("sess-1"), name)


def run(
    made: ProgramGraph, call: str, *parents: str, service_s: float = 1.0, label: str = "", tools: tuple[str, ...] = ()
) -> None:
    """Add a call that has ended; a parent that ends in "?" is a guess."""
    edges = tuple(Edge(CallId(parent.rstrip("?")), not parent.endswith("?")) for parent in parents)
    made.open(CallNode(CallId(call), ThreadId(call[0]), edges, label or call, tools))
    made.arrive(CallId(call), len(made) * 2.0)
    made.leave(CallId(call), len(made) * 2.0 + 1.5, Account(service_s=service_s, wait_s=0.5), CallState.FINISHED)


def react() -> ProgramGraph:
    """Think, two concurrent calls, the first after a tool; answer, which perhaps does not depend on the second."""
    made = graph()
    run(made, "think")
    run(made, "search", "think", tools=("web",))
    run(made, "compute", "think", service_s=3.0)
    run(made, "answer", "search", "compute?")
    return made


def parsed(svg: str) -> ET.Element:
    return ET.fromstring(svg)  # noqa: S314  our own


def texts(svg: str) -> list[str]:
    return [each.text or "" for each in parsed(svg).iter(f"{SVG}text")]


def edges(svg: str) -> list[ET.Element]:
    return [path for path in parsed(svg).iter(f"{SVG}path") if path.get("fill") == "none"]


def boxes(svg: str) -> list[tuple[float, float, float]]:
    """Left side, upper side and width of each box."""
    found = [group[0] for group in parsed(svg).iter(f"{SVG}g")]
    return [tuple(float(box.get(name, "")) for name in ("x", "y", "width")) for box in found]  # type: ignore[misc]


def test_a_picture_has_calls_edges_and_tools() -> None:
    """Each call is a box with its label and figures. Guesses are dashed, and the critical path is red."""
    svg = react()._repr_svg_()
    assert {"think", "search", "compute", "answer", "1.00 s, waited 0.50"} <= set(texts(svg))
    assert "answer: 4 calls, critical path of 5.00 s" in texts(svg)
    assert any(text.startswith("web ") for text in texts(svg))
    assert len(edges(svg)) == 4
    assert [edge.get("stroke") for edge in edges(svg)].count(RED) == 2
    assert len([edge for edge in edges(svg) if edge.get("stroke-dasharray")]) == 1
    assert any("dashed: a guess" in text for text in texts(svg))


def test_a_wide_row_is_summed_up() -> None:
    """A program of a thousand parallel calls has a few boxes, among them the one on the critical path."""
    made = graph()
    run(made, "root")
    for number in range(1000):
        run(made, f"{number}", "root", service_s=9.0 if number == 777 else 1.0)
    run(made, "join", *(f"{number}" for number in range(1000)))
    svg = made.to_svg()
    assert len(boxes(svg)) == MOST_BOXES + 3
    assert f"{1000 - MOST_BOXES} more calls" in texts(svg)
    assert "777" in texts(svg)
    assert len(edges(svg)) == 2 * (MOST_BOXES + 1)


def test_a_long_program_shows_its_last_calls() -> None:
    """Of a thousand calls in turn, the picture has the last ones, and says how many it has not."""
    made = graph()
    run(made, "0")
    for number in range(1, 1000):
        run(made, f"{number}", f"{number - 1}")
    svg = made.to_svg()
    assert len(boxes(svg)) == MOST_ROWS
    assert f"{1000 - MOST_ROWS} earlier calls are not drawn" in texts(svg)
    assert "999" in texts(svg)


def test_the_picture_of_an_inner_program_names_the_program_around_it() -> None:
    """An inner program has a picture of its own, so the picture says where the program was called."""
    outer = ProgramId("prog-0")
    assert f"inside the program {outer}" in texts(ProgramGraph(ProgramId("p"), SessionId("s"), "in", outer).to_svg())
    assert not any("inside the program" in text for text in texts(react().to_svg()))


def test_a_program_without_calls_has_a_picture() -> None:
    """Nothing has happened yet, and nothing fails."""
    assert "answer: 0 calls, critical path of 0.00 s" in texts(graph().to_svg())
    assert str(graph()).startswith("answer: 0 calls")


@given(st.text(), st.text())
def test_names_of_any_characters_make_a_picture(name: str, label: str) -> None:
    """Names come from clients. A picture with them is well-formed, and they are texts in it."""
    made = graph(name)
    run(made, "c", label=label, tools=(label,))
    svg = made.to_svg()
    assert len(boxes(svg)) == 1
    assert "<script" not in graph("<script>").to_svg()


@given(st.lists(st.sets(st.integers(0, 5), max_size=4), max_size=60))
def test_boxes_do_not_overlap(parents: list[set[int]]) -> None:
    """In any graph the boxes of a row are side by side, inside the picture, and each row is below its parents."""
    made = graph()
    for number, back in enumerate(parents):
        run(made, str(number), *(str(number - 1 - each) for each in sorted(back, reverse=True) if each < number))
    svg = made.to_svg()
    rows = defaultdict(list)
    for x, y, width in boxes(svg):
        rows[y].append((x, x + width))
    left, top, width, height = map(float, parsed(svg).get("viewBox", "").split())
    for y, spans in rows.items():
        ordered = sorted(spans)
        assert all(before[1] < after[0] for before, after in itertools.pairwise(ordered))
        assert left <= ordered[0][0]
        assert ordered[-1][1] <= left + width + 1
        assert top <= y < height


def test_print_shows_the_calls_of_a_graph() -> None:
    """Each call has a line with what it came after; guesses have a question mark, the critical path a star."""
    lines = str(react()).splitlines()
    assert lines[0] == "answer: 4 calls, * critical path of 5.00 s"
    assert [line.split()[:2] for line in lines[-4:]] == [
        ["1*", "think"],
        ["2", "search"],
        ["3*", "compute"],
        ["4*", "answer"],
    ]
    assert "2, 3?" in lines[-1]
    assert " web " in lines[-3]


def test_print_shows_the_last_calls_of_a_long_program() -> None:
    """A table of thousands of calls stays readable."""
    made = graph()
    for number in range(1000):
        run(made, f"{number}", *([f"{number - 1}"] if number else []))
    lines = str(made).splitlines()
    assert lines[0].startswith(f"answer: the last {MOST_CALLS} of 1000 calls")
    assert lines[-1].split()[:2] == ["1000*", "999"]


def test_the_calls_fit_a_terminal() -> None:
    """No figure is cut off in 80 columns, however long the names are."""
    made = graph()
    run(made, "first", label="a very long name of an agent", tools=("a long name of a tool", "another one"))
    console = Console(file=io.StringIO(), width=80)
    console.print(made)
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    assert re.search(r"0/0 0\.50 +1\.00 finished", printed)


def test_a_program_shows_its_row_and_its_calls() -> None:
    """`print(program)` has both, and a notebook shows the row and the picture. A program without a call has no row."""
    backend = RecordingBackend(FakeClock())
    with weft.Program("answer") as program:
        assert str(program).startswith("answer: 0 calls")
        backend.call(program, service_s=2.0)
    assert f"answer ({program.program_id})" in str(program)
    assert "answer: 1 calls" in str(program)
    assert program._repr_html_().index("<table>") < program._repr_html_().index("<svg ")
    console = Console(file=io.StringIO(), width=80)
    console.print(program)
    assert "answer: 1 calls" in console.file.getvalue()  # type: ignore[attr-defined]
