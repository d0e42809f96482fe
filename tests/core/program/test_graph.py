"""The graph of a program: threads, forks, joins, interceptions, the critical path, JSON and pictures."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.core.accounts import Account
from weft.core.errors import TraceError
from weft.core.ids import CallId, ProgramId, SessionId, ThreadId
from weft.core.program.graph import CallNode, CallState, Edge, FoldedCalls, Interception, ProgramGraph


def graph(name: str = "answer") -> ProgramGraph:
    return ProgramGraph(ProgramId("prog-1"), SessionId("sess-1"), name)


def node(call: str, *parents: str, thread: str = "t0", tools: tuple[str, ...] = ()) -> CallNode:
    """Return a call that has only ids yet; a parent that ends in "?" is a guess."""
    edges = tuple(Edge(CallId(parent.rstrip("?")), not parent.endswith("?")) for parent in parents)
    return CallNode(CallId(call), ThreadId(thread), edges, label=call, tools=tools)


def run(made: ProgramGraph, call: CallNode, start_s: float, end_s: float, service_s: float | None = None) -> None:
    """Add a call that starts and ends; by default its whole time is service."""
    made.open(call)
    made.arrive(call.call_id, start_s)
    account = Account(service_s=end_s - start_s if service_s is None else service_s, output_tokens=3)
    made.leave(call.call_id, end_s, account, CallState.FINISHED)


@pytest.fixture
def react() -> ProgramGraph:
    """Think, two concurrent tools with a call each, answer; the second edge into the answer is a guess."""
    made = graph()
    run(made, node("think"), 0.0, 1.0)
    run(made, node("search", "think", tools=("web",)), 1.5, 2.5)
    run(made, node("compute", "think", thread="t1"), 1.25, 4.25)
    run(made, node("answer", "search", "compute?", tools=("web", "calculator")), 4.5, 5.0)
    return made


# -- reading


def test_calls_are_in_order(react: ProgramGraph) -> None:
    """Calls are in the order in which they started, and can be looked up by id."""
    assert [call.call_id for call in react.calls] == ["think", "search", "compute", "answer"]
    assert len(react) == 4
    assert react[CallId("answer")].parents == (Edge(CallId("search"), True), Edge(CallId("compute"), False))
    assert react[CallId("answer")].service_s == 0.5


def test_threads_forks_and_joins(react: ProgramGraph) -> None:
    """A thread has its calls in order, a fork has several children, and a join has several parents."""
    assert react.threads == {"t0": ("think", "search", "answer"), "t1": ("compute",)}
    assert (react.forks, react.joins) == (("think",), ("answer",))


def test_interceptions(react: ProgramGraph) -> None:
    """An interception begins at the end of the last parent and names the tools."""
    assert react.interceptions == (
        Interception(CallId("think"), CallId("search"), 1.0, 1.5, ("web",)),
        Interception(CallId("think"), CallId("compute"), 1.0, 1.25, ()),
        Interception(CallId("compute"), CallId("answer"), 4.25, 4.5, ("web", "calculator")),
    )
    assert [gap.duration_s for gap in react.interceptions] == [0.5, 0.25, 0.25]


def test_critical_path(react: ProgramGraph) -> None:
    """It is the longest chain by service; waits and tools do not count."""
    assert react.critical_path() == (4.5, ("think", "compute", "answer"))


def test_an_empty_graph() -> None:
    """A program without calls has an empty graph."""
    made = graph()
    assert (made.calls, made.threads, made.forks, made.joins, made.interceptions) == ((), {}, (), (), ())
    assert made.critical_path() == (0.0, ())
    assert made.to_mermaid() == "flowchart TD\n"
    assert made.to_dot() == 'digraph "answer" {\n    node [shape=box];\n}\n'


# -- writing


def test_the_states_of_a_call() -> None:
    """A call is named, running, finished; a node that was read before stays as it was."""
    made = graph()
    made.open(node("a"))
    named = made[CallId("a")]
    made.arrive(CallId("a"), 1.0)
    running = made[CallId("a")]
    made.leave(CallId("a"), 3.0, Account(service_s=0.5, wait_s=1.0), CallState.FINISHED)
    finished = made[CallId("a")]
    assert [each.state for each in (named, running, finished)] == ["named", "running", "finished"]
    assert [(each.arrival_s, each.completion_s) for each in (named, running, finished)] == [
        (None, None),
        (1.0, None),
        (1.0, 3.0),
    ]
    assert finished.account == Account(service_s=0.5, wait_s=1.0)


def test_a_refused_call_has_no_times() -> None:
    """A call that no engine took does not end or begin an interception."""
    made = graph()
    made.open(node("a"))
    made.leave(CallId("a"), 1.0, Account(), CallState.FAILED)
    run(made, node("b", "a"), 1.0, 2.0)
    assert (made[CallId("a")].arrival_s, made[CallId("a")].completion_s) == (None, None)
    assert made.interceptions == ()


def test_the_path_grows_as_calls_complete() -> None:
    """A call counts when it leaves, also if it was cancelled, and when its account is settled."""
    made = graph()
    run(made, node("a"), 0.0, 1.0)
    made.open(node("b", "a"))
    made.arrive(CallId("b"), 1.0)
    assert made.critical_path() == (1.0, ("a",))
    made.leave(CallId("b"), 2.0, Account(service_s=0.25), CallState.CANCELLED)
    assert made.critical_path() == (1.25, ("a", "b"))
    made.settle(CallId("b"), Account(service_s=0.75))
    assert made.critical_path() == (1.75, ("a", "b"))
    assert made[CallId("b")].state is CallState.CANCELLED


def test_settling_a_call_makes_the_chains_through_it_longer() -> None:
    """This includes the chains of calls that have left since."""
    made = graph()
    run(made, node("a"), 0.0, 1.0)
    run(made, node("b", "a"), 1.0, 2.0)
    made.settle(CallId("a"), Account(service_s=1.5))
    assert made.critical_path() == (2.5, ("a", "b"))


def test_unknown_calls_change_nothing() -> None:
    """Reports of a call that this program has not opened are ignored."""
    made = graph()
    made.arrive(CallId("x"), 1.0)
    made.leave(CallId("x"), 2.0, Account(), CallState.FINISHED)
    made.settle(CallId("x"), Account())
    assert len(made) == 0


# -- long programs


def test_old_calls_of_a_long_program_are_folded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The older half goes into sums, except calls that run or may still become parents. Pictures and JSON say so."""
    monkeypatch.setattr("weft.core.program.graph.dag.KEEP_CALLS", 4)
    made = graph()
    run(made, node("a"), 0.0, 1.0)
    run(made, node("b", "a"), 1.0, 2.0)
    made.open(node("running", "a", thread="t1"))
    made.arrive(CallId("running"), 1.0)
    run(made, node("c", "b"), 2.0, 3.0)
    made.fold(lambda call_id: call_id == "a")
    assert (len(made), made.folded) == (4, FoldedCalls()), "nothing is folded up to the limit"
    reader = made.copy()
    run(made, node("d", "b", "c"), 3.0, 4.0)
    made.fold(lambda call_id: call_id == "a")
    assert [call.call_id for call in made.calls] == ["a", "running", "c", "d"]
    assert made.folded == FoldedCalls(1, 2.0, Account(service_s=1.0, output_tokens=3))
    assert made[CallId("d")].parents == (Edge(CallId("c"), True),)
    assert made.critical_path() == (4.0, ("c", "d")), "its service includes that of folded calls"
    assert [call.call_id for call in reader.calls] == ["a", "b", "running", "c"]
    assert "1 older calls, 1.000 s" in made.to_mermaid()
    assert "1 older calls, 1.000 s" in made.to_dot()
    read = ProgramGraph.from_json(made.to_json())
    assert (read.calls, read.folded, read.critical_path()) == (made.calls, made.folded, made.critical_path())
    made.settle(CallId("b"), Account(9.0))
    made.leave(CallId("b"), 5.0, Account(9.0), CallState.FINISHED)
    assert len(made) == 4, "late reports of folded calls change nothing"


