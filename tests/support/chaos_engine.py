"""An engine whose router, supervisor, table and admission are real, and whose replicas are simulated in virtual time.

Whole lives of engines are simulated in `tests/simulated`. This one is for what happens to a single call.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import random
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

from history import History

from weft.core.accounts import Account
from weft.core.errors import EngineStartError
from weft.core.ids import CallId, EngineId, ProgramId
from weft.core.routing import Affinity, LeastUsed, Locality
from weft.core.routing.admission import Admission
from weft.core.routing.liveness import ProcessUsage
from weft.core.routing.replicas import ReplicaSet
from weft.engine.host.frontend import FrontEnd
from weft.engine.host.in_flight import ModelEndpoint
from weft.engine.options import EngineOptions
from weft.engine.processes.loop_thread import LoopThread
from weft.engine.processes.tree import until_stuck
from weft.engine.replicas.base import Replica, ReplicaGoneError
from weft.engine.replicas.dispatch_queue import DispatchQueue
from weft.engine.replicas.router import Router
from weft.engine.replicas.supervisor import Supervisor
from weft.engine.vllm_compat.names import RequestOutputKind, SamplingParams
from weft.engine.wire.call_header import decode_call
from weft.engine.wire.control import CallKey

MAX_CALLS = 4
SLOTS = 1  # calls that a replica runs at once
HANG_TIMEOUT_S = 20.0
STEP_S = 0.02


@dataclass(eq=False)
class _Turn:
    """A call in a replica's queue."""

    call: CallKey
    begins: asyncio.Event = field(default_factory=asyncio.Event)


class SimulatedReplica(Replica):
    """Gives a call one token in each step, and runs few calls at once. It may die or hang, and some starts fail."""

    def __init__(self, engine_id: EngineId, engine: ChaosEngine) -> None:
        self.engine_id = engine_id
        self._engine = engine
        self._hangs = self._is_dead = False
        self._gone: asyncio.Event | None = None
        self._watching: asyncio.Future[None] | None = None
        self._queue: list[_Turn] = []
        self._running = 0

    async def start(self, timeout_s: float) -> None:
        rng = self._engine.rng
        await asyncio.sleep(rng.uniform(0.1, 3.0))
        if rng.random() < 0.2:
            raise rng.choice([EngineStartError("no memory"), OSError("no file"), RuntimeError("boom")])
        self._hangs = self._is_dead = False
        self._gone = asyncio.Event()
        self._queue, self._running = [], 0
        self._watching = asyncio.ensure_future(self._kill_if_stuck())

    async def _kill_if_stuck(self) -> None:
        await until_stuck(self._ping, lambda: ProcessUsage(0.0, is_stopped=False), HANG_TIMEOUT_S)
        self.kill()

    async def _ping(self) -> None:
        if self._hangs:
            await asyncio.Event().wait()

    @property
    def is_running(self) -> bool:
        return self._gone is not None and not self._is_dead

    @property
    def is_dead(self) -> bool:
        return self._is_dead

    def why_dead(self) -> str:
        return "killed"

    def kill(self) -> None:
        """Die. The supervisor or a call notices first."""
        self._is_dead = True
        if self._gone is not None and self._engine.rng.random() < 0.5:
            self._gone.set()

    def hang(self) -> None:
        """Make no further step, and answer nothing."""
        self._hangs = True

    def detach(self) -> None:
        if self._gone is not None:
            self._gone.set()
        if self._watching is not None:
            self._watching.cancel()
        self._gone, self._is_dead = None, False

    def _begin_next(self) -> None:
        """The first calls of the queue begin, as far as there are slots."""
        while self._queue and self._running < SLOTS:
            turn = self._queue.pop(0)
            self._running += 1
            turn.begins.set()

    async def generate(
        self, prompt: Any, sampling_params: Any, request_id: str, **kwargs: Any
    ) -> AsyncGenerator[Any, None]:
        gone = self._gone
        if gone is None or self._is_dead:
            raise ReplicaGoneError
        identity = decode_call(sampling_params.extra_args, request_id, None, is_trusted=True).identity
        program, call = identity.program_id, identity.call_id
        self._engine.history.add("attempt", program, call, self.engine_id)
        is_delta = sampling_params.output_kind == RequestOutputKind.DELTA
        turn = _Turn((program, call))
        self._queue.append(turn)
        self._begin_next()
        try:
            await first_of(turn.begins, gone)
            if gone.is_set():
                raise ReplicaGoneError
            self._engine.history.add("begin", program, call, self.engine_id)
            async with aclosing(self._tokens(sampling_params, gone, program, call, is_delta=is_delta)) as outputs:
                async for output in outputs:
                    yield output
        finally:
            if turn in self._queue:
                self._queue.remove(turn)
            elif turn.begins.is_set() and gone is self._gone:  # its slot is not one of a life before
                self._running -= 1
                self._begin_next()

    async def _tokens(
        self, sampling_params: Any, gone: asyncio.Event, program: ProgramId, call: CallId, *, is_delta: bool
    ) -> AsyncGenerator[Any, None]:
        for token in range(sampling_params.max_tokens):
            waits_s = None if self._hangs else STEP_S * self._engine.rng.uniform(0.5, 2.0)
            with suppress(TimeoutError):
                async with asyncio.timeout(waits_s):
                    await gone.wait()
            if gone.is_set():
                raise ReplicaGoneError
            account = Account(service_s=(token + 1) * STEP_S, output_tokens=token + 1)
            self._engine.on_account(call, account)
            is_last = token == sampling_params.max_tokens - 1
            if is_delta:
                yield SimpleNamespace(outputs=[SimpleNamespace(token_ids=[token])], finished=is_last)
        if not is_delta:
            tokens = list(range(sampling_params.max_tokens))
            yield SimpleNamespace(outputs=[SimpleNamespace(token_ids=tokens)], finished=True)

    async def send_to_scheduler(self, message: Mapping[str, Any]) -> None:
        """It has no scheduler."""


