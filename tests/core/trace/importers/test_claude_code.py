"""Logs in Claude Code's form, as version 2.1.197 writes them, with made-up texts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from trace_samples import SAMPLES, claude_line

from weft.core.errors import TraceError
from weft.core.trace.format import TraceCall, TraceProgram
from weft.core.trace.importers import TraceImport

FILES = SAMPLES["claude-code"]


def written(folder: Path, rows: list[dict[str, Any]], name: str = "session.jsonl") -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def lines_of(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in FILES[name].splitlines()]


def shape(program: TraceProgram) -> list[tuple[str, tuple[str, ...], float, str | None, str | None]]:
    return [(call.call_id, call.parents, call.gap_s, call.tool, call.agent) for call in program.calls]


EXPECTED = (
    TraceCall("c0", (), 5, 10, at_s=0.0),
    TraceCall("c1", ("c0",), 8, 19, gap_s=3.0, tool="Bash", shared_prefix_tokens=15, at_s=4.5),
    TraceCall("c3", ("c1",), 4, 31, gap_s=0.5, at_s=6.5, agent="Explore"),
    TraceCall("c4", ("c3",), 6, 44, gap_s=3.0, tool="Grep", shared_prefix_tokens=35, at_s=11.5, agent="Explore"),
    TraceCall("c2", ("c1", "c4"), 2, 27, gap_s=1.0, tool="Task", shared_prefix_tokens=27, at_s=19.5),
)


@pytest.mark.parametrize("place", ["{}", "session/subagents/{}"])
def test_a_session_is_a_program_whose_sub_agents_are_branches_that_join(place: str, tmp_path: Path) -> None:
    """An answer is one call, however many lines it has, and its last line has its tokens. A sub-agent comes after the
    call that started it, and before the one that has its result. Its file is beside the session's, or in its folder."""
    for name, data in FILES.items():
        path = tmp_path / (name if name == "session.jsonl" else place.format(name))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    found = TraceImport([tmp_path])
    (program,) = found
    assert (program.program, program.name, program.arrival_s) == ("session", "claude-code", 0.5)
    assert program.calls == EXPECTED
    assert (found.left_out, found.counts.calls_unused) == ([], 0)


@pytest.mark.parametrize("how", ["result", "prompt", "inline"])
def test_a_sub_agent_without_a_meta_file_is_found_by_its_result_or_its_prompt(how: str, tmp_path: Path) -> None:
    """Earlier versions wrote no such file, and once all lines into the session's."""
    main, agent = lines_of("session.jsonl"), lines_of("agent-a1.jsonl")
    if how != "result":
        del main[6]["toolUseResult"]
    if how == "inline":
        for row in agent:
            del row["agentId"]
        main[6:6] = agent
    else:
        written(tmp_path, agent, "agent-a1.jsonl")
    (program,) = TraceImport([written(tmp_path, main)])
    calls = {call.at_s: call for call in program.calls}
    assert [(call.prompt_tokens, call.agent) for call in program.calls] == [
        (call.prompt_tokens, call.agent) for call in EXPECTED
    ]
    assert calls[6.5].parents == (calls[4.5].call_id,)
    assert calls[19.5].parents == (calls[4.5].call_id, calls[11.5].call_id)


def test_a_sub_agent_that_nothing_ties_to_a_call_follows_the_last_one_before_it(tmp_path: Path) -> None:
    """Its session has neither its result nor its prompt."""
    main, agent = lines_of("session.jsonl"), lines_of("agent-a1.jsonl")
    del main[6]["toolUseResult"]
    agent[0]["message"]["content"] = "Another prompt than that of the call"
    written(tmp_path, agent, "agent-a1.jsonl")
    (program,) = TraceImport([written(tmp_path, main)])
    calls = {call.at_s: call for call in program.calls}
    assert (calls[6.5].parents, calls[6.5].agent) == ((calls[4.5].call_id,), "subagent")
    assert calls[19.5].parents == (calls[4.5].call_id,)


def test_a_sub_agent_in_the_background_joins_where_its_end_is_told(tmp_path: Path) -> None:
    """The result that only says that it was launched does not wait for it. The message that says it has ended does."""
    main = lines_of("session.jsonl")
    main[6]["toolUseResult"]["status"] = "async_launched"
    told = "<task-notification>\n<task-id>a1</task-id>\n</task-notification>"
    main += [
        claude_line("user", "u8", "u7", "00:30.000", told, origin={"kind": "task-notification"}),
        claude_line("assistant", "u9", "u8", "00:31.000", "Thanks.", usage=(6, 29, 2)),
    ]
    (tmp_path / "agent-a1.jsonl").write_bytes(FILES["agent-a1.jsonl"])
    (program,) = TraceImport([written(tmp_path, main)])
    parents = {call.call_id: call.parents for call in program.calls}
    assert parents == {"c0": (), "c1": ("c0",), "c2": ("c1",), "c3": ("c2", "c5"), "c4": ("c1",), "c5": ("c4",)}
    assert {call.call_id: call.tool for call in program.calls}["c3"] is None, "no human wrote"


