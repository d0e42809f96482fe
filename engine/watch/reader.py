"""Reads the state of an engine, without delay for its calls."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any, Final, NamedTuple, Protocol, TypeVar

from weft.core.errors import EngineError
from weft.core.ids import EngineId, ProgramId
from weft.core.policies import PolicyConfig
from weft.core.process_rows import ProgramRow
from weft.core.process_table import ProcessTable
from weft.core.program.observer import ProgramObserver
from weft.core.routing.admission import Admission
from weft.core.routing.replicas import ReplicaHealth
from weft.core.show import LiveRow, LiveState, SchedulerState, compose, to_json
from weft.engine.processes.loop_thread import in_thread
from weft.engine.wire.control import Question, TakeState, encode_control
from weft.engine.wire.reports import read_answer

T = TypeVar("T")

ANSWER_S: Final = 2.0  # for a scheduler; a step of a big model takes less
_FRESH_S: Final = 0.5  # schedulers are asked at most so often, however many look on


class WatchedReplica(NamedTuple):
    """A replica, and how its scheduler is asked."""

    model: str
    health: ReplicaHealth
    ask: Callable[[Mapping[str, Any]], Awaitable[Any]]  # sends a control message; returns None if nobody answers


class WatchedEngine(Protocol):
    """What the state, the page, the metrics and the spans of an engine are made from."""

    engine_id: EngineId
    table: ProcessTable

    @property
    def policy(self) -> PolicyConfig | None:
        """How calls are scheduled. It is None if only a server knows that."""

    @property
    def models(self) -> list[str]:
        """The names of its models."""

    @property
    def is_alive(self) -> bool:
        """Whether it takes calls."""

    @property
    def admissions(self) -> Mapping[str, Admission]:
        """By model's name, what counts its calls in flight."""

    def now_s(self) -> float:
        """The time of the engine's monotonic clock, in seconds."""

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine on the engine's event loop."""

    def watched(self) -> Sequence[WatchedReplica]:
        """Its replicas. Called on the engine's event loop."""

    def row(self, program_id: ProgramId) -> ProgramRow | None:
        """An open program's row."""

    def observe(self, observer: ProgramObserver) -> None:
        """Tell an observer what happens to programs from now on."""

    def end_program(self, program_id: ProgramId) -> bool:
        """End a program. Returns whether it was open."""


class LiveReader:
    """Reads an engine's state. Use it on the engine's event loop."""

    def __init__(self, engine: WatchedEngine) -> None:
        self._engine = engine
        self._rows: list[LiveRow] = []
        self._read_s = -math.inf
        self._lock = asyncio.Lock()

    async def replicas(self) -> list[LiveRow]:
        """The replicas with the states of their schedulers, which are at most 0.5 s old."""
        async with self._lock:
            loop = asyncio.get_running_loop()
            if loop.time() >= self._read_s + _FRESH_S:
                self._rows = await self._ask()
                self._read_s = loop.time()
            return self._rows

    async def _ask(self) -> list[LiveRow]:
        watched = self._engine.watched()
        states = await asyncio.gather(*(_state_of(each) for each in watched))
        return [LiveRow(each.model, each.health, state) for each, state in zip(watched, states, strict=True)]

    async def read(self, scope: str = "") -> LiveState:
        """Return the state now.

        Args:
            scope: Only programs whose ids begin with this text are in the state.
        """
        return await in_thread(await self._compose(scope))  # calls are served on this one

    async def read_json(self, scope: str = "") -> bytes:
        make = await self._compose(scope)
        return await in_thread(lambda: json.dumps(to_json(make()), allow_nan=False).encode())

    async def _compose(self, scope: str) -> Callable[[], LiveState]:
        engine = self._engine
        rows = await self.replicas()
        return partial(
            compose,
            list(engine.table),
            engine.table.ended(),
            rows,
            now_s=engine.now_s(),
            model=engine.models[0],
            policy=engine.policy.name if engine.policy is not None else "",
            scope=scope,
        )


async def _state_of(replica: WatchedReplica) -> SchedulerState | None:
    (answer,) = await ask(replica, TakeState())
    return read_answer(SchedulerState, answer)


async def ask(replica: WatchedReplica, *questions: Question) -> Sequence[Any]:
    """Ask the scheduler of a replica. Each answer is None if it has died, or does not answer within two seconds."""
    with suppress(EngineError, TimeoutError):
        async with asyncio.timeout(ANSWER_S):
            return await asyncio.gather(*(replica.ask(encode_control(question)) for question in questions))
    return [None] * len(questions)
