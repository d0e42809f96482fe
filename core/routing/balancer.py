"""The contract of a balancer: it chooses the engine for each call. Algorithm 2 of Autellix (§4.3) is one of them.

A balancer is written once for `AsyncMultiLLMEngine` and for simulation. It knows only the names of the engines, how
many calls are in flight on each and how many each runs at once. It is not thread-safe: use it from one thread.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Generic, NamedTuple, TypeVar

from weft.core.ids import EngineId, ProgramId, SessionId
from weft.core.registries import Registered

K = TypeVar("K", bound=str)  # `ProgramId` or `SessionId`


class Arrival(NamedTuple):
    """A call as a balancer sees it."""

    program_id: ProgramId
    session_id: SessionId
    prompt_tokens: int  # of the whole prompt


class EngineLoad(NamedTuple):
    """The load of an engine."""

    engine_id: EngineId
    calls: int  # in flight: sent to the engine and not ended, running or in the engine's queue
    capacity: int  # the most calls that the engine runs at once, vLLM's `max_num_seqs`; further calls queue there


class Balancer(Registered, ABC):
    """Chooses an engine for each call.

    A subclass implements `decide`. `choose` offers it the engines that can take the call at this moment. An engine that
    is left out because it is full keeps the programs and sessions that are assigned to it. `lose_engine` reports an
    engine that is gone or about to go.
    """

    def __init__(self) -> None:
        self._choices = itertools.count(1)
        self._last_choice: dict[EngineId, int] = {}

    def choose(self, arrival: Arrival, loads: Sequence[EngineLoad]) -> EngineId:
        """Return the engine for a call.

        Args:
            arrival: the call.
            loads: the engines to choose from, at least one.

        Raises:
            ValueError: `loads` is empty.
        """
        if not loads:
            raise ValueError("there is no engine to choose from")
        chosen = self.decide(arrival, loads)
        self._last_choice[chosen] = next(self._choices)
        return chosen

    @abstractmethod
    def decide(self, arrival: Arrival, loads: Sequence[EngineLoad]) -> EngineId:
        """Decide on the engine for a call. Only `choose` calls this method.

        Args:
            arrival: the call.
            loads: the engines to choose from, at least one. The result must be one of them.
        """

    def end_program(self, program_id: ProgramId) -> None:
        """Forget a program that has ended."""
        del program_id

    def end_session(self, session_id: SessionId) -> None:
        """Forget a session whose last program has ended."""
        del session_id

    def lose_engine(self, engine_id: EngineId) -> None:
        """Forget an engine that died, was restarted or is about to go.

        Programs and sessions that were assigned to the engine are assigned again by their next calls.
        """
        self._last_choice.pop(engine_id, None)

    def least_used(self, loads: Sequence[EngineLoad]) -> EngineId:
        """Return the engine with the fewest calls in flight (Alg. 2, LEAST_USED).

        The paper leaves ties open. Here the engine that was chosen longest ago wins. If the first engine of the list
        won, all programs that arrive at idle engines would be assigned to that engine and compete there later.
        """
        return min(loads, key=lambda load: (load.calls, self.last_choice(load))).engine_id

    def last_choice(self, load: EngineLoad) -> int:
        """Return the number of the last choice of an engine. Choices are numbered from 1; 0 means never."""
        return self._last_choice.get(load.engine_id, 0)


class AssigningBalancer(Balancer, Generic[K]):
    """A balancer that assigns programs, or sessions, to engines."""

    def __init__(self) -> None:
        super().__init__()
        self._assigned: dict[K, EngineId] = {}

    def lose_engine(self, engine_id: EngineId) -> None:
        super().lose_engine(engine_id)
        self._assigned = {key: engine for key, engine in self._assigned.items() if engine != engine_id}

    def assigned(self, key: K) -> EngineId | None:
        """Return the engine that a program (locality) or session (affinity) is assigned to, None if there is none."""
        return self._assigned.get(key)

    def __len__(self) -> int:
        """The number of programs or sessions that are assigned."""
        return len(self._assigned)