def test_the_critical_path_may_consist_of_folded_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """If no later chain is longer, its calls are not known any more, but its service is."""
    monkeypatch.setattr("weft.core.program.graph.dag.KEEP_CALLS", 2)
    made = graph()
    run(made, node("long"), 0.0, 9.0)
    for name in ("x", "y"):
        run(made, node(name), 9.0, 10.0)
    made.fold(lambda _call_id: False)
    assert made.critical_path() == (9.0, ())


# -- any graph

shapes = st.lists(
    st.tuples(
        st.lists(st.integers(1, 6), max_size=3, unique=True),  # distances to its parents
        st.integers(0, 100).map(lambda eighths: eighths / 8),  # service in seconds, exact in binary
        st.booleans(),
        st.sampled_from(CallState),
        st.text(max_size=5),
    ),
    max_size=12,
)


def build(shape: list[Any]) -> ProgramGraph:
    made = graph("any")
    for number, (back, service_s, exact, state, text) in enumerate(shape):
        parents = sorted(number - each for each in back if each <= number)
        edges = tuple(Edge(CallId(f"c{parent}"), exact or parent % 2 == 0) for parent in parents)
        made.open(CallNode(CallId(f"c{number}"), ThreadId(f"t{number % 3}"), edges, text, (text,) * (number % 2)))
        if state is not CallState.NAMED:
            made.arrive(CallId(f"c{number}"), float(number))
        if state not in (CallState.NAMED, CallState.RUNNING):
            made.leave(CallId(f"c{number}"), number + 0.5, Account(service_s, preemptions=number), state)
    return made


