"""What the LangChain tests share: how they see the calls of a program from outside, and when an engine is quiet."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import anyio
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import BaseMessage
from langchain_core.outputs import LLMResult

import weft
from weft.core.process_table import ProgramRow


class Witness(BaseCallbackHandler):
    """A user's own handler: notes what every finished call says of itself."""

    run_inline = True

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def on_llm_end(self, response: LLMResult, **_kwargs: Any) -> None:
        """A call ended well."""
        for generations in response.generations:
            self.calls += [generation.message.response_metadata["weft"] for generation in generations]  # type: ignore[union-attr]


def report(message: BaseMessage) -> dict[str, Any]:
    """Ids and account of the call that gave this message."""
    found: dict[str, Any] = message.response_metadata["weft"]
    return found


def levels(calls: list[dict[str, Any]]) -> list[list[int]]:
    """The DAG of some calls, as the numbers of parents at each depth: `[[0, 0], [2]]` is a fork and its join."""
    parents = {call["call_id"]: tuple(call["parents"]) for call in calls}

    def depth(call: str) -> int:
        return 1 + max((depth(parent) for parent in parents[call]), default=-1)

    found: dict[int, list[int]] = {}
    for call, before in parents.items():
        found.setdefault(depth(call), []).append(len(before))
    return [sorted(found[level]) for level in sorted(found)]


class Ended:
    """The programs that end on an engine from now on."""

    def __init__(self, engine: weft.Engine) -> None:
        self._engine = engine
        self._before = {row.info.program_id for row in engine.table.ended()}

    @property
    def rows(self) -> list[ProgramRow]:
        """Their last rows, the first to end first."""
        return [row for row in reversed(self._engine.table.ended()) if row.info.program_id not in self._before]

    @property
    def states(self) -> dict[str, str]:
        """How they ended, by name."""
        return {row.info.name: str(row.state) for row in self.rows}


async def until(condition: Callable[[], object], seconds: float = 10) -> None:
    """Wait for something that happens soon."""
    with anyio.fail_after(seconds):
        while not condition():  # noqa: ASYNC110  nothing tells
            await anyio.sleep(0.005)


def calls_in_flight(engine: weft.Engine) -> int:
    """Calls that the front end knows and requests that vLLM knows, whichever are more."""
    return max(len(engine._in_flight), engine._llm.get_num_unfinished_requests())


async def generating(engine: weft.Engine) -> None:
    """Wait until a call is at work on the engine, and a little longer."""
    await until(engine._llm.get_num_unfinished_requests)
    await anyio.sleep(0.03)


async def quiet(engine: weft.Engine) -> None:
    """Wait until nothing is in flight; a call that nobody aborted would take longer than this waits."""
    await until(lambda: not calls_in_flight(engine), seconds=2)


async def finished(result: Any) -> Any:
    """The result of a function that may be async."""
    return await result if inspect.isawaitable(result) else result
