"""Traces in the formats of tau-bench, BFCL, SWE-agent and Azure, with made-up texts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from weft.core.errors import TraceError
from weft.core.trace.format import TraceCall
from weft.core.trace.importers import TraceImport

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
    (program,) = TraceImport([path])
    assert (program.program, program.arrival_s, program.name) == ("tau-0-task-7", 0.0, "tau-bench")
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
    (program,) = TraceImport([tmp_path])
    assert (program.program, program.arrival_s, program.name) == ("multi_0", 0.0, "bfcl")
    assert program.calls == (
        TraceCall("c0", (), 3, 5, prompt="q" * 20),
        TraceCall("c1", ("c0",), 1, 58, tool="cd", shared_prefix_tokens=8),
        TraceCall("c2", ("c1",), 3, 61, tool="human", prompt="w" * 8, shared_prefix_tokens=59),
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1]", "run 1: 1 is not an object"),
        ("[{}]", "run 1: traj is None"),
        ("{}", "is not a list"),
        ('[{"traj": "abc", "task_id": 1}]', "run 1: traj is 'abc'"),
        ('[{"traj": [7], "task_id": 1}]', "run 1: 7 is not an object"),
        ('[{"traj": [{"role": "assistant"}], "task_id": 1}]', "run 1: a message cannot be read .*'content'"),
        ('[{"traj": [{"role": "user", "content": 5}]}]', "run 1: a message cannot be read"),
        ('[{"traj": []}]', "has no program"),
        ("[" * 100_000, "not JSON"),
    ],
)
def test_a_wrong_file_of_tau_bench_is_refused(text: str, message: str, tmp_path: Path) -> None:
    """The error names the file, the run and what was expected."""
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(TraceError, match=rf"other\.json.*{message}.*expected"):
        list(TraceImport([path], format="tau-bench"))


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
    with pytest.raises(TraceError, match=rf"is of BFCL's category '{category}'.*expected a multi-turn category"):
        list(TraceImport([tmp_path]))


def test_bfcl_without_answers_is_refused(tmp_path: Path) -> None:
    """The error names the file that is missing."""
    (tmp_path / "tasks.jsonl").write_text(json.dumps(TASK))
    with pytest.raises(TraceError, match=r"tasks\.answers\.jsonl cannot be read: No such file"):
        list(TraceImport([tmp_path / "tasks.jsonl"]))


def test_bfcl_with_answers_for_other_turns_is_refused(tmp_path: Path) -> None:
    """A turn without answers would be lost."""
    (tmp_path / "tasks.jsonl").write_text(json.dumps(TASK | {"question": TASK["question"][:1]}))
    (tmp_path / "tasks.answers.jsonl").write_text(json.dumps(ANSWER))
    with pytest.raises(TraceError, match=r"tasks\.jsonl, line 1: 1 turns, but answers for 2"):
        list(TraceImport([tmp_path]))


def test_swe_agent(tmp_path: Path) -> None:
    """A message of the assistant is a call, its command is the tool before the next one, and took the time of its step.
    Demonstrations belong to the prompt."""
    function = {"function": {"name": "edit", "arguments": "{}"}}
    history = [
        {"role": "system", "content": "s" * 40},
        {"role": "assistant", "content": "d" * 7, "is_demo": True},
        {"role": "user", "content": [{"type": "text", "text": "u" * 11}]},
        {"role": "assistant", "content": "a" * 8, "action": "ls -F"},
        {"role": "user", "content": "o" * 12},
        {"role": "assistant", "content": "", "action": "edit", "tool_calls": [function]},
        {"role": "tool", "content": "r" * 4},
        {"role": "assistant", "content": "done", "action": ""},
    ]
    steps = [{"execution_time": 1.5}, {"action": "edit"}, {}]
    (tmp_path / "run.traj").write_text(json.dumps({"history": history, "trajectory": steps}))
    (program,) = TraceImport([tmp_path])
    assert (program.program, program.name) == ("run", "swe-agent")
    assert program.calls == (
        TraceCall("c0", (), 2, 15),
        TraceCall("c1", ("c0",), 2, 20, gap_s=1.5, tool="ls", shared_prefix_tokens=17),
        TraceCall("c2", ("c1",), 1, 23, tool="edit", shared_prefix_tokens=22),
    )


@pytest.mark.parametrize(
    ("run", "message"),
    [
        ({}, "history is None"),
        ({"history": []}, "the run has no message of the assistant"),
        ({"history": [5]}, "message 1: 5 is not an object"),
        ({"history": [{"role": "user"}]}, "message 1: a message cannot be read"),
        ({"history": [{"role": "assistant", "content": "a"}] * 2, "trajectory": [3]}, "message 2: 3 is not an object"),
    ],
)
def test_a_wrong_trajectory_is_refused(run: object, message: str, tmp_path: Path) -> None:
    """The error names the file, the message and what was expected."""
    (tmp_path / "run.traj").write_text(json.dumps(run))
    with pytest.raises(TraceError, match=rf"run\.traj, line 1.*{message}.*expected"):
        list(TraceImport([tmp_path]))


def test_azure(tmp_path: Path) -> None:
    """A request is a program that arrives as long after the first one as its time says."""
    path = tmp_path / "code.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\r\n2023-11-16 18:17:03.9799600,4808,10\r\n"
        "2023-11-16 18:17:04.2299600,3180,0\r\n"
    )
    first, second = TraceImport([path])
    assert (first.program, first.arrival_s, first.calls) == ("code-2", 0.0, (TraceCall("c0", (), 10, 4808, at_s=0.0),))
    assert (second.arrival_s, second.calls[0].output_tokens) == (0.25, 1)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("yesterday,1,1", "TIMESTAMP is 'yesterday'"),
        ("2023-11-16 18:17:03,-1,1", "ContextTokens is '-1'"),
        ("2023-11-16 18:17:03,1", "has no cell for one of TIMESTAMP"),
        ("2023-11-16 18:17:03,1,9999999999999999", "at most 1e"),
    ],
)
def test_a_wrong_request_of_azure_is_refused(row: str, message: str, tmp_path: Path) -> None:
    """The error names file and line."""
    path = tmp_path / "code.csv"
    path.write_text(f"TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,1,1\n{row}\n")
    with pytest.raises(TraceError, match=rf"code\.csv, line 3: .*{message}"):
        list(TraceImport([path]))
