"""A supervisor and a router with fake replicas, which can die in every way and at any moment within milliseconds."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

from polling import until

from weft.core.ids import EngineId, ProgramId, SessionId
from weft.core.routing import Arrival, Balancer, LeastUsed
from weft.core.routing.replicas import ReplicaHealth, ReplicaSet
from weft.core.testing import FakeClock

CALL = Arrival(ProgramId("p"), SessionId("s"), 10)
A, B = EngineId("e/0"), EngineId("e/1")


class FakeReplica:
    """Gives two tokens for each call while `go_on` is set. A test can let it die."""

    log: str | None = None

    def __init__(self, engine_id: EngineId, starts: list[Exception | None]) -> None:
        self.engine_id = engine_id
        self.is_dead = False
        self.is_running = False
        self.starts = starts  # outcomes of the next starts of all replicas; a start succeeds if the list is empty
        self.may_start = asyncio.Event()
        self.may_start.set()
        self.go_on = asyncio.Event()
        self.go_on.set()
        self.dies_at: int | None = None  # tokens of a call after which the replica dies
        self.begun = 0
        self.shares_memory = True
        self.answers: list[Any] = []  # to control messages
        self.received: list[Any] = []
        self.taken: list[Any] = []

    async def start(self, timeout_s: float) -> None:
        del timeout_s
        await self.may_start.wait()
        error = self.starts.pop(0) if self.starts else None
        if error is not None:
            raise error
        self.is_running = True

    def why_dead(self) -> str:
        return "exit code -9"

    def detach(self) -> None:
        self.is_dead = self.is_running = False

    async def stop(self) -> None:
        self.detach()

    async def send_to_scheduler(self, message: Any) -> Any:
        self.received.append(message)
        if not self.answers and message["program_id"] is not None:
            await asyncio.Event().wait()
        answer = self.answers.pop(0) if self.answers else None
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def take_kv(self, source: Any, blocks: list[bytes]) -> None:
        self.taken.append((source, blocks))

    async def generate(self, prompt: Any, sampling_params: Any, request_id: str, **kwargs: Any) -> AsyncIterator[Any]:
        from weft.engine.replicas.base import ReplicaGoneError

        del prompt, sampling_params, request_id, kwargs
        self.begun += 1
        for token in range(2):
            await self.go_on.wait()
            if self.dies_at == token:
                self.is_dead = True
                raise ReplicaGoneError
            yield SimpleNamespace(outputs=[SimpleNamespace(token_ids=[token])], finished=token == 1)
        if self.dies_at == 2:
            self.is_dead = True
            raise ReplicaGoneError


class CountedReplicaSet(ReplicaSet):
    """Counts how often the supervisor asks for replicas to start, which it does once each time it looks after all."""

    looks = 0

    def due(self, now_s: float) -> list[EngineId]:
        self.looks += 1
        return super().due(now_s)


class Harness:
    """A supervisor and a router with fake replicas, on a clock that only a test advances."""

    def __init__(self, balancer: Balancer | None = None, max_calls: int = 10) -> None:
        from weft.engine.replicas.dispatch_queue import DispatchQueue
        from weft.engine.replicas.router import Router
        from weft.engine.replicas.supervisor import Supervisor

        self.clock = FakeClock()
        self.states = CountedReplicaSet(balancer or LeastUsed(), max_calls=max_calls)
        self.queue = DispatchQueue("m", self.states)
        self.made: list[FakeReplica] = []
        self.starts: list[Exception | None] = []
        self.starts_hang = False
        self.forgotten: list[tuple[EngineId, bool]] = []
        self.assigned: list[EngineId] = []
        self.latest: EngineId | None = None  # the replica with the latest KV of the program
        self.supervisor = Supervisor(
            "m",
            replicas=self.states,
            queue=self.queue,
            make=self.make,
            forget=lambda engine_id, gone: self.forgotten.append((engine_id, gone)),
            start_timeout_s=600,
            clock=self.clock,
        )
        self.router = Router(self.queue, self.supervisor.replica, self.assign, self.supervisor.note_death)

    def assign(self, _call: Any, engine_id: EngineId) -> EngineId | None:
        self.assigned.append(engine_id)
        return self.latest

    def make(self) -> Any:
        self.made.append(FakeReplica(EngineId(f"e/{len(self.made)}"), self.starts))
        if self.starts_hang:
            self.made[-1].may_start.clear()
        return self.made[-1]

    async def begin(self, count: int = 2) -> None:
        for _ in range(count):
            await self.supervisor.add()
        self.supervisor.watch()

    async def call(self, call_id: str = "c", *, for_chat: bool = True) -> list[int]:
        """Make one call and return its tokens."""
        from weft.engine.vllm_compat.names import SamplingParams

        params = SamplingParams(extra_args={"call_id": call_id, "program_id": "p"})
        tokens: list[int] = []
        running = self.router.generate({"prompt_token_ids": [1]}, params, "r", session_id="s", for_chat=for_chat)
        async for output in running:
            tokens += output.outputs[0].token_ids
        return tokens

    def health(self) -> list[ReplicaHealth]:
        return self.states.health(self.clock())

    async def ready(self, count: int) -> None:
        await until(lambda: len(self.states.loads) == count)

    async def looked(self) -> None:
        """Wait until the supervisor has looked after all replicas once more, from the beginning to the end."""
        before = self.states.looks
        await until(lambda: self.states.looks >= before + 2)