def test_what_a_human_writes_is_told_from_a_tools_result(tmp_path: Path) -> None:
    """So is what Claude Code writes itself, and its own answers are no calls."""
    rows = [
        claude_line("user", "u1", None, "00:00.000", "Hello"),
        claude_line("assistant", "u2", "u1", "00:01.000", "Hi.", usage=(9, 0, 5)),
        claude_line("user", "u3", "u2", "01:00.000", [{"type": "text", "text": "Go on."}]),
        {"type": "attachment", "uuid": "x", "parentUuid": "u3", "timestamp": "2026-11-25T10:01:00.5Z"},
        claude_line("assistant", "u4", "x", "01:02.000", "Yes.", usage=(2, 15, 5)),
        claude_line("user", "u5", "u4", "02:00.000", "Interrupted", isMeta=True),
        claude_line("assistant", "u6", "u5", "02:01.000", "No response", usage=(0, 0, 0)),
        claude_line("assistant", "u7", "u6", "02:02.000", "Yes.", usage=(2, 20, 5)),
    ]
    rows[6]["message"]["model"] = "<synthetic>"
    (program,) = TraceImport([written(tmp_path, rows)])
    assert shape(program) == [
        ("c0", (), 0.0, None, None),
        ("c1", ("c0",), 59.5, "human", None),
        ("c2", ("c1",), 59.0, None, None),
    ]


def test_a_compacted_conversation_keeps_what_the_cache_had(tmp_path: Path) -> None:
    """Its prompt is shorter than the one before. A line that follows nothing continues the conversation."""
    rows = [
        claude_line("user", "u1", None, "00:00.000", "Hello"),
        claude_line("assistant", "u2", "u1", "00:01.000", "Hi.", usage=(90, 0, 5)),
        {
            "type": "system",
            "uuid": "b",
            "parentUuid": None,
            "logicalParentUuid": "u2",
            "timestamp": "2026-11-25T10:02Z",
        },
        claude_line("assistant", "u4", "b", "02:02.000", "Yes.", usage=(20, 15, 5)),
        claude_line("assistant", "u6", None, "02:03.000", "Yes.", usage=(40, 0, 5)),
    ]
    (program,) = TraceImport([written(tmp_path, rows)])
    assert [(call.parents, call.prompt_tokens, call.shared_prefix_tokens) for call in program.calls] == [
        ((), 91, 0),
        (("c0",), 36, 15),
        (("c1",), 41, 41),
    ]


def test_a_session_that_was_rewound_has_two_ends(tmp_path: Path) -> None:
    """A call comes after the one whose answer it has, and not after the one that was made before it."""
    rows = [
        claude_line("user", "u1", None, "00:00.000", "Hello"),
        claude_line("assistant", "u2", "u1", "00:01.000", "Hi.", usage=(9, 0, 5)),
        claude_line("user", "u3", "u2", "00:02.000", "One"),
        claude_line("assistant", "u4", "u3", "00:03.000", "1.", usage=(9, 9, 5)),
        claude_line("user", "u5", "u2", "00:09.000", "Two"),
        claude_line("assistant", "u6", "u5", "00:10.000", "2.", usage=(9, 9, 5)),
    ]
    (program,) = TraceImport([written(tmp_path, rows)])
    assert shape(program)[1:] == [("c1", ("c0",), 1.0, "human", None), ("c2", ("c0",), 8.0, "human", None)]


def test_calls_that_a_session_repeats_from_another_are_counted_once(tmp_path: Path) -> None:
    """A session that is forked begins with the lines of the first one. Times count from the earliest session."""
    main = lines_of("session.jsonl")[:5]
    fork = [row | {"sessionId": "fork"} for row in main]
    fork.append(claude_line("assistant", "f1", "u4", "09:00.000", "Else.", usage=(9, 9, 5)))
    paths = [written(tmp_path, main), written(tmp_path, fork, "z.jsonl"), written(tmp_path, main, "again.jsonl")]
    found = TraceImport(paths)
    assert [(program.program, program.arrival_s, len(program.calls)) for program in found] == [
        ("session", 0.5, 2),
        ("z", 6.0, 1),
    ]
    assert found.counts.calls_unused == 4


def test_a_session_keeps_its_sub_agents_when_a_fork_repeats_its_calls(tmp_path: Path) -> None:
    """Wherever the fork is in the folder. It has the calls that it made itself."""
    main = lines_of("session.jsonl")
    written(tmp_path, main)
    written(tmp_path, lines_of("agent-a1.jsonl"), "session/subagents/agent-a1.jsonl")
    again = claude_line("assistant", "f1", "u7", "09:00.000", "Else.", usage=(9, 9, 5))
    written(tmp_path, [*main, again], "a-fork.jsonl")
    programs = {program.program: program for program in TraceImport([tmp_path])}
    assert [call.parents for call in programs["session"].calls] == [call.parents for call in EXPECTED]
    assert [call.at_s for call in programs["a-fork"].calls] == [0.0]


