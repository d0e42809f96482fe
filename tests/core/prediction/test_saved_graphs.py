"""Execution graphs as JSON: a round trip, their bounds, and damaged data."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.core.errors import HistoryError
from weft.core.ids import CallId, ProgramId, ThreadId
from weft.core.policies.history import History
from weft.core.prediction import Cost, ExecutionGraphs, Node, Tier, saved_graphs
from weft.core.process_rows import CallIdentity


def run(graphs: ExecutionGraphs, name: str, seed: int) -> None:
    """A program of some calls, one after another or side by side."""
    rng, program, calls = random.Random(seed), ProgramId(f"p{seed}"), list[CallId]()
    for number in range(rng.randint(1, 9)):
        parents = tuple(rng.sample(calls, rng.randint(0, min(3, len(calls)))))
        calls.append(CallId(f"c{number}"))
        tools = [rng.choice(["", "search\n", "\ud800", "write"]), "read"]
        identity = CallIdentity(program, ThreadId("t"), calls[-1], parents)
        graphs.arrive(name, identity, label=rng.choice(["plan", "act"]), tools=tools, now_s=number)
        graphs.leave(program, calls[-1], Cost(rng.random(), rng.randint(1, 99), 7), number + rng.random())
    graphs.end(program)


def past(programs: int = 40) -> History:
    history = History()
    for seed in range(programs):
        run(history.graphs, f"agent {seed % 2}", seed)
    return history


def forecasts(graphs: ExecutionGraphs) -> Any:
    return [
        (name, template.ended, template.forecast(node), template.left(node))
        for name, template in graphs.templates
        for node in [*template.graph, Node("new")]
    ]


def test_forecasts_survive_their_journey() -> None:
    """Whatever labels and tools are called. What is learned afterwards is learned alike."""
    first = past(80)
    again = History.from_json(first.to_json())
    assert again.to_json() == first.to_json()
    assert [name for name, *_ in forecasts(again.graphs)] == [name for name, *_ in forecasts(first.graphs)]
    for (_, *found), (_, *expected) in zip(forecasts(again.graphs), forecasts(first.graphs), strict=True):
        assert found[0] == expected[0]
        for one, other in zip(found[1:], expected[1:], strict=True):
            assert numbers(one) == pytest.approx(numbers(other), rel=1e-4, abs=1e-4)
    assert again.graphs.tier("agent 0") is Tier.INFERRED
    again.graphs.check_integrity()


def numbers(value: Any) -> list[float]:
    if isinstance(value, tuple):
        return [each for part in value for each in numbers(part)]
    return [value] if isinstance(value, int | float) else []


def test_an_old_history_has_no_graphs() -> None:
    """It is read as before; so is a new one by a Weft that knows no graphs, because the key is one more."""
    text = json.dumps({"format": "weft-history", "version": 1, "models": {}})
    assert History.from_json(text).graphs.rows() == []


def test_a_scheduler_gets_the_history_without_graphs() -> None:
    """It would only cost time to send them."""
    assert "graphs" not in json.loads(past().to_json(with_graphs=False))


def test_graphs_of_a_newer_version_are_refused() -> None:
    """The file is set aside with a warning, like one that is newer as a whole."""
    text = json.dumps({"format": "weft-history", "version": 1, "models": {}, "graphs": {"version": 2}})
    with pytest.raises(HistoryError, match="version of its execution graphs is 2, and this Weft reads 1"):
        History.from_json(text)


def test_names_beyond_the_size_are_left_out_the_oldest_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file cannot grow without bound, and the programs of today matter more."""
    history = past()
    run(history.graphs, "latest", 99)
    monkeypatch.setattr(saved_graphs, "MOST_BYTES", 2500)
    names = [row["name"] for row in json.loads(history.to_json())["graphs"]["names"]]
    assert names == [] or names[0] == "agent 1"
    monkeypatch.setattr(saved_graphs, "MOST_BYTES", 0)
    assert json.loads(history.to_json())["graphs"]["names"] == []


DAMAGES: dict[str, Any] = {
    "no list": lambda data: data.update(names=3),
    "a row that is no object": lambda data: data.update(names=["chat"]),
    "a name that is none": lambda data: data["names"][0].update(name=None),
    "no nodes": lambda data: data["names"][0].pop("nodes"),
    "more weight than programs": lambda data: data["names"][0].update(weight=10**9),
    "no programs": lambda data: data["names"][0].update(ended=0),
    "a lost visit": lambda data: data["names"][0]["nodes"][0].__setitem__(3, 0.5),
    "a lost end": lambda data: data["names"][0]["nodes"][0].__setitem__(5, 99),
    "an edge to nowhere": lambda data: data["names"][0]["nodes"][0][8].append([999, 1, 1]),
    "a count below 0": lambda data: data["names"][0]["nodes"][0].__setitem__(4, -1),
    "a count that is none": lambda data: data["names"][0]["nodes"][0].__setitem__(4, float("nan")),
    "a node that is there twice": lambda data: data["names"][0]["nodes"].append(data["names"][0]["nodes"][0]),
    "costs that are missing": lambda data: data["names"][0]["nodes"][0].__setitem__(6, []),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_graphs_are_refused(damage: str) -> None:
    """One error names what is wrong, and the file is set aside."""
    data = json.loads(past().to_json())
    DAMAGES[damage](data["graphs"])
    with pytest.raises(HistoryError, match="execution graph"):
        History.from_json(json.dumps(data))


WRITTEN = past(8).to_json().encode()


@given(st.integers(0, len(WRITTEN) - 1), st.binary(max_size=3), st.booleans())
def test_damaged_bytes_are_refused_or_harmless(at: int, other: bytes, is_cut: bool) -> None:
    """Whatever happens to a file, it raises one error, or it holds graphs that can be written again and forecast."""
    damaged = WRITTEN[:at] + other + (b"" if is_cut else WRITTEN[at + len(other) :])
    try:
        history = History.from_json(damaged)
    except HistoryError:
        return
    history.graphs.check_integrity()
    forecasts(History.from_json(history.to_json()).graphs)
