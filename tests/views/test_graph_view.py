"""`weft graph`: the graph of a program in every format, and one-line errors."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from typer.testing import CliRunner

from weft.commands import cli
from weft.core.accounts import Account
from weft.core.errors import TraceError, WeftError
from weft.core.ids import CallId, ProgramId, SessionId, ThreadId
from weft.core.program.graph import CallNode, CallState, Edge, ProgramGraph
from weft.views.graph import load, save


def graph(name: str = "answer", program_id: str = "prog-1", label: str = "answer") -> ProgramGraph:
    """A fork after "think" with a tool before one branch, a running join by guesses, and a refused call."""
    made = ProgramGraph(ProgramId(program_id), SessionId("sess"), name)
    calls: list[tuple[str, str, list[str], float, float | None]] = [
        ("think", "t0", [], 100.0, 101.0),
        ("search", "t0", ["think"], 101.5, 102.0),
        ("compute", "t1", ["think"], 101.0, 103.0),
        (label, "t0", ["search", "compute"], 103.5, None),
    ]
    for call, thread, parents, start_s, end_s in calls:
        edges = tuple(Edge(CallId(parent), call != label) for parent in parents)
        tools = ("web",) if call == "search" else ()
        made.open(CallNode(CallId(call), ThreadId(thread), edges, call, tools))
        made.arrive(CallId(call), start_s)
        if end_s is not None:
            account = Account(service_s=(end_s - start_s) / 2, wait_s=(end_s - start_s) / 4)
            made.leave(CallId(call), end_s, account, CallState.FINISHED)
    made.open(CallNode(CallId("refused"), ThreadId("t2")))
    made.leave(CallId("refused"), 104.0, Account(), CallState.FAILED)
    return made


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """A file of three programs, two of which have the same name."""
    path = tmp_path / "trace.jsonl"
    graphs = [graph(), graph(program_id="prog-2"), graph("other", "prog-3")]
    path.write_text("\n".join(each.to_json() for each in graphs) + "\n\n")
    return path


@pytest.fixture
def main(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """`weft graph` with arguments, in this process."""

    def call(*arguments: object) -> int:
        monkeypatch.setattr(sys, "argv", ["weft", "graph", *map(str, arguments)])
        return cli.main()

    return call


# -- reading


def test_one_graph(tmp_path: Path) -> None:
    """A file with one graph is read, whether the graph is on one line or on many."""
    path = tmp_path / "trace.json"
    for text in (graph().to_json(), graph().to_json().replace(", ", ",\n")):
        path.write_text(text)
        assert load(path).calls == graph().calls


@pytest.mark.parametrize(
    ("program", "found"), [(None, "prog-1"), ("prog-2", "prog-2"), ("answer", "prog-1"), ("other", "prog-3")]
)
def test_one_of_several(trace: Path, program: str | None, found: str) -> None:
    """Of several programs, the first with the given id or name is read, or the first of all."""
    assert load(trace, program).program_id == found


def test_no_such_program(trace: Path) -> None:
    """The error for an unknown program lists the programs of the file."""
    with pytest.raises(TraceError, match=r"no program prog-4\. Choose one .*: prog-1 \(answer\), prog-2 .*, prog-3"):
        load(trace, "prog-4")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read: No such file"),
        (b"\xff\xfe\x00", "cannot be read: it is not UTF-8 text"),
        (b"", "is empty. Give a file"),
        (b"# not a trace", "line 1: not a graph that"),
        (b'{"format": "other"}', "line 1: not a graph that"),
        (b'{"program": "a", "calls": []}', "line 1: not a graph that .* looks like a trace, which `weft sim`"),
        (graph().to_json().encode() + b"\n{", "line 2: not a graph that"),
        (b"[" * 100_000, "line 1: not a graph that"),
        (b"[1, 2]", "line 1: not a graph that .* it is JSON, but no object"),
    ],
)
def test_no_trace(tmp_path: Path, content: bytes | None, message: str) -> None:
    """A file that is missing or holds something else raises a TraceError that names the file and the line."""
    path = tmp_path / "trace.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(TraceError, match=message) as caught:
        load(path)
    assert "trace.json" in str(caught.value)


def test_a_folder_is_no_trace(tmp_path: Path) -> None:
    """A folder in place of a file raises a TraceError."""
    with pytest.raises(TraceError, match="cannot be read: Is a directory"):
        load(tmp_path)


# -- writing


def texts(svg: Path) -> list[str]:
    """All texts of a picture."""
    return [element.text or "" for element in ET.parse(svg).iter("{http://www.w3.org/2000/svg}text")]  # noqa: S314


def test_picture(tmp_path: Path) -> None:
    """The picture names every thread, call and tool, and counts the calls that it does not show."""
    out = tmp_path / "graph.svg"
    save(graph(), out)
    found = texts(out)
    assert {"think", "search", "compute", "answer", "web", "thread 0", "thread 1"} <= set(found)
    assert "answer: 5 calls, critical path 1.500 s of service (1 never reached the engine)" in found
    assert "refused" not in found


def test_the_same_graph_gives_the_same_picture(tmp_path: Path) -> None:
    """The same graph gives the same bytes."""
    first, second = tmp_path / "1.svg", tmp_path / "2.svg"
    save(graph(), first)
    save(graph(), second)
    assert first.read_bytes() == second.read_bytes()


@pytest.mark.parametrize("label", ["$x$", "$\\frac{", "船と霧", "a\nb\x00", "<b>&amp;", ""])
@pytest.mark.parametrize("suffix", [".svg", ".png", ".mmd", ".dot", ".json"])
def test_any_label(tmp_path: Path, label: str, suffix: str) -> None:
    """Labels come from users. No label breaks a format, not even one that the font cannot draw."""
    out = tmp_path / f"graph{suffix}"
    save(graph(name=label, label=label), out)
    assert out.stat().st_size > 0
    if suffix == ".svg":
        assert len(texts(out)) > 10


def test_an_empty_graph(tmp_path: Path) -> None:
    """A program without calls can be drawn."""
    empty = ProgramGraph(ProgramId("p"), SessionId("s"), "empty")
    save(empty, tmp_path / "graph.svg")
    assert "empty: 0 calls, critical path 0.000 s of service" in texts(tmp_path / "graph.svg")


@pytest.mark.parametrize("suffix", [".svg", ".png", ".mmd", ".dot", ".json"])
def test_command(trace: Path, tmp_path: Path, main: Callable[..., int], suffix: str) -> None:
    """`weft graph TRACE --out FILE` writes the format that the suffix names, and prints the file's name."""
    out = tmp_path / f"out{suffix}"
    assert main(trace, "--out", out, "--program", "other") == 0
    start = {".svg": b"<?xml", ".png": b"\x89PNG", ".mmd": b"flowchart TD", ".dot": b'digraph "other"', ".json": b"{"}
    assert out.read_bytes().startswith(start[suffix])
    if suffix == ".json":
        assert load(out).program_id == "prog-3"