def chains(made: ProgramGraph, call_id: CallId) -> list[tuple[CallId, ...]]:
    """Return every chain of calls that have left the engine and that ends with one call."""
    parents = [edge.parent for edge in made[call_id].parents if made[edge.parent].completion_s is not None]
    return [(call_id,), *((*chain, call_id) for parent in parents for chain in chains(made, parent))]


@given(shapes)
def test_the_critical_path_is_the_longest_of_all_chains(shape: list[Any]) -> None:
    """Its service is that of the longest of all chains, and it is one of them."""
    made = build(shape)
    ended = [call.call_id for call in made.calls if call.completion_s is not None]
    every = [chain for call_id in ended for chain in chains(made, call_id)]
    lengths = {chain: sum(made[call_id].service_s for call_id in chain) for chain in every}
    path = made.critical_path()
    assert path.service_s == max(lengths.values(), default=0.0)
    assert path.service_s == lengths.get(path.calls, 0.0)


@given(shapes, st.integers(1, 6))
def test_folding_loses_no_service(shape: list[Any], keep: int) -> None:
    """However early calls are folded, the sum of all accounts and the service of the critical path stay the same, and
    the edges between the calls that are left stay."""
    whole, folded = build(shape), graph("any")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("weft.core.program.graph.dag.KEEP_CALLS", keep)
        folded._limit = keep
        for number, call in enumerate(whole.calls):
            there = tuple(edge for edge in call.parents if edge.parent in folded)
            folded.open(replace(call, parents=there))
            near = {CallId(f"c{each}") for each in range(number - 6, number + 1)}
            folded.fold(near.__contains__)
    assert folded.folded.calls + len(folded) == len(whole)
    accounts = (call.account for call in folded.calls)
    assert sum(accounts, folded.folded.account) == sum((call.account for call in whole.calls), Account())
    assert folded.critical_path().service_s == whole.critical_path().service_s
    for call in folded.calls:
        expected = tuple(edge for edge in whole[call.call_id].parents if edge.parent in folded)
        assert call.parents == expected


@given(shapes)
def test_a_graph_survives_json(shape: list[Any]) -> None:
    """A graph that is written and read is equal, and its text is one line of standard JSON."""
    made = build(shape)
    text = made.to_json()
    again = ProgramGraph.from_json(text)
    assert again.calls == made.calls
    assert again.critical_path() == made.critical_path()
    assert again.to_json() == text
    assert "\n" not in text
    assert json.loads(text, parse_constant=pytest.fail)


@given(shapes)
def test_pictures_have_every_call_and_edge(shape: list[Any]) -> None:
    """With any labels, Mermaid and DOT name each call once and draw each edge, guesses dashed."""
    made = build(shape)
    edges = [edge for call in made.calls for edge in call.parents]
    guesses = sum(not edge.exact for edge in edges)
    mermaid, dot = made.to_mermaid().splitlines(), made.to_dot().splitlines()
    assert sum(line.startswith("        c") for line in mermaid) == len(made)
    assert sum(line.startswith("        c") for line in dot) == len(made)
    assert sum(" --> " in line or " -->|" in line for line in mermaid) == len(edges) - guesses
    assert sum(" -.-> " in line or " -.->|" in line for line in mermaid) == guesses
    assert sum(" -> " in line for line in dot if line.startswith("    c")) == len(edges)
    assert sum("style=dashed" in line for line in dot if line.startswith("    c")) == guesses


# -- JSON and pictures


def test_json_schema(react: ProgramGraph) -> None:
    """The file has the keys that `to_json` documents."""
    data = json.loads(react.to_json())
    assert list(data) == ["format", "version", "program", "calls"]
    assert (data["format"], data["version"]) == ("weft.graph", 1)
    assert data["program"] == {"program_id": "prog-1", "session_id": "sess-1", "name": "answer"}
    assert data["calls"][3] == {
        "call_id": "answer",
        "thread_id": "t0",
        "label": "answer",
        "state": "finished",
        "parents": [{"call_id": "search", "exact": True}, {"call_id": "compute", "exact": False}],
        "tools": ["web", "calculator"],
        "arrival_s": 4.5,
        "completion_s": 5.0,
        "service_s": 0.5,
        "wait_s": 0.0,
        "preemptions": 0,
        "prompt_tokens": 0,
        "output_tokens": 3,
        "cached_tokens": 0,
        "swapped_tokens": 0,
        "recomputed_tokens": 0,
        "fetched_tokens": 0,
    }
    assert ProgramGraph.to_json.__doc__ is not None
    assert all(f'"{key}"' in ProgramGraph.to_json.__doc__ for key in (*data, *data["program"], *data["calls"][3]))


