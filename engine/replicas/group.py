"""The replicas of one model with all that calls need to reach them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from weft.core.ids import CallId, EngineId
from weft.core.policies.fair_shares.fair import EPOCH_S
from weft.core.policies.fair_shares.stride import OverEngines
from weft.core.routing.admission import Admission
from weft.core.routing.replicas import ReplicaSet
from weft.core.routing.stealing import Stealing, StealingConfig
from weft.engine.host.in_flight import ModelEndpoint
from weft.engine.replicas.base import Replica
from weft.engine.replicas.dispatch_queue import DispatchQueue
from weft.engine.replicas.router import RoutedLLM
from weft.engine.replicas.stealer import Stealer, Watcher
from weft.engine.replicas.supervisor import Supervisor
from weft.engine.vllm.chat import ChatEndpoint
from weft.engine.wire.control import ExchangeService, encode_control, read_service


class ShareKeeper(Watcher):
    """Tells each replica, every `EPOCH_S`, what tenants had on the others, so that shares hold over all of them.

    A replica in a long step answers later, and the others do not wait for it. The arguments are as for `Stealer`.
    """

    def __init__(self, states: ReplicaSet, replica: Callable[[EngineId], Replica | None]) -> None:
        super().__init__(EPOCH_S)
        self._states = states
        self._replica = replica
        self._sums = OverEngines()
        self._asked: dict[EngineId, asyncio.Task[None]] = {}

    async def look(self) -> None:
        ready = [load.engine_id for load in self._states.loads.all()] if len(self._states) > 1 else []
        self._sums.keep(ready)
        if ready and self._states.loads.most_calls:
            for engine_id in ready:
                if engine_id not in self._asked:
                    self._asked[engine_id] = asyncio.ensure_future(self._exchange(engine_id))
        if self._asked:
            done, _ = await asyncio.wait(self._asked.values(), timeout=EPOCH_S)
            self._asked = {each: task for each, task in self._asked.items() if task not in done}
            for task in done:
                task.result()

    async def _exchange(self, engine_id: EngineId) -> None:
        if (replica := self._replica(engine_id)) is not None:
            message = ExchangeService(self._sums.take(engine_id))
            self._sums.add(engine_id, read_service(await replica.send_to_scheduler(encode_control(message))))

    async def stop(self) -> None:
        await super().stop()
        for task in self._asked.values():
            task.cancel()
        await asyncio.gather(*self._asked.values(), return_exceptions=True)


class ReplicaGroup:
    """The replicas of one model. `start` and `stop` it on the engine's event loop.

    Args:
        make, forget: As for `Supervisor`.

    Attributes:
        endpoint, llm: What serves the model's calls, and the router to its replicas; there once it has started.
    """

    endpoint: ModelEndpoint
    llm: RoutedLLM

    def __init__(
        self,
        model: str,
        states: ReplicaSet,
        *,
        make: Callable[[], Replica],
        forget: Callable[[EngineId, bool], None],
        start_timeout_s: float,
        clock: Callable[[], float],
    ) -> None:
        self.states = states
        self._model = model
        self._clock = clock
        self._queue = DispatchQueue(model, states)
        self.supervisor = Supervisor(
            model,
            replicas=states,
            queue=self._queue,
            make=make,
            forget=forget,
            start_timeout_s=start_timeout_s,
            clock=clock,
        )
        self._parts: list[Supervisor | RoutedLLM | Watcher] = [self.supervisor]  # in the order of their ends

    async def start(
        self,
        replicas: int,
        tool_call_parser: str | None,
        stealing: StealingConfig | None,
        on_assigned: Callable[[CallId, EngineId], EngineId | None],
        *,
        has_shares: bool,
    ) -> None:
        """Start the replicas, and then what uses them. `has_shares`: the policy divides replicas among tenants.
        Raises EngineError if a replica did not start."""
        supervisor, states = self.supervisor, self.states
        first = await supervisor.begin(replicas)
        assert first.llm is not None  # noqa: S101  it has just started
        config = first.llm.vllm_config
        states.loads.capacity, states.loads.moves_kv = config.scheduler_config.max_num_seqs, first.moves_kv
        self.llm = llm = RoutedLLM(config, self._queue, supervisor.replica, on_assigned, supervisor.note_death)
        self._parts.append(llm)
        watchers: list[Watcher] = []
        if stealing is not None:
            watchers.append(Stealer(Stealing(stealing), states, supervisor.replica, llm.unanswered, self._clock))
        if has_shares:
            watchers.append(ShareKeeper(states, supervisor.replica))
        self._parts += watchers
        for watcher in watchers:
            watcher.watch()
        supervisor.watch()
        chat = ChatEndpoint(llm, self._model, tool_call_parser, llm.failures)
        self.endpoint = ModelEndpoint(chat, Admission(lambda: states.capacity), None, self._model)

    async def stop(self) -> None:
        """End the replicas, whose calls fail, and then what uses them."""
        for part in self._parts:
            await part.stop()
