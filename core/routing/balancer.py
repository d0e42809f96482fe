"""The contract of a balancer: it chooses the engine for each call. Algorithm 2 of Autellix (§4.3) is one of them.

A balancer is written once for `AsyncMultiLLMEngine` and for simulation. It knows only the names of the engines, how
many calls are in flight on each and how many each runs at once. It is not thread-safe: use it from one thread.
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from weft.core.errors import BalancerError
from weft.core.ids import EngineId, ProgramId, SessionId
from weft.core.registries import Registered, Registry


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


_Key = tuple[int, int, int, EngineId]  # calls in flight, the number of the last choice or 0, the engine's number


class Loads:
    """The engines that take calls, always in order of their loads, so that a choice costs the same among hundreds.

    Whoever sends the calls reports what changes. A balancer only reads.

    Args:
        capacity: the most calls that each engine runs at once.
        limit: the calls in flight with which an engine is full. No further call can then go there.
    """

    def __init__(self, capacity: int, limit: float = math.inf) -> None:
        self.capacity = capacity
        self.moves_kv = False  # whether a program that goes to another engine finds its KV there, for a copy
        self._limit = limit
        self._keys: OrderedDict[EngineId, _Key] = OrderedDict()  # the engine that was chosen longest ago comes first
        self._sorted: list[_Key] = []
        self._choices = itertools.count(1)

    def open(self, engine_id: EngineId, number: int, calls: int = 0) -> None:
        """An engine takes calls from now on. Of engines that were never chosen, the least number comes first."""
        insort(self._sorted, (calls, 0, number, engine_id))
        self._keys = OrderedDict((key[3], key) for key in sorted(self._sorted, key=lambda key: key[1:3]))

    def close(self, engine_id: EngineId) -> None:
        """An engine takes no more calls. Its choices are forgotten."""
        del self._sorted[bisect_left(self._sorted, self._keys.pop(engine_id))]

    def add(self, engine_id: EngineId, calls: int = 1, *, is_choice: bool = False) -> None:
        """Calls come to an engine, by the choice of a balancer or otherwise, or leave it (below 0)."""
        old = self._keys[engine_id]
        new = old[0] + calls, next(self._choices) if is_choice else old[1], old[2], engine_id
        del self._sorted[bisect_left(self._sorted, old)]
        insort(self._sorted, new)
        self._keys[engine_id] = new
        if is_choice:
            self._keys.move_to_end(engine_id)

    @property
    def least_used(self) -> EngineId:
        """The engine with the fewest calls in flight (Alg. 2, LEAST_USED).

        The paper leaves ties open. Here the engine that was chosen longest ago wins. If the first engine of a list
        won, all programs that arrive at idle engines would be assigned to that engine and compete there later.
        """
        return self._sorted[0][3]

    @property
    def longest_ago(self) -> EngineId:
        """The engine that was chosen longest ago, of those that are not full."""
        return next(engine_id for engine_id, key in self._keys.items() if key[0] < self._limit)

    @property
    def fewest_calls(self) -> int:
        """The calls in flight on the least used engine."""
        return self._sorted[0][0]

    @property
    def most_calls(self) -> int:
        """The calls in flight on the busiest engine."""
        return self._sorted[-1][0]

    @property
    def can_take_a_call(self) -> bool:
        """Whether an engine is not full."""
        return bool(self._sorted) and self._sorted[0][0] < self._limit

    def calls(self, engine_id: EngineId | None) -> int | None:
        """The calls in flight on an engine; None if no call can go there."""
        key = self._keys.get(engine_id) if engine_id is not None else None
        return key[0] if key is not None and key[0] < self._limit else None

    def all(self) -> list[EngineLoad]:
        """All engines, in the order of their numbers."""
        return [EngineLoad(key[3], key[0], self.capacity) for key in sorted(self._sorted, key=lambda key: key[2])]

    def able(self) -> list[EngineLoad]:
        """The engines that are not full, in the order of their numbers."""
        return [load for load in self.all() if load.calls < self._limit]

    def without(self, engine_ids: Collection[EngineId]) -> Loads:
        """A copy that lacks some engines."""
        loads = Loads(self.capacity, self._limit)
        loads.moves_kv = self.moves_kv
        loads._sorted = [key for key in self._sorted if key[3] not in engine_ids]
        loads._keys = OrderedDict(item for item in self._keys.items() if item[0] not in engine_ids)
        return loads

    def __len__(self) -> int:
        """The number of engines, full ones included."""
        return len(self._sorted)


class Balancer(Registered, ABC):
    """Chooses an engine for each call.

    A subclass implements `choose`, which is called only while an engine can take the call. An engine that is full keeps
    the programs and sessions that are assigned to it. `lose_engine` reports an engine that is gone or about to go.
    """

    @abstractmethod
    def choose(self, arrival: Arrival, loads: Loads) -> EngineId:
        """Return the engine for a call.

        Args:
            loads: the engines. The result must be one that is not full.
        """

    def end_program(self, program_id: ProgramId) -> None:
        """Forget a program that has ended."""

    def end_session(self, session_id: SessionId) -> None:
        """Forget a session whose last program has ended."""

    def lose_engine(self, engine_id: EngineId) -> None:
        """Forget an engine that died, was restarted or is about to go.

        Programs and sessions that were assigned to the engine are assigned again by their next calls.
        """


class AssigningBalancer(Balancer):
    """A balancer that assigns programs, or sessions, to engines."""

    def __init__(self) -> None:
        self._assigned: dict[str, EngineId] = {}  # by program or session

    def lose_engine(self, engine_id: EngineId) -> None:
        self._assigned = {key: engine for key, engine in self._assigned.items() if engine != engine_id}

    def end_program(self, program_id: ProgramId) -> None:
        self._assigned.pop(program_id, None)

    def __len__(self) -> int:
        """The number of programs or sessions that are assigned."""
        return len(self._assigned)


# A balancer's module must be imported in `weft.core.routing`. Nothing else names it.
REGISTRY: Final = Registry[Balancer]("balancer", BalancerError)

register = REGISTRY.register
registration = REGISTRY.registration
registrations = REGISTRY.registrations


DEFAULT_BALANCER: Final = "adaptive_locality"  # by measurement: docs/results/balancers.md


@dataclass(frozen=True, slots=True, init=False)
class BalancerConfig:
    """A balancer by name, with parameters: `BalancerConfig("locality", threshold_tokens=512)`.

    Args:
        name: one of `weft.core.routing.BALANCERS`.
        **parameters: the balancer's own parameters: e.g. `threshold_tokens` of `locality`.

    Raises:
        BalancerError: the name is unknown, the balancer does not have a parameter, or it refuses a value.
    """

    name: str
    parameters: Any  # the balancer's own frozen dataclass

    def __init__(self, name: str = DEFAULT_BALANCER, **parameters: Any) -> None:
        object.__setattr__(self, "parameters", REGISTRY.parameters(name, parameters))
        object.__setattr__(self, "name", name)

    def make(self) -> Balancer:
        """Make a balancer that has assigned nothing yet."""
        return REGISTRY.registration(self.name).kind.from_parameters(self.parameters)
