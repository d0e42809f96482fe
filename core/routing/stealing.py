"""Work stealing: an engine without a queue takes calls that wait at an overloaded one (SAGA §5.2).

These are rules without engines. The caller passes loads and the time, in seconds of its monotonic clock. It asks the
overloaded engine which of its calls have not begun, and moves these. Not thread-safe.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from weft.core.errors import BalancerError
from weft.core.ids import EngineId, ProgramId
from weft.core.registries import check_number
from weft.core.routing.balancer import EngineLoad, Loads


@dataclass(frozen=True, slots=True)
class StealingConfig:
    """When calls that have not begun move to another engine. The defaults are SAGA's, except for the cooldown.

    Args:
        idle_s: an engine may take calls if no call has waited there for this many seconds.
        load_ratio: the engine that loses calls has more than this many times the calls in flight of the other one.
        cooldown_s: seconds for which no further calls of a program move. Calls that move together are one move. The
            paper names no number.

    Raises:
        BalancerError: a time is negative, the ratio is below 1, or a value is not a finite number.
    """

    idle_s: float = 0.1
    load_ratio: float = 2.0
    cooldown_s: float = 1.0

    def __post_init__(self) -> None:
        for name, least in (("idle_s", 0), ("load_ratio", 1), ("cooldown_s", 0)):
            value = check_number(getattr(self, name), name, BalancerError)
            if not least <= value < math.inf:
                raise BalancerError(f"{name} must be a finite number, {least} or more, not {value}.")

    @property
    def look_every_s(self) -> float:
        """Seconds between two looks at the queues while the load is uneven."""
        return max(_SHORTEST_LOOK_S, self.idle_s / 2)


_SHORTEST_LOOK_S: Final = 0.01
_MOVE_TOKENS: Final = 256.0  # worth computing again on an idle engine to be ahead of one call, as in adaptive locality


class EngineQueue(NamedTuple):
    load: EngineLoad
    waiting: int  # calls in its queue, including those that wait again after a preemption


class Steal(NamedTuple):
    """The decision to move calls from one engine to another."""

    thief: EngineId
    victim: EngineId
    most: int  # the most calls that move
    most_cached: int  # a call of which the victim has more tokens cached stays


class Stealing:
    """Decides when an engine takes calls of another, and which programs may move.

    The paper says in one place that an idle thief *or* an overloaded victim is enough, and in its safeguards that both
    are required. Here both are required. An engine is idle when no call waits there. Calls may run there: otherwise
    every ratio to its load would be infinite. An engine without calls counts as having one.

    Half of the difference moves, but no more calls than wait at the victim, and no more than the thief can begin at
    once. The paper moves one session at a time, and assigns it to the thief, because its KV moves along. Here that
    holds on one host only. So only a call moves of which the victim has little cached for the difference in load, and
    the program stays assigned to the engine that has the rest of its KV.
    """

    def __init__(self, config: StealingConfig) -> None:
        self.config = config
        self._idle_since_s: dict[EngineId, float] = {}
        self._moved_s: dict[ProgramId, float] = {}  # by program, its last move; the oldest first

    def is_uneven(self, loads: Loads) -> bool:
        """Whether the loads alone allow a steal. If not, `decide` need not be called, and idle times begin again."""
        uneven = len(loads) > 1 and self._exceeds(loads.most_calls, loads.fewest_calls)
        if not uneven:
            self._idle_since_s.clear()
        return uneven

    def decide(self, queues: Sequence[EngineQueue], now_s: float) -> Steal | None:
        """Decide from the queues of all engines that take calls. Call it every `look_every_s`; None: nothing moves."""
        idle = [queue for queue in queues if not queue.waiting]
        self._idle_since_s = {
            queue.load.engine_id: self._idle_since_s.get(queue.load.engine_id, now_s) for queue in idle
        }
        thieves = [
            queue.load
            for queue in idle
            if now_s - self._idle_since_s[queue.load.engine_id] >= self.config.idle_s
            and queue.load.calls < queue.load.capacity
        ]
        victims = [queue for queue in queues if queue.waiting]
        if not thieves or not victims:
            return None
        thief = min(thieves, key=lambda load: load.calls)
        victim = max(victims, key=lambda queue: queue.load.calls)
        if not self._exceeds(victim.load.calls, thief.calls):
            return None
        half = (victim.load.calls - thief.calls) // 2
        most = min(half, victim.waiting, thief.capacity - thief.calls)
        most_cached = int(_MOVE_TOKENS * (victim.load.calls - thief.calls) / (1 + thief.calls))
        return Steal(thief.engine_id, victim.load.engine_id, most, most_cached) if most else None

    def _exceeds(self, calls: int, least: int) -> bool:
        return calls > self.config.load_ratio * max(1, least)

    def may_move(self, program_id: ProgramId, now_s: float) -> bool:
        """Whether a program is not in its cooldown."""
        return now_s - self._moved_s.get(program_id, -math.inf) >= self.config.cooldown_s

    def moved(self, program_id: ProgramId, thief: EngineId, now_s: float) -> None:
        """Note that a call of a program has moved. The idle time of the thief begins again."""
        self._idle_since_s.pop(thief, None)
        self._moved_s.pop(program_id, None)
        self._moved_s[program_id] = now_s
        while self._moved_s and self.may_move(oldest := next(iter(self._moved_s)), now_s) and oldest != program_id:
            del self._moved_s[oldest]
