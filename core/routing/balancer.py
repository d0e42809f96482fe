"""Which engine a call goes to: Algorithm 2 of Autellix (§4.3) and its baselines behind one contract.

Written once for `AsyncMultiLLMEngine` and for simulation. A balancer knows nothing of engines but their names and how
many calls are in flight on each. Not thread-safe: use it from one thread.
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Final, Generic, NamedTuple, TypeVar

from weft.core.errors import BalancerError
from weft.core.ids import EngineId, ProgramId, SessionId

BALANCERS: Final = ("locality", "round_robin", "least_used", "affinity")

K = TypeVar("K", ProgramId, SessionId)


class Arrival(NamedTuple):
    """What a balancer sees of a call."""

    program_id: ProgramId
    session_id: SessionId
    prompt_tokens: int


class EngineLoad(NamedTuple):
    """How busy an engine is."""

    engine_id: EngineId
    calls: int  # in flight: sent to it and neither done nor failed, whether they run or wait in its queue


class Balancer(ABC):
    """Chooses an engine for each call.

    `choose` is given the engines that can take the call at this moment. An engine that is left out, because it is full,
    keeps what is assigned to it; one that is gone, or about to go, is reported by `lose_engine`.
    """

    name: ClassVar[str]

    def __init__(self) -> None:
        self._turns = itertools.count(1)
        self._last_turn: dict[EngineId, int] = {}

    def choose(self, arrival: Arrival, loads: Sequence[EngineLoad]) -> EngineId:
        """The engine for a call.

        Args:
            arrival: the call.
            loads: the engines to choose from, at least one.

        Raises:
            ValueError: `loads` is empty.
        """
        if not loads:
            raise ValueError("there is no engine to choose from")
        chosen = self._decide(arrival, loads)
        self._last_turn[chosen] = next(self._turns)
        return chosen

    @abstractmethod
    def _decide(self, arrival: Arrival, loads: Sequence[EngineLoad]) -> EngineId: ...

    def end_program(self, program_id: ProgramId) -> None:
        """Forget a program that has ended."""
        del program_id

    def end_session(self, session_id: SessionId) -> None:
        """Forget a session whose last program has ended."""
        del session_id

    def lose_engine(self, engine_id: EngineId) -> None:
        """An engine died, was restarted or is to go: what was assigned to it is assigned anew by its next call."""
        self._last_turn.pop(engine_id, None)

    def least_used(self, loads: Sequence[EngineLoad]) -> EngineId:
        """The engine with the fewest calls in flight (Alg. 2, LEAST_USED).

        The paper leaves ties open. Here the engine wins that was chosen longest ago: were it the first of the list,
        programs that come to idle engines would all be assigned to that one, and meet there later.
        """
        return min(loads, key=lambda load: (load.calls, self._turn_of(load))).engine_id

    def _turn_of(self, load: EngineLoad) -> int:
        return self._last_turn.get(load.engine_id, 0)


class RoundRobin(Balancer):
    """One engine after the other, whatever the call and the load."""

    name = "round_robin"

    def _decide(self, arrival: Arrival, loads: Sequence[EngineLoad]) -> EngineId:
        del arrival
        return min(loads, key=self._turn_of).engine_id


class LeastUsed(Balancer):
    """The engine with the fewest calls in flight."""

    name = "least_used"

    def _decide(self, arrival: Arrival, loads: Sequence[EngineLoad]) -> EngineId:
        del arrival
        return self.least_used(loads)


class _Assigning(Balancer, Generic[K]):
    """A balancer that keeps programs, or sessions, on engines."""

    def __init__(self) -> None:
        super().__init__()
        self._assigned: dict[K, EngineId] = {}

    def lose_engine(self, engine_id: EngineId) -> None:
        super().lose_engine(engine_id)
        self._assigned = {key: engine for key, engine in self._assigned.items() if engine != engine_id}

    def assigned(self, key: K) -> EngineId | None:
        """The engine that a program (locality) or session (affinity) is assigned to, None if to none."""
        return self._assigned.get(key)

    def __len__(self) -> int:
        """How many programs or sessions are assigned."""
        return len(self._assigned)


class Locality(_Assigning[ProgramId]):
    """Algorithm 2: short calls go to the least used engine, long ones to their program's engine.

    A short prompt is mostly system prompt, which every engine has cached; a long one shares most of its prefix with its
    own program only.

    Args:
        threshold_tokens: prompts of up to this many tokens are short (line 2).
    """

    name = "locality"

    def __init__(self, threshold_tokens: int = 2048) -> None:
        super().__init__()
        self._threshold_tokens = threshold_tokens

    def _decide(self, arrival: Arrival, loads: Sequence[EngineLoad]) -> EngineId:
        if arrival.prompt_tokens <= self._threshold_tokens:  # line 2
            return self.least_used(loads)  # line 3
        engine_id = self._assigned.get(arrival.program_id)
        if engine_id is None:
            engine_id = self._assigned[arrival.program_id] = self.least_used(loads)  # lines 9-10
        if all(load.engine_id != engine_id for load in loads):  # full: this call goes elsewhere, the next comes back
            return self.least_used(loads)
        return engine_id  # line 6

    def end_program(self, program_id: ProgramId) -> None:
        self._assigned.pop(program_id, None)


class Affinity(_Assigning[SessionId]):
    """SAGA's session affinity with a load guard (§5.1, eq. 7): the worker that has the session's cache, unless it is
    overloaded; then the least loaded, which has the session from then on (§5.2, step 4).

    The text at hand has lost the formula of eq. 7. Overloaded is read off Table 9: more than `load_ratio` times as
    loaded as the least loaded, default 2.0. An idle worker counts as having one call, or no load would be small enough.

    Args:
        load_ratio: how much more loaded than the least loaded worker the session's own may be.
    """

    name = "affinity"

    def __init__(self, load_ratio: float = 2.0) -> None:
        super().__init__()
        self._load_ratio = load_ratio

    def _decide(self, arrival: Arrival, loads: Sequence[EngineLoad]) -> EngineId:
        own = self._assigned.get(arrival.session_id)
        calls = next((load.calls for load in loads if load.engine_id == own), None)
        least = min(load.calls for load in loads)
        if own is not None and calls is not None and calls <= self._load_ratio * max(1, least):
            return own
        chosen = self.least_used(loads)
        self._assigned[arrival.session_id] = chosen
        return chosen

    def end_session(self, session_id: SessionId) -> None:
        self._assigned.pop(session_id, None)


@dataclass(frozen=True, slots=True)
class BalancerConfig:
    """Which balancer, and its parameters.

    Args:
        name: one of `BALANCERS`.
        threshold_tokens: of `locality`: prompts of up to this many tokens are short (Alg. 2 line 2).
        load_ratio: of `affinity`: how much more loaded than the least loaded engine a session's own may be.

    Raises:
        BalancerError: an unknown name, a negative threshold, a ratio below 1.
    """

    name: str = "locality"
    threshold_tokens: int = 2048
    load_ratio: float = 2.0

    def __post_init__(self) -> None:
        if self.name not in BALANCERS:
            raise BalancerError(f"unknown balancer {self.name!r}; there are {', '.join(BALANCERS)}.")
        if self.threshold_tokens < 0:
            raise BalancerError(f"threshold_tokens must be 0 or more, not {self.threshold_tokens}.")
        if not 1 <= self.load_ratio < math.inf:
            raise BalancerError(f"load_ratio must be a finite number, 1 or more, not {self.load_ratio}.")

    def make(self) -> Balancer:
        """A balancer with nothing assigned yet."""
        match self.name:
            case "locality":
                return Locality(self.threshold_tokens)
            case "affinity":
                return Affinity(self.load_ratio)
            case "round_robin":
                return RoundRobin()
            case _:
                return LeastUsed()
