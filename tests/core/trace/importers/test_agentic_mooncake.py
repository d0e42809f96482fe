"""Dynamo's agentic rows of both versions, made up here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from weft.core.errors import TraceError
from weft.core.trace.format import TraceProgram
from weft.core.trace.importers import TraceImport
from weft.core.trace.prefixes import block_hashes

HEADER = {
    "schema": "dynamo.agentic_mooncake",
    "version": 2,
    "block_size": 4,
    "hash_id_scope": "local",
    "source": {"format": "test", "digest": "0"},
}


def imported(folder: Path, *rows: dict[str, Any]) -> list[TraceProgram]:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = TraceImport([path])
    assert [importer.name for _, importer in found.files] == ["agentic-mooncake"]
    return list(found)


def node(request_id: str, ids: list[int], *dependencies: tuple[str, str, float], **values: Any) -> dict[str, Any]:
    """A row of version 2, which depends on others: their ids, the triggers, and the delays in ms."""
    row = {"request_id": request_id, "play_id": "p", "session_id": "main", "model": "m", "not_before_ms": 0.0}
    row |= {"input_length": 4 * len(ids), "output_length": 3, "hash_ids": ids}
    keys = ("request_id", "trigger", "delay_ms")
    edges = [dict(zip(keys, each, strict=True), relation="sequence") for each in dependencies]
    return row | {"dependencies": edges} | values


def waiting(request_id: str, ids: list[int], *wait_for: str, **values: Any) -> dict[str, Any]:
    """A row of version 1."""
    row = {"request_id": request_id, "session_id": "main", "input_length": 4 * len(ids) - 1, "output_length": 3}
    return row | {"hash_ids": ids, "wait_for": list(wait_for)} | values


def test_version_2(tmp_path: Path) -> None:
    """A play is a program. A request comes after those that complete before it, as long as the shortest delay says; a
    session that is not the first one's is a sub-agent. Rows may come in any order."""
    first, second = imported(
        tmp_path,
        HEADER,
        node(
            "p:join", [1, 2, 3], ("p:root", "completion", 5000.0), ("p:child", "completion", 500.0), not_before_ms=9e3
        ),
        node("p:child", [7], ("p:root", "completion", 1000.0), session_id="p:Explore#2", not_before_ms=4e3),
        node("p:root", [1, 2], not_before_ms=2000.0),
        node("other", [1, 2], play_id="q"),
    )
    assert (first.program, first.arrival_s, first.block_tokens) == ("p", 2.0, 4)
    assert [(call.call_id, call.parents, call.gap_s, call.at_s, call.agent) for call in first.calls] == [
        ("root", (), 0.0, 0.0, None),
        ("child", ("root",), 1.0, 2.0, "Explore"),
        ("join", ("root", "child"), 0.5, 7.0, None),
    ]
    assert block_hashes(first)["join"][:2] == block_hashes(first)["root"]
    assert second.program == "q"
    assert not set(block_hashes(first)["root"]) & set(block_hashes(second)["other"]), "ids are those of a play"


def test_a_request_that_starts_beside_another_has_its_parents(tmp_path: Path) -> None:
    """A trace can only say what must have ended. What begins 2 s after another begins, begins 2 s later after the same
    calls."""
    (program,) = imported(
        tmp_path,
        HEADER,
        node("a", [1]),
        node("b", [1, 2], ("a", "completion", 1000.0)),
        node("c", [1, 3], ("b", "dispatch", 2000.0)),
        node("d", [4], ("a", "dispatch", 250.0)),
    )
    gaps = {call.call_id: (call.parents, call.gap_s) for call in program.calls}
    assert gaps == {"a": ((), 0.0), "b": (("a",), 1.0), "c": (("a",), 3.0), "d": ((), 0.25)}


def test_version_1(tmp_path: Path) -> None:
    """Requests that wait for one another are a program, wherever they are in the file. Ids of blocks hold in the whole
    file, and the rows do not say how long a block is."""
    first, second = imported(
        tmp_path,
        waiting("a", [1, 2], timestamp=1000.0, prefix_reset=True, branches=["b"]),
        waiting("x", [1, 5], timestamp=3000.0),
        waiting("b", [8], "a", session_id="child", delay=100.0, tool_wait_ms=400.0, timestamp=1700.0),
        waiting("c", [1, 2, 3, 4], "a", "b", delay=250.0),
    )
    assert (first.program, first.arrival_s, first.block_tokens) == ("main", 3.0, 4)
    assert (second.program, second.arrival_s) == ("main-2", 1.0)
    assert [(call.call_id, call.parents, call.gap_s, call.tool, call.agent) for call in second.calls] == [
        ("a", (), 0.0, None, None),
        ("b", ("a",), 0.5, "tool", "child"),
        ("c", ("a", "b"), 0.25, None, None),
    ]
    assert [call.at_s for call in second.calls] == [0.0, 0.7, None]
    assert first.calls[0].hash_ids[0] == second.calls[0].hash_ids[0]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([HEADER | {"version": 3}], "line 1: version is 3; expected 2"),
        ([HEADER | {"block_size": 0}], "line 1: block_size is 0"),
        ([HEADER], "has no program"),
        ([HEADER, node("a", [1]), HEADER], "line 3: a second header"),
        ([waiting("a", [1], tool_wait_ms=1), HEADER], "line 2: request_id is None|line 2: a header after rows"),
        ([HEADER, node("a", [1]), node("a", [1])], "line 3: request_id 'a' is there twice"),
        ([HEADER, node("a", [1], ("b", "completion", 0))], "line 2: it waits for 'b'"),
        ([HEADER, node("a", [1], ("b", "completion", 0)), node("b", [1], play_id="q")], "line 2: it waits for 'b'"),
        ([HEADER, node("a", [1], ("b", "never", 0))], "line 2: trigger is 'never'"),
        ([HEADER, node("a", [1], ("a", "dispatch", 0))], "line 2: requests wait for one another in a circle"),
        ([HEADER, node("a", [1], play_id=None)], "line 2: play_id is None"),
        ([HEADER, node("a", [1, 2, 3], input_length=4)], "line 2: hash_ids has 3 blocks, but 4 tokens have only 1"),
        ([waiting("a", [1], "b"), waiting("b", [1], "a")], "requests wait for one another in a circle"),
        ([waiting("a", [1], 7)], "line 1: wait_for has 7"),  # type: ignore[arg-type]  # wrong on purpose
        ([waiting("a", [1], delay=[])], r"line 1: delay is \[\]"),
    ],
)
def test_what_is_wrong_is_refused(rows: list[dict[str, Any]], message: str, tmp_path: Path) -> None:
    """The error names file and line."""
    with pytest.raises(TraceError, match=rf"rows\.jsonl.*({message})"):
        imported(tmp_path, *rows)
