"""Trajectories of benchmarks of agents: tau-bench, BFCL, SWE-agent."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from weft.core.errors import TraceError
from weft.core.trace.format import TraceCall, TraceProgram, text
from weft.core.trace.importers.contract import Blocks, Importer, begins
from weft.core.trace.importers.reading import a_list, an_object, documents, next_call, optional_seconds, rows, text_of

_EXPECTED: Final = "a list of tau-bench's runs, objects with task_id and traj"


def _read_tau(path: Path, _: Blocks, advance: Callable[[int], object]) -> Iterator[TraceProgram]:
    """Reads runs. Each message of the assistant is a call, with all earlier messages as its prompt."""
    for where, runs in documents(path, advance, _EXPECTED):
        if not isinstance(runs, list):
            raise TraceError(f"{where}: {runs!r:.40} is not a list; expected {_EXPECTED}.")
        for number, run in enumerate(runs):
            place = f"{where}, run {number + 1}"
            program = _run(number, an_object(run, place, "an object with task_id and traj"), place)
            if program.calls:
                yield program


TAU_BENCH: Final = Importer("tau-bench", "tau-bench's trajectories", begins("[", "traj"), _read_tau)


def _run(number: int, run: dict[str, Any], where: str) -> TraceProgram:
    calls: list[TraceCall] = []
    new: list[str] = []
    tool: str | None = None
    for each in a_list(run, "traj", where):
        message = an_object(each, where, "messages with role and content")
        if message.get("role") == "assistant":
            calls.append(next_call(calls, "\n".join(new), text_of(message, where), tool))
            new, tool = [], None
        else:
            new.append(text_of(message, where))
            name = message.get("name")
            tool = (name if isinstance(name, str) and name else "tool") if message.get("role") == "tool" else "human"
    return TraceProgram(f"tau-{number}-task-{run.get('task_id')!s:.100}", tuple(calls), name="tau-bench")


_RESULT_TOKENS: Final = 50  # assumed length of a tool's result: the files have no results
_TASK: Final = "a task of BFCL, an object with id and question"
_ANSWER: Final = "answers of BFCL, an object with id and ground_truth"


def _matches_bfcl(path: Path, head: str) -> bool:
    """Whether the file begins with a task."""
    return head.lstrip().startswith("{") and '"question"' in head and not path.name.endswith(".answers.jsonl")


def _read_bfcl(path: Path, _: Blocks, advance: Callable[[int], object]) -> Iterator[TraceProgram]:
    """Reads tasks. Each function that a correct agent calls is a call; a user's turn is a human's answer.

    Only multi-turn categories say which calls an agent makes one after the other.
    """
    first = next(rows(path, lambda _: None, _TASK), None)
    if first is None:
        return
    a_list(first[1], "question", first[0])  # a file of another format has no answers beside it
    beside = path.with_suffix(".answers.jsonl")
    answers = {
        text(row, "id", where, required=True): row.get("ground_truth")
        for where, row in rows(beside, lambda _: None, _ANSWER)
    }
    for where, task in rows(path, advance, _TASK):
        task_id = text(task, "id", where, required=True) or ""
        program = _task(task_id, a_list(task, "question", where), _turns(task_id, answers.get(task_id), where), where)
        if program.calls:
            yield program


BFCL: Final = Importer(
    "bfcl", "BFCL's multi-turn tasks, with their answers beside them in NAME.answers.jsonl", _matches_bfcl, _read_bfcl
)


def _turns(task_id: str, answers: object, where: str) -> list[list[str]]:
    """The calls of each turn. Categories other than multi-turn have answers of other shapes."""
    if isinstance(answers, list) and all(
        isinstance(turn, list) and all(isinstance(function, str) for function in turn) for turn in answers
    ):
        return answers
    category = re.sub(r"_[\d-]+$", "", task_id)
    raise TraceError(
        f"{where}: task {task_id!r:.60} is of BFCL's category {category!r:.60}, whose answers are not lists of calls "
        "by turn; expected a multi-turn category (multi_turn_base, …)."
    )


def _task(task_id: str, question: list[Any], answers: list[list[str]], where: str) -> TraceProgram:
    if len(question) != len(answers):
        raise TraceError(f"{where}: {len(question)} turns, but answers for {len(answers)}; expected as many.")
    calls: list[TraceCall] = []
    for turn, functions in zip(question, answers, strict=True):
        if not isinstance(turn, list):
            raise TraceError(f"{where}: a turn is {turn!r:.40}; expected a list of messages.")
        messages = [an_object(message, where, "messages with role and content") for message in turn]
        new, tool, result = "\n".join(text_of(message, where) for message in messages), "human", 0
        for function in functions:
            calls.append(next_call(calls, new, function, tool, more_tokens=result))
            new, tool, result = "", function.split("(")[0] or "tool", _RESULT_TOKENS
    return TraceProgram(task_id, tuple(calls), name="bfcl")


_EXPECTED_TRAJECTORY: Final = "a trajectory of SWE-agent, an object with history"


def _matches_swe(path: Path, head: str) -> bool:
    """Whether the file is called so, or begins like one."""
    return head.lstrip().startswith("{") and (
        path.suffix == ".traj" or ('"trajectory"' in head and '"observation"' in head)
    )


def _read_swe(path: Path, _: Blocks, advance: Callable[[int], object]) -> Iterator[TraceProgram]:
    """Reads a run. Each message of the assistant is a call, with all earlier messages as its prompt.

    SWE-agent may shorten old messages before it sends them. That is not followed.
    """
    for where, data in documents(path, advance, _EXPECTED_TRAJECTORY):
        yield _trajectory(path.stem, an_object(data, where, _EXPECTED_TRAJECTORY), where)


SWE_AGENT: Final = Importer("swe-agent", "SWE-agent's .traj files", _matches_swe, _read_swe)


def _trajectory(name: str, run: dict[str, Any], where: str) -> TraceProgram:
    steps = a_list(run, "trajectory", where) if run.get("trajectory") is not None else []
    calls: list[TraceCall] = []
    new: list[str] = []
    tool: str | None = None
    for number, each in enumerate(a_list(run, "history", where), 1):
        place = f"{where}, message {number}"
        message = an_object(each, place, "a message with role and content")
        if message.get("role") != "assistant" or message.get("is_demo"):
            new.append(text_of(message, place))
            continue
        step = steps[len(calls) - 1] if 0 < len(calls) <= len(steps) else {}
        taken_s = optional_seconds(an_object(step, place, "steps with execution_time"), "execution_time", place) or 0.0
        call = next_call(calls, "\n".join(new), text_of(message, place), tool, gap_s=taken_s)
        calls.append(replace(call, prompt=None))
        new, tool = [], _command(message)
    if not calls:
        raise TraceError(f"{where}: the run has no message of the assistant; expected at least one.")
    return TraceProgram(name, tuple(calls), name="swe-agent")


def _command(message: dict[str, Any]) -> str:
    """The name of the command that an answer gave."""
    for call in message.get("tool_calls") or ():
        return str(call["function"]["name"]) or "tool"  # `text_of` has read it
    action = message.get("action")
    words = action.split() if isinstance(action, str) else []
    return words[0] if words else "tool"
