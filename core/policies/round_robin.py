"""Round robin over calls: what preemption by quantum alone gives, as a baseline."""

from __future__ import annotations

from weft.core.policies.base import Call
from weft.core.policies.multilevel import MultilevelPolicy


class RoundRobin(MultilevelPolicy):
    """One queue; a call that has run for the quantum goes to its tail.

    Args:
        quantum_s: run time in seconds until then.
    """

    name = "rr"

    def __init__(self, quantum_s: float) -> None:
        super().__init__(bounds_s=(), beta=None, quanta_s=(quantum_s,))

    def attained_service_s(self, call: Call) -> float:
        del call
        return 0.0
