"""Trajectories of SWE-agent: the messages of a run, and how long its commands took."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from weft.core.errors import TraceError
from weft.core.trace.format import TraceCall, TraceProgram
from weft.core.trace.importers.contract import Blocks
from weft.core.trace.importers.messages import next_call, text_of
from weft.core.trace.importers.reading import a_list, an_object, documents, optional_seconds

_EXPECTED: Final = "a trajectory of SWE-agent, an object with history"


class SweAgent:
    """Reads a run. Each message of the assistant is a call, with all earlier messages as its prompt.

    SWE-agent may shorten old messages before it sends them. That is not followed.
    """

    name: str = "swe-agent"
    description: str = "SWE-agent's .traj files"

    def matches(self, path: Path, head: str) -> bool:
        """Whether the file is called so, or begins like one."""
        return head.lstrip().startswith("{") and (
            path.suffix == ".traj" or ('"trajectory"' in head and '"observation"' in head)
        )

    def read(self, path: Path, blocks: Blocks, advance: Callable[[int], object]) -> Iterator[TraceProgram]:
        """Yield the run."""
        del blocks
        for where, data in documents(path, advance, _EXPECTED):
            yield _run(path.stem, an_object(data, where, _EXPECTED), where)


def _run(name: str, run: dict[str, Any], where: str) -> TraceProgram:
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
