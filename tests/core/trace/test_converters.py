"""Traces in the formats of tau-bench and BFCL, with made-up texts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from weft.core.errors import TraceError
from weft.core.sim import TraceCall
from weft.core.trace.converters import convert

TAU = [
    {
        "task_id": 7,
        "traj": [
            {"role": "system", "content": "s" * 40},
            {"role": "user", "content": "u" * 7},
            {"role": "assistant", "content": "a" * 9},
            {"role": "user", "content": "v" * 12},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"function": {"name": "find", "arguments": "{}"}, "id": "1", "type": "function"}],
            },
            {"role": "tool", "tool_call_id": "1", "name": "find", "content": "r" * 20},
            {"role": "assistant", "content": "done"},
        ],
    },
    {"task_id": 8, "traj": [{"role": "user", "content": "without an answer"}]},
]
TASK = {"id": "multi_0", "question": [[{"role": "user", "content": "q" * 20}], [{"role": "user", "content": "w" * 8}]]}
ANSWER = {"id": "multi_0", "ground_truth": [["cd(a='b')", "ls()"], ["rm(a='c')"]]}


def test_tau_bench(tmp_path: Path) -> None:
    """Each message of the assistant is a call, with all earlier messages in its prompt; four characters are a token.
    A program without such a message is left out."""
    path = tmp_path / "tau.json"
    path.write_text(json.dumps(TAU))
    (program,) = convert(path, [3.5])
    assert (program.program, program.arrival_s, program.name) == ("tau-0-task-7", 3.5, "tau-bench")
    system = "s" * 40 + "\n" + "u" * 7
    assert program.calls == (
        TraceCall("c0", (), 3, 12, prompt=system),
        TraceCall("c1", ("c0",), 2, 18, tool="human", prompt="v" * 12, shared_prefix_tokens=15),
        TraceCall("c2", ("c1",), 1, 25, tool="find", prompt="r" * 20, shared_prefix_tokens=20),
    )


def test_bfcl(tmp_path: Path) -> None:
    """Each function of the answers is a call; a user's turn is a human's answer, and a tool's result has 50 tokens."""
    (tmp_path / "tasks.jsonl").write_text(json.dumps(TASK) + "\n")
    (tmp_path / "tasks.answers.jsonl").write_text(json.dumps(ANSWER) + "\n")
    (program,) = convert(tmp_path / "tasks.jsonl")
    assert (program.program, program.arrival_s, program.name) == ("multi_0", 0.0, "bfcl")
    assert program.calls == (
        TraceCall("c0", (), 3, 5, prompt="q" * 20),
        TraceCall("c1", ("c0",), 1, 58, tool="cd", shared_prefix_tokens=8),
        TraceCall("c2", ("c1",), 3, 61, tool="human", prompt="w" * 8, shared_prefix_tokens=59),
    )


@pytest.mark.parametrize("text", ["[1]", "[{}]", '{"id": "x"}', "no", '[{"traj": "abc", "task_id": 1}]', "[" * 10_000])
def test_another_format_is_refused(text: str, tmp_path: Path) -> None:
    """The error names the file."""
    path = tmp_path / "other.jsonl"
    path.write_text(text)
    path.with_suffix(".answers.jsonl").write_text("")
    with pytest.raises(TraceError, match=r"other\.jsonl is not a file of tau-bench or BFCL"):
        convert(path)


@pytest.mark.parametrize("text", ["", "no", '{"version": 1, "program": "p", "calls": []}'])
def test_no_answers_are_asked_of_another_format(text: str, tmp_path: Path) -> None:
    """The user of such a file, which may be a trace of Weft, has never heard of a file with answers."""
    path = tmp_path / "other.jsonl"
    path.write_text(text)
    with pytest.raises(TraceError, match=r"other\.jsonl is not a file of tau-bench or BFCL"):
        convert(path)


@pytest.mark.parametrize(
    ("task_id", "category", "answer"),
    [
        ("simple_python_3", "simple_python", [{"triangle_area": {"base": [10], "unit": ["cm", ""]}}]),
        ("parallel_12", "parallel", [{"play": {"artist": ["a"]}}, {"play": {"artist": ["b"]}}]),
        ("live_simple_0-0-0", "live_simple", [{"get_info": {"user_id": [7890]}}]),
        ("exec_simple_9", "exec_simple", ["area(base=10)"]),
        ("web_search_1", "web_search", ["Paris"]),
        ("irrelevance_0", "irrelevance", None),
    ],
)
def test_another_category_of_bfcl_is_refused_by_its_name(
    task_id: str, category: str, answer: object, tmp_path: Path
) -> None:
    """Only multi-turn answers are lists of calls. Those of single-turn tasks map a function to acceptable arguments, of
    which only the function's name counted; those of other categories are texts, or are missing."""
    question = [[{"role": "user", "content": "q"}]]
    (tmp_path / "tasks.jsonl").write_text(json.dumps({"id": task_id, "question": question}))
    row = {"id": task_id, "ground_truth": answer} if answer is not None else {"id": "other", "ground_truth": []}
    (tmp_path / "tasks.answers.jsonl").write_text(json.dumps(row))
    with pytest.raises(TraceError, match=rf"has BFCL's category '{category}'.*Give a file of a multi-turn category"):
        convert(tmp_path / "tasks.jsonl")


def test_missing_files(tmp_path: Path) -> None:
    """The file itself may be missing, or the file with BFCL's answers."""
    with pytest.raises(TraceError, match=r"tasks\.jsonl cannot be read: No such file"):
        convert(tmp_path / "tasks.jsonl")
    (tmp_path / "tasks.jsonl").write_text(json.dumps(TASK))
    with pytest.raises(TraceError, match=r"tasks\.answers\.jsonl cannot be read: No such file"):
        convert(tmp_path / "tasks.jsonl")
