"""Round robin over calls: preemption by quantum alone, as a baseline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

from weft.core.errors import PolicyError
from weft.core.policies.papers.multilevel import MultilevelPolicy, check_parameters
from weft.core.policies.policy import register
from weft.core.policies.queues.calibration import DEFAULT_BOUNDS_S


@dataclass(frozen=True, slots=True)
class RoundRobinParameters:
    """The parameter of round robin.

    Args:
        quanta_s: The quantum of the one queue, in seconds of run time.

    Raises:
        PolicyError: There is not exactly one quantum, or it is not positive.
    """

    quanta_s: tuple[float, ...] = (DEFAULT_BOUNDS_S[0],)

    def __post_init__(self) -> None:
        check_parameters((), None, self.quanta_s)
        if self.quanta_s is None:
            raise PolicyError("round robin needs a quantum, such as quanta_s=(2.0,).")


@register("rr", "round robin: calls take turns, a quantum each", RoundRobinParameters)
class RoundRobin(MultilevelPolicy):
    """One queue. A call that has run for the quantum goes to its tail.

    Args:
        quantum_s: The quantum, in seconds of run time.
    """

    def __init__(self, quantum_s: float) -> None:
        super().__init__(bounds_s=(), beta=None, quanta_s=(quantum_s,))

    @classmethod
    def from_parameters(cls, parameters: Any) -> Self:
        return cls(*parameters.quanta_s)
