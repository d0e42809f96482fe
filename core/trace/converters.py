"""Converts public agent traces to program traces: tau-bench's trajectories, and BFCL's multi-turn tasks.

These files have no token counts, so four characters count as one token. They have no times either, so gaps are 0, and
all programs arrive at 0 unless arrivals are given.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from weft.core.errors import TraceError
from weft.core.trace.format import TraceCall, TraceProgram
from weft.core.trace.workloads import WORKLOADS

_CHARS_PER_TOKEN: Final = 4
_RESULT_TOKENS: Final = 50  # assumed length of a tool's result in BFCL, whose files have no results


def convert(path: Path, arrivals: Iterable[float] = ()) -> list[TraceProgram]:
    """Return the programs of a file of tau-bench or BFCL.

    A tau-bench file is a JSON list of runs with `traj`. A BFCL file has a JSON object with `question` on each line.
    Next to it, the file of the same name that ends in `.answers.jsonl` has the calls of a correct agent. Only BFCL's
    multi-turn categories say which calls an agent makes one after the other.

    Args:
        path: the file.
        arrivals: the arrival times of the programs in seconds. Programs beyond the last time arrive at 0.

    Raises:
        TraceError: the file cannot be read, has neither format, or has another category of BFCL.
    """
    text = _read(path)
    try:
        if text.lstrip().startswith("["):
            programs = [_tau_bench(number, run) for number, run in enumerate(json.loads(text))]
        else:
            tasks = list(_lines(text))
            if not tasks or any("question" not in task for task in tasks):
                raise ValueError("it has no questions")
            answers = {row["id"]: row["ground_truth"] for row in _lines(_read(path.with_suffix(".answers.jsonl")))}
            for task in tasks:
                _check_turns(path, task, answers.get(task["id"]))
            programs = [_bfcl(task, answers[task["id"]]) for task in tasks]
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        if isinstance(error, TraceError):
            raise
        detail = " ".join(f"{type(error).__name__}: {error}".split())
        raise TraceError(
            f"{path} is not a file of tau-bench or BFCL ({detail:.100}). Give a file of one of these."
        ) from None
    times = itertools.chain(arrivals, itertools.repeat(0.0))
    return [
        replace(program, arrival_s=at) for program, at in zip((p for p in programs if p.calls), times, strict=False)
    ]


def _tau_bench(number: int, run: dict[str, Any]) -> TraceProgram:
    """Make one call for each message of the assistant, with all earlier messages as its prompt."""
    calls: list[TraceCall] = []
    new: list[str] = []
    tool = None
    for message in run["traj"]:
        if message["role"] == "assistant":
            calls.append(_next_call(calls, "\n".join(new), _text_of(message), tool))
            new, tool = [], None
        else:
            new.append(_text_of(message))
            tool = message["name"] if message["role"] == "tool" else "human"
    return TraceProgram(f"tau-{number}-task-{run['task_id']}", tuple(calls), name="tau-bench")


def _check_turns(path: Path, task: dict[str, Any], answers: object) -> None:
    """Refuse tasks whose answers are not a list of calls for each turn, as those of all categories but multi-turn.

    Raises:
        TraceError: The task is of another category.
    """
    is_by_turn = isinstance(answers, list) and all(
        isinstance(turn, list) and all(isinstance(function, str) for function in turn) for turn in answers
    )
    if not is_by_turn:
        category = re.sub(r"_[\d-]+$", "", str(task["id"]))
        raise TraceError(
            f"{path} has BFCL's category {category!r:.60}, whose answers are not lists of calls by turn, as task "
            f"{task['id']!r:.60} shows. Give a file of a multi-turn category (multi_turn_base, …)."
        )


def _bfcl(task: dict[str, Any], answers: list[list[str]]) -> TraceProgram:
    """Make one call for each function that a correct agent calls in each turn."""
    calls: list[TraceCall] = []
    for turn, functions in zip(task["question"], answers, strict=True):
        new, tool, result = "\n".join(_text_of(message) for message in turn), "human" if calls else None, 0
        for function in functions:
            calls.append(_next_call(calls, new, function, tool, result))
            new, tool, result = "", function.split("(")[0], _RESULT_TOKENS
    return TraceProgram(task["id"], tuple(calls), name="bfcl")


def _next_call(calls: list[TraceCall], new: str, output: str, tool: str | None, result_tokens: int = 0) -> TraceCall:
    history = calls[-1].prompt_tokens + calls[-1].output_tokens if calls else 0
    return TraceCall(
        call_id=f"c{len(calls)}",
        parents=(calls[-1].call_id,) if calls else (),
        output_tokens=max(1, _tokens(output)),
        prompt_tokens=history + _tokens(new) + result_tokens,
        tool=tool if calls else None,
        prompt=new or None,
        shared_prefix_tokens=history,
    )


def _text_of(message: dict[str, Any]) -> str:
    """Return the text of a message and of its tool calls."""
    calls = [each["function"] for each in message.get("tool_calls") or ()]
    return "\n".join([message["content"] or "", *(f"{each['name']}({each['arguments']})" for each in calls)]).strip()


def _tokens(text: str) -> int:
    return -(-len(text) // _CHARS_PER_TOKEN)


def _lines(text: str) -> Iterator[Any]:
    return (json.loads(line) for line in text.splitlines() if line.strip())


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = (error.strerror or str(error)) if isinstance(error, OSError) else "it is not UTF-8 text"
        raise TraceError(
            f"{path} cannot be read: {reason}. Give a file of tau-bench or BFCL, or a workload: {', '.join(WORKLOADS)}."
        ) from None
