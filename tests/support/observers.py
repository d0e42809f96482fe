"""Observe an engine from outside: the programs that end on it, the DAG of calls, and the calls in flight.

No function measures time. A call was aborted if it has fewer output tokens than it asked for.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Final

import anyio
import pytest
from polling import until
from tiny_engine import ENDLESS_TOKENS

import weft
from weft.core.process_rows import ProgramRow

TIMEOUT_S: Final = 3600.0  # a timeout that `expiring_timeouts` lets expire


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


def calls_in_flight(engine: weft.Engine) -> int:
    """The number of calls in the front end, or of requests in vLLM if these are more."""
    return max(len(engine._in_flight), engine._llm.get_num_unfinished_requests())


def vllm_requests(engine: weft.Engine) -> dict[str, Any]:
    """vLLM's records of the requests that have not ended, by id. A record keeps its output when its request ends."""
    return dict(engine._llm.output_processor.request_states)


def output_tokens(request: Any) -> int:
    """The number of tokens that a request has generated so far."""
    return int(request.detokenizer.num_output_tokens())


def assert_aborted(requests: dict[str, Any]) -> None:
    """Assert that no request has generated all tokens of an endless call."""
    finished = [request_id for request_id, request in requests.items() if output_tokens(request) >= ENDLESS_TOKENS]
    assert finished == [], "these requests were not aborted"


async def wait_until_generating(engine: weft.Engine, requests: int = 1, tokens: int = 3) -> dict[str, Any]:
    """Wait until so many requests have generated so many tokens, and return vLLM's records of all requests."""

    def are_generating() -> bool:
        return sum(output_tokens(request) >= tokens for request in vllm_requests(engine).values()) >= requests

    await until(are_generating)
    return vllm_requests(engine)


async def wait_until_idle(engine: weft.Engine) -> None:
    """Wait until no call is in flight, and assert that endless calls were aborted."""
    requests: dict[str, Any] = {}

    def is_idle() -> bool:
        requests.update(vllm_requests(engine))
        return not calls_in_flight(engine)

    await until(is_idle)
    assert_aborted(requests)


@asynccontextmanager
async def expiring_timeouts(engine: weft.Engine, requests: int = 1) -> AsyncIterator[None]:
    """Let timeouts of `TIMEOUT_S` in the running event loop expire once so many requests generate.

    For this the loop's clock is advanced, so nothing depends on how fast the engine is. The clock is not set back,
    because timers that were set in the meantime would be late.

    Raises:
        AssertionError: A request was not aborted but generated all tokens of an endless call.
    """
    loop, records = asyncio.get_running_loop(), dict[str, Any]()

    async def expire() -> None:
        try:
            records.update(await wait_until_generating(engine, requests))
        finally:
            now_s = loop.time
            loop.time = lambda: now_s() + TIMEOUT_S  # type: ignore[method-assign]

    expiry = asyncio.create_task(expire())
    try:
        yield
    except BaseException:
        expiry.cancel()
        raise
    await expiry
    assert_aborted(records)


async def cancel_while_generating(
    engine: weft.Engine, how: str, run: Callable[[], Awaitable[Any]], requests: int = 1
) -> None:
    """Run something that makes endless calls, cancel it while they generate, and assert that they are aborted.

    Args:
        how: "task" cancels the task of the run; "wait_for" and "move_on_after" let a timeout expire.
        requests: The number of requests that generate when the run is cancelled.
    """
    if how == "task":
        task = asyncio.ensure_future(run())
        records = await wait_until_generating(engine, requests)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert_aborted(records)
    else:
        async with expiring_timeouts(engine, requests):
            if how == "wait_for":
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(run(), TIMEOUT_S)
            else:
                with anyio.move_on_after(TIMEOUT_S) as scope:
                    await run()
                assert scope.cancelled_caught
    await wait_until_idle(engine)


async def resolve(result: Any) -> Any:
    """Await the result of a function that may be async, and return the value."""
    return await result if inspect.isawaitable(result) else result