def test_default_file(trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without --out, the command writes graph.svg in the current folder."""
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(cli.app, ["graph", str(trace)])
    assert (done.exit_code, done.stdout) == (0, "graph.svg\n")
    assert (tmp_path / "graph.svg").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere.json"], "error: nowhere.json cannot be read: No such file or directory."),
        (["TRACE", "--program", "x"], "has no program x."),
        (["TRACE", "--out", "graph.gif"], "error: graph.gif: no such format of a graph; end the name in one of .svg,"),
        (["TRACE", "--out", "/nowhere/graph.dot"], "error: /nowhere/graph.dot cannot be written: No such file"),
        (["TRACE", "--out", "/nowhere/graph.svg"], "error: /nowhere/graph.svg cannot be written: No such file"),
    ],
)
def test_what_goes_wrong(
    trace: Path, main: Callable[..., int], capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    """Each mistake gives one line on standard error and exit code 1."""
    assert main(*(str(trace) if each == "TRACE" else each for each in arguments)) == 1
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without matplotlib, the error of a picture says how to install it, and the text formats work."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(WeftError, match="pip install matplotlib"):
        save(graph(), tmp_path / "graph.svg")
    save(graph(), tmp_path / "graph.mmd")


def test_a_program_inside_another_keeps_its_parent(tmp_path: Path) -> None:
    """JSON and the picture name the program around it."""
    inner = graph()
    inner.parent_program_id = ProgramId("prog-outer")
    assert ProgramGraph.from_json(inner.to_json()).parent_program_id == "prog-outer"
    save(inner, tmp_path / "graph.svg")
    assert "inside prog-outer" in (tmp_path / "graph.svg").read_text()
