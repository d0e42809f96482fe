"""Rows of Mooncake, of AIPerf and of Dynamo, made up here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from weft.core.errors import TraceError
from weft.core.trace.format import TraceProgram
from weft.core.trace.importers import TraceImport
from weft.core.trace.prefixes import block_hashes

BLOCK = 16


def imported(folder: Path, *rows: dict[str, Any], format: str | None = None) -> list[TraceProgram]:  # noqa: A002
    """The programs of a file with these rows, which has the format that is found or given."""
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return list(TraceImport([path], format=format))


def found_format(folder: Path) -> str:
    ((_, importer),) = TraceImport([folder / "rows.jsonl"]).files
    return importer.name


def row(tokens: int, ids: list[int], **values: Any) -> dict[str, Any]:
    return {"input_length": tokens, "output_length": 5, "hash_ids": ids} | values


def chains(program: TraceProgram) -> list[list[int]]:
    found = block_hashes(program)
    return [found[call.call_id].tolist() for call in program.calls]


# -- Mooncake


def test_each_row_is_a_program(tmp_path: Path) -> None:
    """Rows share their first blocks by their ids. The last block, which is not whole, cannot be shared."""
    first, second = imported(
        tmp_path, row(40, [7, 8, 9], timestamp=3000), row(34, [7, 8, 5], timestamp=4500, output_length=0)
    )
    assert found_format(tmp_path) == "mooncake"
    assert (first.program, first.arrival_s, first.block_tokens) == ("rows-1", 0.0, BLOCK)
    assert (second.program, second.arrival_s, second.calls[0].output_tokens) == ("rows-2", 1.5, 1)
    assert chains(first) == chains(second)
    assert len(chains(first)[0]) == 2
    assert first.end_known


def test_blocks_are_as_long_as_the_rows_say(tmp_path: Path) -> None:
    """Mooncake's have 512 tokens; a row that fits other sizes too does not mislead."""
    (first, _) = imported(tmp_path, row(300, [1]), row(6758, list(range(14))))
    assert first.block_tokens == 512
    assert imported(tmp_path, row(16, [1]), row(32, [1, 2]))[0].block_tokens == 16


def test_rows_without_ids_share_nothing(tmp_path: Path) -> None:
    """Upstream's other names of the keys are known."""
    (program,) = imported(tmp_path, {"input_tokens": 9, "output_tokens": 3, "created_time": 7})
    (call,) = program.calls
    assert (call.prompt_tokens, call.output_tokens, program.block_tokens) == (9, 3, None)


def test_sessions_that_repeat_their_prompts_are_chains(tmp_path: Path) -> None:
    """As Dynamo writes them: `delay` is the gap, and without it the time since the last row. Sessions may alternate."""
    programs = imported(
        tmp_path,
        row(32, [1, 2], session_id="a", timestamp=1000),
        row(32, [1, 3], session_id="b", timestamp=2000),
        row(48, [1, 2, 4], session_id="a", delay=250),
        row(48, [1, 3, 5], session_id="b", timestamp=2500),
    )
    assert found_format(tmp_path) == "mooncake"
    assert [(program.program, program.arrival_s) for program in programs] == [("a", 0.0), ("b", 1.0)]
    assert [[call.gap_s for call in program.calls] for program in programs] == [[0.0, 0.25], [0.0, 0.5]]
    assert [program.calls[1].shared_prefix_tokens for program in programs] == [32, 32]
    assert programs[0].calls[0].hash_ids[0] == programs[1].calls[0].hash_ids[0]


# -- AIPerf


def test_turns_add_to_the_history(tmp_path: Path) -> None:
    """The ids of a turn are those of what it adds. A conversation keeps all blocks it has had, the answers included;
    the first prompts share by their ids."""
    first, second = imported(
        tmp_path,
        row(40, [1, 2, 3], session_id="a", timestamp=0),
        row(20, [8, 9], session_id="a", delay=2000),
        row(40, [1, 2, 4], session_id="b", timestamp=500),
    )
    assert found_format(tmp_path) == "aiperf"
    assert [(call.prompt_tokens, call.gap_s, call.shared_prefix_tokens) for call in first.calls] == [
        (40, 0.0, 0),
        (65, 2.0, 32),
    ]
    whole, longer = chains(first)
    assert whole == longer[:2] == chains(second)[0]
    assert len(longer) == 4
    assert second.arrival_s == 0.5


def test_texts_are_counted_by_their_characters(tmp_path: Path) -> None:
    """Conversations on one line, with a system prompt that is sent with the first turn."""
    turns = [
        {"role": "system", "text": "s" * 40},
        {"text": "u" * 8, "output_length": 3},
        {"texts": ["v" * 4, {"contents": ["w" * 3]}], "output_length": 1, "delay": 500},
    ]
    (program,) = imported(tmp_path, {"session_id": "a", "turns": turns})
    assert found_format(tmp_path) == "aiperf"
    assert [(call.prompt_tokens, call.shared_prefix_tokens, call.gap_s) for call in program.calls] == [
        (12, 0, 0.0),
        (17, 15, 0.5),
    ]


# -- what is wrong


@pytest.mark.parametrize(
    ("name", "wrong", "message"),
    [
        ("mooncake", row(-1, []), "input_length is -1"),
        ("mooncake", row(16, [1, 2, 3]), "hash_ids has 3 blocks, but 16 tokens have only 1"),
        ("mooncake", row(16, ["a"]), "expected a list of whole numbers"),  # type: ignore[list-item]  # wrong on purpose
        ("mooncake", row(16, [1], timestamp="noon"), "timestamp is 'noon'"),
        ("mooncake", row(16, [1], session_id=7), "session_id is 7"),
        ("mooncake", row(16, [1], output_length=None), "output_length is None"),
        ("mooncake", {"output_length": 1}, "input_length is None"),
        ("aiperf", {"session_id": "x", "output_length": 1}, "there is no prompt"),
        ("aiperf", {"session_id": "x", "turns": 3}, "turns is 3"),
        ("aiperf", {"session_id": "x", "turns": [3]}, "turn 1: 3 is not an object"),
        ("aiperf", {"session_id": "x", "turns": [{"text": "a"}]}, "turn 1: output_length is None"),
        ("aiperf", {"session_id": "x", "turns": []}, "the session has no turn"),
        ("aiperf", row(10**9, [1], session_id="x"), "the prompt has 62500000 blocks; expected 1048576 at most"),
    ],
)
def test_a_wrong_row_is_refused(name: str, wrong: dict[str, Any], message: str, tmp_path: Path) -> None:
    """The error names file and line, also if rows before it were right."""
    good = [row(32, [1, 2], session_id=f"good {number}") for number in range(100)]
    with pytest.raises(TraceError, match=rf"rows\.jsonl, line 101.*{message}"):
        imported(tmp_path, *good, wrong, format=name)


def test_a_history_of_more_tokens_than_a_trace_holds_is_refused(tmp_path: Path) -> None:
    """Each turn is within the bound, and their sum is not."""
    turn = {"session_id": "x", "input_length": 10**15, "output_length": 5}
    with pytest.raises(TraceError, match=r"rows\.jsonl: a prompt of 'x' adds up to over 1e\+15 tokens"):
        imported(tmp_path, turn, turn, format="aiperf")


def test_ids_that_fit_no_size_of_blocks_are_refused(tmp_path: Path) -> None:
    """They would share what is not the same."""
    with pytest.raises(TraceError, match="no size of blocks fits the prompts"):
        imported(tmp_path, row(100, [1, 2]), row(100, [1, 2, 3]))
