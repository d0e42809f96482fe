"""Sessions in the form of Weka's kv-cache-tester, made up here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from weft.core.errors import TraceError
from weft.core.trace.format import TraceProgram
from weft.core.trace.importers import TraceImport
from weft.core.trace.prefixes import block_hashes

BLOCK = 4


def request(at_s: float, ids: list[int], out: int = 4, **values: Any) -> dict[str, Any]:
    """A request whose prompt has these blocks, and two tokens more."""
    row = {"t": at_s, "type": "n", "model": "m", "in": BLOCK * len(ids) + 2, "out": out, "hash_ids": ids}
    return row | {"input_types": ["tool_result"], "api_time": 2.0} | values


def subagent(at_s: float, requests: list[dict[str, Any]], **values: Any) -> dict[str, Any]:
    row = {"t": at_s, "type": "subagent", "agent_id": "agent_001", "subagent_type": "Explore", "status": "completed"}
    return row | {"requests": requests} | values


def session(*requests: dict[str, Any], **values: Any) -> dict[str, Any]:
    return {"id": "s", "block_size": BLOCK, "hash_id_scope": "local", "requests": requests} | values


def imported(folder: Path, *sessions: dict[str, Any]) -> list[TraceProgram]:
    """The programs of a folder with a file for each session."""
    for number, each in enumerate(sessions):
        (folder / f"{number}.json").write_text(json.dumps(each))
    return list(TraceImport([folder]))


def test_requests_follow_one_another(tmp_path: Path) -> None:
    """Think times are gaps, inputs tell tools from humans, and an answer without a token gets one."""
    (program,) = imported(
        tmp_path,
        session(
            request(0.0, [7, 8], out=3, input_types=["text"], think_time=0.0),
            request(9.0, [7, 8, 9], out=0, think_time=7.0),
            request(20.0, [7, 6], input_types=["text"], think_time=9.0),
        ),
    )
    first, second, third = program.calls
    assert (program.program, program.name, program.block_tokens) == ("s", "claude-code", BLOCK)
    assert [(call.parents, call.tool, call.gap_s, call.at_s, call.agent) for call in program.calls] == [
        ((), None, 0.0, 0.0, None),
        ((first.call_id,), "tool", 7.0, 9.0, None),
        ((second.call_id,), "human", 9.0, 20.0, None),
    ]
    assert [(call.prompt_tokens, call.output_tokens) for call in program.calls] == [(10, 3), (14, 1), (10, 4)]
    assert (second.shared_prefix_tokens, third.shared_prefix_tokens) == (12, 4)


@pytest.mark.parametrize("marked_by", ["its start", "its end", "the session's start"])
def test_sub_agents_are_branches_that_join(marked_by: str, tmp_path: Path) -> None:
    """Two sub-agents start after a call; the next call waits for both. Their time is that of their start or, as in the
    public corpus, that of their end; the times of their requests count from it, or from the session's start."""
    first = [request(0.0, [5], think_time=0.0), request(4.0, [5, 6], think_time=2.0)]
    second = [request(0.0, [5, 7])]
    offset_s = 3.0 if marked_by == "the session's start" else 0.0
    for row in (*first, *second):
        row["t"] += offset_s
    ends = marked_by == "its end"
    (program,) = imported(
        tmp_path,
        session(
            request(0.0, [1, 2], think_time=0.0),
            subagent(9.0 if ends else 3.0, first, duration_ms=6000),
            subagent(5.0 if ends else 3.0, second, duration_ms=2000),
            request(10.0, [1, 2, 3], think_time=8.0),
        ),
    )
    assert [(call.parents, call.agent, call.at_s, call.gap_s) for call in program.calls] == [
        ((), None, 0.0, 0.0),
        (("c0",), "Explore", 3.0, 1.0),
        (("c1",), "Explore", 7.0, 2.0),
        (("c0",), "Explore", 3.0, 1.0),
        (("c0", "c2", "c3"), None, 10.0, 1.0),
    ]
    chains = block_hashes(program)
    assert chains["c1"][:1] == chains["c3"][:1] != chains["c0"][:1]
    assert chains["c4"][:2] == chains["c0"][:2]
    assert program.calls[0].hash_ids[:3] == chains["c4"][:3], "the main agent's next call repeats the output"


def test_nobody_waits_for_a_sub_agent_in_the_background(tmp_path: Path) -> None:
    """The next call follows the one before it alone."""
    background = subagent(3.0, [request(0.0, [5])], status="async_launched", duration_ms=None)
    (program,) = imported(tmp_path, session(request(0.0, [1]), background, request(9.0, [1, 2], think_time=7.0)))
    assert [call.parents for call in program.calls] == [(), ("c0",), ("c0",)]
    assert program.calls[2].gap_s == 7.0