async def first_of(*events: asyncio.Event) -> None:
    """Wait until one of the events is set."""
    waits = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for each in waits:
            each.cancel()


def _answer(tokens: Sequence[int]) -> dict[str, Any]:
    return {"id": "answer", "model": "simulated", "choices": [{"index": 0, "tokens": tokens}]}


class _Chat:
    """Stands for `ChatEndpoint`: one chunk for each token, and the router's typed errors."""

    max_model_len = 1000

    def __init__(self, router: Router) -> None:
        self._router = router

    @staticmethod
    def make_request(body: dict[str, Any], program: Any = None, identity: Any = None) -> Any:
        del program, identity
        return SimpleNamespace(**body, vllm_xargs=None)

    async def _outputs(self, request: Any, kind: RequestOutputKind) -> AsyncGenerator[list[int], None]:
        params = SamplingParams(max_tokens=request.max_tokens, output_kind=kind, extra_args=request.vllm_xargs)
        running = self._router.generate({"prompt_token_ids": [1]}, params, request.request_id)
        try:
            async with aclosing(running) as outputs:
                async for output in outputs:
                    yield output.outputs[0].token_ids
        finally:
            self._router.failures.pop(CallId(request.request_id), None)

    async def complete(self, request: Any) -> dict[str, Any]:
        tokens: list[int] = []
        async with aclosing(self._outputs(request, RequestOutputKind.FINAL_ONLY)) as outputs:
            async for each in outputs:
                tokens = each
        return _answer(tokens)

    async def stream(self, request: Any) -> AsyncGenerator[dict[str, Any], None]:
        async with aclosing(self._outputs(request, RequestOutputKind.DELTA)) as outputs:
            async for each in outputs:
                yield _answer(each)


class _SameLoop:
    """Stands for `LoopThread`: the engine runs on the test's own event loop, in virtual time."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()

    def submit(self, coroutine: Coroutine[Any, Any, Any]) -> Future[Any]:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def call_soon(self, function: Callable[[], object]) -> None:
        self._loop.call_soon(function)


class ChaosEngine(FrontEnd):
    """A front end over simulated replicas. Make it on a `VirtualTimeLoop`."""

    def __init__(self, rng: random.Random, history: History) -> None:
        clock = asyncio.get_running_loop().time
        super().__init__(EngineOptions(max_calls=MAX_CALLS, hang_timeout_s=HANG_TIMEOUT_S, clock=clock))
        self.model = "simulated"
        self.rng, self.history = rng, history
        self.on_account = self._in_flight.account
        self._finalizer = lambda: None
        self._life.is_closed = False
        self._start_loop(cast("LoopThread", _SameLoop()))
        self._connect(_Link(self))
        # The last two give a program's calls to one replica, so that others have nothing to do.
        self.states = ReplicaSet(
            rng.choice([LeastUsed(), Affinity(threshold=math.inf), Locality(threshold_tokens=0)]), max_calls=MAX_CALLS
        )
        self.states.loads.capacity = SLOTS
        self.queue = DispatchQueue(self.model, self.states)
        numbers = itertools.count()
        self.supervisor = Supervisor(
            self.model,
            replicas=self.states,
            queue=self.queue,
            make=lambda: SimulatedReplica(EngineId(f"e/{next(numbers)}"), self),
            forget=lambda engine_id, _gone: self.table.lose_engine(engine_id),
            start_timeout_s=600.0,
            clock=clock,
        )
        self.router = Router(
            self.queue,
            self.supervisor.replica,
            self._in_flight.assign,
            lambda each: self.supervisor.note_death(each),  # noqa: PLW0108  a test may replace the method
        )
        self.admission = Admission(lambda: self.states.capacity)
        self.chat_endpoint: Any = _Chat(self.router)


class _Link:
    """The way to the simulated replicas."""

    hears_events = False

    def __init__(self, engine: ChaosEngine) -> None:
        self._engine = engine

    def endpoint(self, model: str | None) -> ModelEndpoint:
        del model
        return ModelEndpoint(self._engine.chat_endpoint, self._engine.admission, None)

    async def send(self, message: Mapping[str, Any]) -> list[Any]:
        return [await replica.send_to_scheduler(message) for replica in self._engine.supervisor.replicas()]

    def swap_stats(self) -> None:
        return None
