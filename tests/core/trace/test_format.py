"""The program trace: written programs are read back, and errors name the line."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sim_programs import programs

from weft.core.accounts import Account
from weft.core.errors import TraceError
from weft.core.ids import CallId, ProgramId, SessionId, ThreadId
from weft.core.program.graph import CallNode, CallState, Edge, ProgramGraph
from weft.core.trace.format import Measured, TraceCall, TraceProgram, dump, from_graph, parse, read, write

FULL = (
    '{"version": 1, "program": "A", "arrival_s": 1.5, "name": "answer", "tenant": "acme", "deadline_s": 60, "calls": ['
    '{"id": "a1", "parents": [], "prompt_tokens": 9, "output_tokens": 4, "gap_s": 0.5, "tool": null, "prompt": "Hi", '
    '"shared_prefix_tokens": 3}, '
    '{"id": "a2", "parents": ["a1"], "prompt_tokens": 20, "output_tokens": 1, "gap_s": 2, "tool": "web", '
    '"shared_prefix_tokens": 13}]}'
)


def calls(*rows: dict[str, Any], **program: Any) -> str:
    """Return the line of a program A with these calls."""
    return json.dumps({"program": "A", "calls": rows} | program)


def measured(**values: Any) -> str:
    """Return the line of a program with a call that was measured."""
    return calls({"id": "x", "output_tokens": 1, "measured": {"thread": "0"} | values}, version=2)


# -- reading and writing


def test_every_field_is_read() -> None:
    """Each key sets its field."""
    first = TraceCall("a1", (), 4, 9, 0.5, None, "Hi", 3)
    second = TraceCall("a2", ("a1",), 1, 20, 2.0, "web", None, 13)
    assert parse(FULL, "here") == TraceProgram("A", (first, second), 1.5, "answer", "acme", 60.0)


def test_most_keys_are_optional() -> None:
    """Only `program` is required, and for a call `id` and `output_tokens`; the default parent is the previous call."""
    line = calls({"id": "x", "output_tokens": 2}, {"id": "y", "output_tokens": 3}, {"id": "z", "output_tokens": 1})
    assert parse(line, "here") == TraceProgram(
        "A", (TraceCall("x", (), 2), TraceCall("y", ("x",), 3), TraceCall("z", ("y",), 1))
    )


def test_parents_may_come_later_in_the_line() -> None:
    """The order of the calls in the list does not matter."""
    line = calls({"id": "x", "output_tokens": 2, "parents": ["y"]}, {"id": "y", "output_tokens": 3, "parents": []})
    assert [call.parents for call in parse(line, "here").calls] == [("y",), ()]


@given(programs())
def test_a_written_program_is_read_back(made: list[TraceProgram]) -> None:
    """The result equals the program."""
    assert [parse(dump(program), "here") for program in made] == made


@given(st.text(), st.text(min_size=1), st.text(min_size=1))
def test_any_text_is_written(prompt: str, name: str, tool: str) -> None:
    """Prompts, names and tools may have any characters, and the program is still one line."""
    program = TraceProgram(name, (TraceCall(tool, (), 1, tool=tool, prompt=prompt),), name=name, tenant=tool)
    assert "\n" not in dump(program)
    assert parse(dump(program), "here") == program


def test_a_file(tmp_path: Path) -> None:
    """Programs keep their order, and empty lines are skipped."""
    path = tmp_path / "trace.jsonl"
    made = [TraceProgram(name, (TraceCall("c", (), 1),)) for name in "CAB"]
    write(made, path)
    path.write_text(path.read_text().replace("\n", "\n\n"))
    assert read(path) == made


# -- errors


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not JSON"),
        ("[" * 10_000, "not JSON"),
        ("[1]", "is not an object; give an object with the keys version, program"),
        (calls({"id": "x", "output_tokens": 1}, version=4), "version is 4; this Weft reads versions 1 to 3"),
        (measured(more=1), "measured: there is no key 'more'"),
        (measured(thread=None), "measured: thread is None"),
        (measured(arrival_s=2.0, end_s=1.0), "end_s is 1, before arrival_s, 2"),
        (measured(state="lost"), "state is 'lost'; give one of named, running"),
        (measured(waits=[[0.0]]), r"a wait is \[0.0\]; give its start and its length"),
        (measured(waits=[[0.0, -1.0]]), "length is -1.0"),
        (measured(waits=[[0.0, 0.0]] * 17), "give a list of at most 16 waits"),
        (calls({"id": "x", "output_tokens": 1}, version=True), "version is True"),
        (calls({"id": "x", "output_tokens": 1}, arrival=1), "there is no key 'arrival'; the keys are .*arrival_s"),
        ('{"calls": [{"id": "x", "output_tokens": 1}]}', "program is None; give a text"),
        (calls({"id": "x", "output_tokens": 1}, program=""), "program is ''; give a text"),
        (calls({"id": "x", "output_tokens": 1}, program=7), "program is 7; give a text"),
        (calls({"id": "x", "output_tokens": 1}, arrival_s=-1), "arrival_s is -1; give seconds, 0 or more"),
        (calls({"id": "x", "output_tokens": 1}, arrival_s=float("nan")), "arrival_s is nan"),
        (calls({"id": "x", "output_tokens": 1}, arrival_s=True), "arrival_s is True"),
        (calls({"id": "x", "output_tokens": 1}, tenant=3), "tenant is 3; give a text or null"),
        (calls(), r"program 'A': calls is \[\]; give a list of at least one call"),
        ('{"program": "A"}', "calls is None"),
        (calls({"output_tokens": 1}), "call 1: id is None"),
        (calls({"id": "x"}), r"call 1 \('x'\): output_tokens is None; give a whole number of at least 1"),
        (calls({"id": "x", "output_tokens": 0}), "output_tokens is 0"),
        (calls({"id": "x", "output_tokens": 1.0}), "output_tokens is 1.0"),
        (calls({"id": "x", "output_tokens": True}), "output_tokens is True"),
        (calls({"id": "x", "output_tokens": 1, "prompt_tokens": -3}), "prompt_tokens is -3"),
        (calls({"id": "x", "output_tokens": 1, "gap_s": float("inf")}), "gap_s is inf"),
        (calls({"id": "x", "output_tokens": 1, "prompt": 1}), "prompt is 1; give a text or null"),
        (calls({"id": "x", "output_tokens": 1, "token": 1}), "there is no key 'token'"),
        (calls({"id": "x", "output_tokens": 1, "prompt_tokens": 3, "shared_prefix_tokens": 4}), "has only 3 tokens"),
        (calls({"id": "x", "output_tokens": 1, "parents": "y"}), "parents is 'y'; give a list of ids"),
        (calls({"id": "x", "output_tokens": 1, "parents": [1]}), r"parents is \[1\]; give a list of ids"),
        (calls({"id": "x", "output_tokens": 1, "parents": ["y", "y"]}), "a parent occurs twice"),
        (calls({"id": "x", "output_tokens": 1, "parents": ["y"]}), "call 'x': there is no parent 'y'"),
        (calls({"id": "x", "output_tokens": 1, "parents": ["x"]}), "the parents of calls x form a cycle"),
        (calls({"id": "x", "output_tokens": 1}, {"id": "x", "output_tokens": 1}), "two calls have the id 'x'"),
        (
            calls({"id": "x", "output_tokens": 1, "parents": ["y"]}, {"id": "y", "output_tokens": 1}),
            "the parents of calls x, y form a cycle",
        ),
    ],
)
def test_an_invalid_line_is_refused(line: str, message: str, tmp_path: Path) -> None:
    """The error has the file, the line number, the wrong value and the valid values."""
    path = tmp_path / "trace.jsonl"
    path.write_text(FULL.replace('"A"', '"Z"') + "\n" + line + "\n")
    with pytest.raises(TraceError, match=rf"trace\.jsonl, line 2: .*{message}"):
        read(path)


def test_invalid_files_are_refused(tmp_path: Path) -> None:
    """A file may be missing, not be text, be empty, or have a program twice."""
    path = tmp_path / "trace.jsonl"
    with pytest.raises(TraceError, match="cannot be read: No such file"):
        read(path)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(TraceError, match="is not UTF-8 text"):
        read(path)
    path.write_text("\n")
    with pytest.raises(TraceError, match="has no program"):
        read(path)
    path.write_text(f"{FULL}\n\n{FULL}\n")
    with pytest.raises(TraceError, match="line 3: program 'A' is on line 1 already"):
        read(path)
    with pytest.raises(TraceError, match="cannot be written: Is a directory"):
        write([], tmp_path)


# -- from a program's graph


def test_a_graph_becomes_a_trace() -> None:
    """Arrivals, gaps, tools, lengths and cached prefixes are those of the graph. A call without an output token is left
    out, and its children get its parents."""
    graph = ProgramGraph(ProgramId("prog-1"), SessionId("sess"), "answer")
    rows: list[tuple[str, tuple[str, ...], float | None, float, int]] = [
        ("think", (), 100.0, 101.0, 5),
        ("search", ("think",), 101.5, 102.0, 6),
        ("refused", ("search",), None, 102.0, 0),
        ("cut", ("think",), 101.0, 103.0, 0),
        ("join", ("refused", "cut"), 104.0, 105.0, 7),
        ("other", (), 100.25, 101.0, 8),
    ]
    for call, parents, arrival_s, end_s, tokens in rows:
        edges = tuple(Edge(CallId(parent), True) for parent in parents)
        tools = ("web", "sql") if call == "search" else ()
        graph.open(CallNode(CallId(call), ThreadId("t0"), edges, call, tools))
        if arrival_s is not None:
            graph.arrive(CallId(call), arrival_s)
        account = Account(prompt_tokens=10 * tokens, output_tokens=tokens, cached_tokens=tokens)
        graph.leave(CallId(call), end_s, account, CallState.FINISHED if tokens else CallState.FAILED)
    made = from_graph(graph, start_s=90.0, tenant="acme", deadline_s=60.0)
    times = [(call.measured.arrival_s, call.measured.end_s) for call in made.calls if call.measured is not None]
    assert times == [(0.0, 1.0), (1.5, 2.0), (4.0, 5.0), (0.25, 1.0)]
    assert replace(made, calls=tuple(replace(call, measured=None) for call in made.calls)) == TraceProgram(
        "prog-1",
        (
            TraceCall("think", (), 5, 50, shared_prefix_tokens=5),
            TraceCall("search", ("think",), 6, 60, 0.5, "web, sql", shared_prefix_tokens=6),
            TraceCall("join", ("search", "think"), 7, 70, 2.0, shared_prefix_tokens=7),
            TraceCall("other", (), 8, 80, 0.25, shared_prefix_tokens=8),
        ),
        10.0,
        "answer",
        "acme",
        60.0,
    )


def test_what_was_measured_is_read_back() -> None:
    """Each value is, and a program with any has the version of the format in which they came."""
    values = Measured("0", 0.5, 4.0, 2.0, 1.0, 2, 16, "plan", "engine-1", "cancelled", ((0.0, 0.5), (2.0, 0.5)))
    program = TraceProgram("A", (TraceCall("x", (), 1, measured=values),))
    assert parse(dump(program), "here") == program
    assert json.loads(dump(program))["version"] == 2
    assert json.loads(dump(TraceProgram("A", (TraceCall("x", (), 1),))))["version"] == 1


def test_a_graph_without_an_output_token_has_no_trace() -> None:
    """A program whose calls were all refused cannot be a trace."""
    graph = ProgramGraph(ProgramId("prog-1"), SessionId("sess"), "answer")
    with pytest.raises(TraceError, match=r"no call of program 'answer' .* has an output token"):
        from_graph(graph)