def test_times_are_whole_microseconds(tmp_path: Path) -> None:
    """A sum of decimal fractions would have a tail that an export cuts off, and come back as another number."""
    (program,) = imported(
        tmp_path, session(request(0.1, [1]), subagent(0.2, [request(0.1, [2])]), request(0.7, [1, 3], api_time=0.1))
    )
    times = [(call.at_s, call.gap_s) for call in program.calls]
    assert times == [(round(at_s, 6), round(gap_s, 6)) for at_s, gap_s in times]


def test_a_call_whose_end_is_not_recorded_bounds_the_gap(tmp_path: Path) -> None:
    """There, `think_time` counts from the end of an earlier call, so the gap is at most the time between the calls."""
    streamed = request(14.0, [1, 2], think_time=12.0, api_time=None)
    (program,) = imported(tmp_path, session(request(0.0, [1]), streamed, request(60.0, [1, 2, 3], think_time=58.0)))
    assert [call.gap_s for call in program.calls] == [0.0, 12.0, 46.0]


@pytest.mark.parametrize(("scope", "shared"), [("local", False), ("global", True)])
def test_sessions_share_blocks_if_the_scope_says_so(scope: str, shared: bool, tmp_path: Path) -> None:
    """Equal ids of two sessions are the same tokens only in the scope `global`."""
    sessions = [session(request(0.0, [1, 2]), id=name, hash_id_scope=scope) for name in "ab"]
    first, second = imported(tmp_path, *sessions)
    assert (first.calls[0].hash_ids == second.calls[0].hash_ids) is shared
    assert (set(first.calls[0].hash_ids) & set(second.calls[0].hash_ids) != set()) is shared


def test_a_file_may_have_a_session_on_each_line(tmp_path: Path) -> None:
    """And a session may extend over several lines."""
    lines = [json.dumps(session(request(0, [1]), id=each)) for each in "ab"]
    (tmp_path / "lines.jsonl").write_text("\n".join(lines))
    (tmp_path / "pretty.json").write_text(json.dumps(session(request(0, [1]), id="c"), indent=1))
    assert [program.program for program in TraceImport([tmp_path])] == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (session(), "the session has no request"),
        (session(id=None), "id is None"),
        (session(block_size=0), "block_size is 0"),
        (session(hash_id_scope="world"), "hash_id_scope is 'world'; expected local or global"),
        (session(requests={}), "requests is {}; expected a list"),
        (session(request(0, [1]), 5), "request 2: 5 is not an object"),  # type: ignore[arg-type]  # wrong on purpose
        (session(request(-1, [1])), "request 1: t is -1"),
        (session(request(0, [1, 2, 3, 4]) | {"in": 9}), "request 1: hash_ids has 4 blocks, but 9 tokens have only 3"),
        (session(request(0, [1]) | {"hash_ids": ["x"]}), "request 1: hash_ids is .*expected a list of whole numbers"),
        (session(request(0, [1]) | {"in": "9"}), "request 1: in is '9'"),
        (session(request(0, [1], think_time="long")), "request 1: think_time is 'long'"),
        (session(request(0, [1]), subagent(1, [{}])), "request 2, request 1: t is None|request 2.*out is None"),
        (session(subagent(1, []) | {"requests": None}), "request 1: requests is None"),
        (session(subagent(1, []) | {"duration_ms": 10**400}), "request 1: duration_ms is 1000.*expected a number"),
    ],
)
def test_a_wrong_session_is_refused(wrong: dict[str, Any], message: str, tmp_path: Path) -> None:
    """The error names the file, the place and what was expected."""
    path = tmp_path / "wrong.json"
    path.write_text(json.dumps(wrong))
    with pytest.raises(TraceError, match=rf"wrong\.json, line 1.*{message}"):
        list(TraceImport([path], format="weka"))


def test_a_file_that_was_cut_is_refused(tmp_path: Path) -> None:
    """The error says that it is not JSON, and what was expected."""
    path = tmp_path / "cut.json"
    path.write_text(json.dumps(session(request(0, [1, 2])))[:-9])
    with pytest.raises(TraceError, match=r"cut\.json: not JSON .*line 1.*expected a Weka session"):
        list(TraceImport([path]))


def test_sub_agents_that_are_nested_too_deeply_are_refused(tmp_path: Path) -> None:
    """Python could not follow them."""
    path = tmp_path / "deep.json"
    rows = '{"type": "subagent", "t": 0, "requests": ['
    path.write_text('{"id": "s", "block_size": 4, "requests": [' + rows * 600 + "]}" * 600 + "]}")
    with pytest.raises(TraceError, match=r"nested too deeply|has no request|not JSON"):
        list(TraceImport([path], format="weka"))
