"""Runs of tau-bench: a list of objects with `traj`, whose messages are there and whose tokens are estimated."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from weft.core.errors import TraceError
from weft.core.trace.format import TraceCall, TraceProgram
from weft.core.trace.importers.contract import Blocks
from weft.core.trace.importers.messages import next_call, text_of
from weft.core.trace.importers.reading import a_list, an_object, documents

_EXPECTED: Final = "a list of tau-bench's runs, objects with task_id and traj"


class TauBench:
    """Reads runs. Each message of the assistant is a call, with all earlier messages as its prompt."""

    name: str = "tau-bench"
    description: str = "tau-bench's trajectories"

    def matches(self, path: Path, head: str) -> bool:
        """Whether the file begins with a list of runs."""
        del path
        return head.lstrip().startswith("[") and '"traj"' in head

    def read(self, path: Path, blocks: Blocks, advance: Callable[[int], object]) -> Iterator[TraceProgram]:
        """Yield the runs in which the assistant says something."""
        del blocks
        for where, runs in documents(path, advance, _EXPECTED):
            if not isinstance(runs, list):
                raise TraceError(f"{where}: {runs!r:.40} is not a list; expected {_EXPECTED}.")
            for number, run in enumerate(runs):
                place = f"{where}, run {number + 1}"
                program = _run(number, an_object(run, place, "an object with task_id and traj"), place)
                if program.calls:
                    yield program


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
