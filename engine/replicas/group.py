"""The replicas of one model with all that calls need to reach them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from weft.core.ids import CallId, EngineId
from weft.core.routing.admission import Admission
from weft.core.routing.replicas import ReplicaSet
from weft.core.routing.stealing import Stealing, StealingConfig
from weft.engine.host.in_flight import ModelEndpoint
from weft.engine.replicas.base import Replica
from weft.engine.replicas.dispatch_queue import DispatchQueue
from weft.engine.replicas.router import RoutedLLM
from weft.engine.replicas.stealer import Stealer
from weft.engine.replicas.supervisor import Supervisor
from weft.engine.vllm.chat import ChatEndpoint


class ReplicaGroup:
    """The replicas of one model. `start` and `stop` it on the engine's event loop.

    Args:
        model: The model's name.
        states: For its replicas.
        make, clock, others: As for `Supervisor`.

    Attributes:
        endpoint, llm: What serves the model's calls, and the router to its replicas; there once it has started.
    """

    endpoint: ModelEndpoint
    llm: RoutedLLM

    def __init__(
        self, model: str, states: ReplicaSet, *, make: Callable[[], Replica], clock: Callable[[], float], **others: Any
    ) -> None:
        self.states = states
        self._model = model
        self._clock = clock
        self._queue = DispatchQueue(model, states)
        self.supervisor = Supervisor(model, replicas=states, queue=self._queue, make=make, clock=clock, **others)
        self._parts: list[Supervisor | RoutedLLM | Stealer] = [self.supervisor]  # in the order of their ends

    async def start(
        self,
        replicas: int,
        tool_call_parser: str | None,
        stealing: StealingConfig | None,
        on_assigned: Callable[[CallId, EngineId], None],
    ) -> None:
        """Start the replicas, and then what uses them.

        Args:
            replicas: How many.
            tool_call_parser: As for `weft.Engine`.
            stealing: When calls move; None: never.
            on_assigned: As for `Router`.

        Raises:
            EngineError: A replica did not start.
        """
        supervisor, states = self.supervisor, self.states
        first = await supervisor.begin(replicas)
        assert first.llm is not None  # noqa: S101  it has just started
        config = first.llm.vllm_config
        states.loads.capacity = config.scheduler_config.max_num_seqs
        self.llm = llm = RoutedLLM(config, self._queue, supervisor.replica, on_assigned, supervisor.note_death)
        self._parts.append(llm)
        if stealing is not None:
            stealer = Stealer(Stealing(stealing), states, supervisor.replica, llm.unanswered, self._clock)
            self._parts.append(stealer)
            stealer.watch()
        supervisor.watch()
        chat = ChatEndpoint(llm, self._model, tool_call_parser, llm.failures)
        self.endpoint = ModelEndpoint(chat, Admission(lambda: states.capacity), None, self._model)

    async def stop(self) -> None:
        """End the replicas, whose calls fail, and then what uses them."""
        for part in self._parts:
            await part.stop()
