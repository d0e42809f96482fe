"""Observe an engine from outside: the programs that end on it, the DAG of calls, and whether calls are in flight."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import anyio

import weft
from weft.core.process_table import ProgramRow


class EndedPrograms:
    """The programs that end on an engine after this object was made."""

    def __init__(self, engine: weft.Engine) -> None:
        self._engine = engine
        self._before = {row.info.program_id for row in engine.table.ended()}

    @property
    def rows(self) -> list[ProgramRow]:
        """The last rows of the programs, in the order of their ends."""
        return [row for row in reversed(self._engine.table.ended()) if row.info.program_id not in self._before]

    @property
    def states(self) -> dict[str, str]:
        """The final states of the programs, by name."""
        return {row.info.name: str(row.state) for row in self.rows}


def levels(calls: list[dict[str, Any]]) -> list[list[int]]:
    """The numbers of parents of the calls at each depth of a DAG: `[[0, 0], [2]]` is a fork and its join.

    Args:
        calls: Reports of calls, with `call_id` and `parents`.
    """
    parents = {call["call_id"]: tuple(call["parents"]) for call in calls}

    def depth(call: str) -> int:
        return 1 + max((depth(parent) for parent in parents[call]), default=-1)

    counts: dict[int, list[int]] = {}
    for call, before in parents.items():
        counts.setdefault(depth(call), []).append(len(before))
    return [sorted(counts[level]) for level in sorted(counts)]


async def wait_until(condition: Callable[[], object], seconds: float = 10) -> None:
    """Wait until a condition holds."""
    with anyio.fail_after(seconds):
        while not condition():  # noqa: ASYNC110  no event announces it
            await anyio.sleep(0.005)


def calls_in_flight(engine: weft.Engine) -> int:
    """The number of calls in the front end, or of requests in vLLM if these are more."""
    return max(len(engine._in_flight), engine._llm.get_num_unfinished_requests())


async def wait_until_generating(engine: weft.Engine, requests: int = 1) -> None:
    """Wait until the engine has so many requests, and a little longer."""
    await wait_until(lambda: engine._llm.get_num_unfinished_requests() >= requests)
    await anyio.sleep(0.03)


async def wait_until_idle(engine: weft.Engine) -> None:
    """Wait until no call is in flight. The time limit is too short for a call that should have been aborted."""
    await wait_until(lambda: not calls_in_flight(engine), seconds=2)


async def resolve(result: Any) -> Any:
    """Await the result of a function that may be async, and return the value."""
    return await result if inspect.isawaitable(result) else result
