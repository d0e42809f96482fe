"""The balancers: which replica gets a call."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Literal

from weft.core.errors import BalancerError
from weft.core.ids import EngineId, ProgramId, SessionId
from weft.core.registries import check_number
from weft.core.routing.balancer import Arrival, AssigningBalancer, Balancer, Loads, register


@register("round_robin", "one engine after another")
class RoundRobinBalancer(Balancer):
    """Chooses one engine after another, for any call and any load."""

    def choose(self, arrival: Arrival, loads: Loads) -> EngineId:
        return loads.longest_ago


@register("least_used", "the engine with the fewest calls in flight, those in its queue included")
class LeastUsed(Balancer):
    """Chooses the engine with the fewest calls in flight."""

    def choose(self, arrival: Arrival, loads: Loads) -> EngineId:
        return loads.least_used


_THRESHOLD_TOKENS: Final = 2048


@dataclass(frozen=True, slots=True)
class LocalityParameters:
    """The parameter of Algorithm 2.

    Args:
        threshold_tokens: the longest prompt that counts as short, in tokens (line 2).

    Raises:
        BalancerError: the threshold is negative or not a number.
    """

    threshold_tokens: int = _THRESHOLD_TOKENS

    def __post_init__(self) -> None:
        if not check_number(self.threshold_tokens, "threshold_tokens", BalancerError) >= 0:
            raise BalancerError(f"threshold_tokens must be 0 or more, not {self.threshold_tokens}.")


@register("locality", "Autellix: short prompts to the least used engine, others to their program's", LocalityParameters)
class Locality(AssigningBalancer):
    """Sends short calls to the least used engine and long calls to the engine of their program.

    A short prompt is mostly a system prompt, which every engine has cached. A long prompt shares most of its prefix
    with its own program only.
    """

    def __init__(self, threshold_tokens: int = _THRESHOLD_TOKENS) -> None:
        super().__init__()
        self._threshold_tokens = threshold_tokens

    def choose(self, arrival: Arrival, loads: Loads) -> EngineId:
        if arrival.prompt_tokens <= self._threshold_tokens:  # line 2
            return loads.least_used  # line 3
        engine_id = self._assigned.get(arrival.program_id)
        if engine_id is None:
            engine_id = self._assigned[arrival.program_id] = loads.least_used  # lines 9-10
        if loads.calls(engine_id) is None:  # the engine is full: only this call goes elsewhere
            return loads.least_used
        return engine_id  # line 6


By = Literal["program", "session"]

_THRESHOLD: Final = 0.8  # SAGA's theta, "20 % headroom"


@dataclass(frozen=True, slots=True)
class AffinityParameters:
    """The parameters of affinity.

    Args:
        threshold: the load from which an engine counts as overloaded, as a share of its capacity. Both are calls: those
            in flight, and the most that the engine runs at once.
        by: what stays on an engine: a "session" as in the paper, or a "program", of which a session may have several.

    Raises:
        BalancerError: the threshold is 0 or less or not a number, or `by` is neither.
    """

    threshold: float = _THRESHOLD
    by: By = "session"

    def __post_init__(self) -> None:
        if not check_number(self.threshold, "threshold", BalancerError) > 0:
            raise BalancerError(f"threshold must be above 0, a share of an engine's capacity, not {self.threshold}.")
        if self.by not in ("program", "session"):
            raise BalancerError(f'by must be "program" or "session", not {self.by!r:.60}.')


@register("affinity", "SAGA: the session's engine, unless it is overloaded", AffinityParameters)
class Affinity(AssigningBalancer):
    """Sends a call to the engine that has its session's cache, unless that engine is overloaded (eq. 7).

    A call whose engine is overloaded goes to the least loaded engine. Its session is assigned to that engine from then
    on, because that engine has computed the whole prompt.

    The paper defines neither load nor capacity, and does not say whether a session whose call went elsewhere returns.
    Here load is the number of calls in flight, and capacity the number of calls that an engine runs at once, because a
    balancer knows both without asking. An engine that is short of KV with fewer calls does not count as overloaded.
    """

    def __init__(self, threshold: float = _THRESHOLD, by: By = "session") -> None:
        super().__init__()
        self._threshold = threshold
        self._by = by

    def choose(self, arrival: Arrival, loads: Loads) -> EngineId:
        key = arrival.program_id if self._by == "program" else arrival.session_id
        assigned = self._assigned.get(key)
        calls = loads.calls(assigned)
        if assigned is not None and calls is not None and calls < self._threshold * loads.capacity:
            return assigned
        chosen = self._assigned[key] = loads.least_used
        return chosen

    def end_program(self, program_id: ProgramId) -> None:
        if self._by == "program":
            self._assigned.pop(program_id, None)

    def end_session(self, session_id: SessionId) -> None:
        if self._by == "session":
            self._assigned.pop(session_id, None)


_IDLE_TOKENS: Final = 1024
_UNEVEN: Final = 1.5  # 1 made mixed programs 2 % slower in simulation, on other seeds than those of the results


@dataclass(frozen=True, slots=True)
class AdaptiveLocalityParameters:
    """The parameter of adaptive locality.

    Args:
        idle_tokens: the prompt tokens that are worth computing again on an idle engine to be ahead of one call. The
            default was chosen in simulation, on other seeds than those of the results; 512 differs little.

    Raises:
        BalancerError: the number is negative, infinite or not a number.
    """

    idle_tokens: float = _IDLE_TOKENS

    def __post_init__(self) -> None:
        if not 0 <= check_number(self.idle_tokens, "idle_tokens", BalancerError) < math.inf:
            raise BalancerError(f"idle_tokens must be a finite number, 0 or more, not {self.idle_tokens}.")


@register("adaptive_locality", "the program's engine, unless it is too busy for the prompt", AdaptiveLocalityParameters)
class AdaptiveLocality(AssigningBalancer):
    """Algorithm 2 of Autellix with a threshold that follows the load.

    Algorithm 2 sends every short prompt to the least used engine. That pays if waiting costs more than computing the
    prompt again, and a fixed threshold sees neither cost. Here it is ::

        idle_tokens * (calls of the program's engine - calls of the least used one) / (1 + calls of the least used one)

    The difference stands for the calls that this call would wait for. The divisor stands for the calls that would wait
    while its prompt is computed again: none on an idle engine, and many on a busy one. At equal load the threshold is
    0, and programs stay. A program whose call goes to the least used engine is assigned to that engine, which then has
    its whole prompt. Where it finds its KV there, its call goes whatever its length if the quotient is 1.5 or more.
    """

    def __init__(self, idle_tokens: float = _IDLE_TOKENS) -> None:
        super().__init__()
        self._idle_tokens = idle_tokens

    def choose(self, arrival: Arrival, loads: Loads) -> EngineId:
        least = loads.least_used
        assigned = self._assigned.get(arrival.program_id)
        if assigned is not None:
            calls, fewest = loads.calls(assigned), loads.fewest_calls
            if calls is None:  # the engine is full: only this call goes elsewhere
                return least
            uneven = (calls - fewest) / (1 + fewest)
            if arrival.prompt_tokens > self._idle_tokens * uneven and not (loads.moves_kv and uneven >= _UNEVEN):
                return assigned
        self._assigned[arrival.program_id] = least
        return least