def test_mermaid(react: ProgramGraph) -> None:
    """Each thread has a box, the guess is dashed, the critical path is thick, and edges name the tools."""
    assert react.to_mermaid() == (
        "flowchart TD\n"
        '    subgraph t0["thread 0"]\n'
        '        c0["think<br/>1.000 s"]\n'
        '        c1["search<br/>1.000 s"]\n'
        '        c3["answer<br/>0.500 s"]\n'
        "    end\n"
        '    subgraph t1["thread 1"]\n'
        '        c2["compute<br/>3.000 s"]\n'
        "    end\n"
        '    c0 -->|"web 0.500 s"| c1\n'
        "    c0 --> c2\n"
        "    c1 --> c3\n"
        '    c2 -.->|"web, calculator 0.250 s"| c3\n'
        "    linkStyle 1,3 stroke-width:4px\n"
    )


def test_pictures_of_an_inner_program_name_the_program_around_it(react: ProgramGraph) -> None:
    """The picture says where the program was called; that of an outer program says nothing."""
    inner = ProgramGraph(ProgramId("prog-1"), SessionId("sess-1"), "in", ProgramId("prog-0"))
    for text in (inner.to_mermaid(), inner.to_dot()):
        assert '"inside the program prog-0"' in text
    for text in (react.to_mermaid(), react.to_dot()):
        assert "inside the program" not in text


def test_dot(react: ProgramGraph) -> None:
    """Each thread has a box, the guess is dashed, the critical path is thick, and edges name the tools."""
    assert react.to_dot() == (
        'digraph "answer" {\n'
        "    node [shape=box];\n"
        '    subgraph cluster_0 { label="thread 0";\n'
        '        c0 [label="think\\n1.000 s"];\n'
        '        c1 [label="search\\n1.000 s"];\n'
        '        c3 [label="answer\\n0.500 s"];\n'
        "    }\n"
        '    subgraph cluster_1 { label="thread 1";\n'
        '        c2 [label="compute\\n3.000 s"];\n'
        "    }\n"
        '    c0 -> c1 [label="web 0.500 s"];\n'
        "    c0 -> c2 [penwidth=3];\n"
        "    c1 -> c3;\n"
        '    c2 -> c3 [label="web, calculator 0.250 s", style=dashed, penwidth=3];\n'
        "}\n"
    )


def test_labels_are_escaped() -> None:
    """A label cannot break out of its quotes, and a call that has not finished shows its state."""
    made = graph('say "hi"\\')
    made.open(CallNode(CallId("a"), ThreadId("t"), label='"]; <b>\\\n#x'))
    assert '"#34;#93;#59; #60;b#62;#92;#10;#35;x<br/>0.000 s<br/>named"' in made.to_mermaid()
    assert made.to_dot().startswith('digraph "say \\"hi\\"\\\\" {')
    assert 'c0 [label="\\"]; <b>\\\\ #x\\n0.000 s\\nnamed"];' in made.to_dot()


def broken(change: Callable[[Any], object]) -> str:
    """Return the JSON of a graph of one call, after a change."""
    made = graph()
    run(made, node("a"), 0.0, 1.0)
    data = json.loads(made.to_json())
    change(data)
    return json.dumps(data)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        '"weft.graph"',
        "[" * 100_000,
        "{}",
        broken(lambda data: data.update(version=2)),
        broken(lambda data: data.update(format="other")),
        broken(lambda data: data.pop("program")),
        broken(lambda data: data["program"].update(name=7)),
        broken(lambda data: data.update(calls={"a": 1})),
        broken(lambda data: data.update(calls=[1])),
        broken(lambda data: data["calls"].append(data["calls"][0])),
        broken(lambda data: data["calls"][0].pop("service_s")),
        broken(lambda data: data["calls"][0].update(service_s="long")),
        broken(lambda data: data["calls"][0].update(service_s=True)),
        broken(lambda data: data["calls"][0].update(wait_s=float("nan"))),
        broken(lambda data: data["calls"][0].update(arrival_s=float("inf"))),
        broken(lambda data: data["calls"][0].update(state="gone")),
        broken(lambda data: data["calls"][0].update(parents=[{"call_id": "b", "exact": True}])),
        broken(lambda data: data["calls"][0].update(parents=[{"call_id": "a", "exact": True}])),
        broken(lambda data: data["calls"][0].update(parents=[{"call_id": "a"}])),
        broken(lambda data: data["calls"][0].update(parents=["a"])),
        broken(lambda data: data["calls"][0].update(tools=[1])),
    ],
)
def test_invalid_graphs_are_refused(text: str) -> None:
    """A text that is not a graph, has another version, or is inconsistent raises a TraceError of one line."""
    with pytest.raises(TraceError) as caught:
        ProgramGraph.from_json(text)
    assert "\n" not in str(caught.value)
    assert "to_json" in str(caught.value)
