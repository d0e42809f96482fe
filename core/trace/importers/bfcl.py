"""Multi-turn tasks of BFCL: an object with `question` on each line, and a file with the calls of a correct agent.

That file is next to it and has the same name, but ends in `.answers.jsonl`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from weft.core.errors import TraceError
from weft.core.trace.fields import text
from weft.core.trace.format import TraceCall, TraceProgram
from weft.core.trace.importers.contract import Blocks
from weft.core.trace.importers.messages import next_call, text_of
from weft.core.trace.importers.reading import a_list, an_object, rows

_RESULT_TOKENS: Final = 50  # assumed length of a tool's result: the files have no results
_TASK: Final = "a task of BFCL, an object with id and question"
_ANSWER: Final = "answers of BFCL, an object with id and ground_truth"


class Bfcl:
    """Reads tasks. Each function that a correct agent calls is a call; a user's turn is a human's answer.

    Only multi-turn categories say which calls an agent makes one after the other.
    """

    name: str = "bfcl"
    description: str = "BFCL's multi-turn tasks, with their answers beside them in NAME.answers.jsonl"

    def matches(self, path: Path, head: str) -> bool:
        """Whether the file begins with a task."""
        return head.lstrip().startswith("{") and '"question"' in head and not path.name.endswith(".answers.jsonl")

    def read(self, path: Path, blocks: Blocks, advance: Callable[[int], object]) -> Iterator[TraceProgram]:
        """Yield the tasks that have a call."""
        del blocks
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
            program = _task(
                task_id, a_list(task, "question", where), _turns(task_id, answers.get(task_id), where), where
            )
            if program.calls:
                yield program


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