def test_a_fork_does_not_take_the_calls_of_the_session_that_it_continues(tmp_path: Path) -> None:
    """Its name may come first. Version 2.1.197 writes into it when it began, and then the other session's lines."""
    main = lines_of("session.jsonl")[:5]
    begun = [
        {"type": "queue-operation", "operation": "enqueue", "timestamp": f"2026-11-25T10:{at}Z"}
        for at in ("00:00.000", "08:00.000")
    ]
    own = [
        claude_line("user", "f1", "u4", "08:01.000", "And now?"),
        claude_line("assistant", "f2", "f1", "09:00.000", "Else.", usage=(9, 9, 5)),
    ]
    written(tmp_path, [begun[0], *main], "z.jsonl")
    written(tmp_path, [begun[1], *main, *own], "a-fork.jsonl")
    found = TraceImport([tmp_path])
    assert {program.program: len(program.calls) for program in found} == {"z": 2, "a-fork": 1}
    assert found.counts.calls_unused == 2


def test_a_folder_may_have_sessions_in_which_nobody_answered(tmp_path: Path) -> None:
    """They are listed. A file that is named must have an answer."""
    empty = written(tmp_path, lines_of("session.jsonl")[:2], "empty.jsonl")
    written(tmp_path, lines_of("session.jsonl"))
    found = TraceImport([tmp_path])
    assert len(list(found)) == 1
    assert found.empty == [empty]
    with pytest.raises(TraceError, match=r"empty\.jsonl has no program; expected Claude Code's logs"):
        list(TraceImport([empty]))


def test_a_sub_agent_whose_session_is_not_there_is_a_program(tmp_path: Path) -> None:
    """Its file has all that is known."""
    (tmp_path / "agent-a1.jsonl").write_bytes(FILES["agent-a1.jsonl"])
    (program,) = TraceImport([tmp_path])
    assert shape(program) == [("c0", (), 0.0, None, None), ("c1", ("c0",), 3.0, "Grep", None)]


def broken(number: int, **values: Any) -> list[dict[str, Any]]:
    rows = lines_of("session.jsonl")
    rows[number] |= values
    return rows


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (broken(2, type=None), "line 3: type is None"),
        (broken(2, uuid=None), "line 3: there is no uuid"),
        (broken(2, timestamp="yesterday"), r"line 3: timestamp is 'yesterday'; expected a date such as 2026"),
        (broken(2, timestamp=None), "line 3: there is no timestamp"),
        (broken(2, message=[]), r"line 3: \[\] is not an object; expected an object with usage"),
        (broken(2, message={"usage": None}), "line 3: None is not an object; expected an object with input_tokens"),
        (broken(2, message={"usage": {"input_tokens": -1}}), "line 3: input_tokens is -1"),
        (broken(3, message={"content": 7}), "line 4: content is 7; expected a list"),
        (broken(3, message={"content": [7]}), "line 4: 7 is not an object"),
    ],
)
def test_a_wrong_log_is_refused(rows: list[dict[str, Any]], message: str, tmp_path: Path) -> None:
    """The error names the file, the line and what was expected."""
    with pytest.raises(TraceError, match=rf"session\.jsonl, {message}"):
        list(TraceImport([written(tmp_path, rows)]))


@pytest.mark.parametrize("meta", ["[]", '{"toolUseId": 7}', "{", "[" * 100_000])
def test_a_wrong_file_about_a_sub_agent_is_refused(meta: str, tmp_path: Path) -> None:
    """It is named, and not the session's."""
    for name, data in FILES.items():
        (tmp_path / name).write_bytes(data)
    (tmp_path / "agent-a1.meta.json").write_text(meta)
    with pytest.raises(TraceError, match=r"agent-a1\.meta\.json"):
        list(TraceImport([tmp_path]))


def test_sub_agents_that_start_one_another_are_refused(tmp_path: Path) -> None:
    """Nothing could ever begin."""
    agents = ("a", "b")
    for this, other in (agents, agents[::-1]):
        tool = {"type": "tool_use", "id": f"toolu_{this}", "name": "Agent", "input": {}}
        row = claude_line("assistant", this, None, "00:01.000", [tool], usage=(1, 0, 1), isSidechain=True)
        written(tmp_path, [row], f"agent-{this}.jsonl")
        (tmp_path / f"agent-{this}.meta.json").write_text(json.dumps({"toolUseId": f"toolu_{other}"}))
    with pytest.raises(TraceError, match=r"session\.jsonl: its calls wait for one another in a circle"):
        list(TraceImport([written(tmp_path, lines_of("session.jsonl"))]))
