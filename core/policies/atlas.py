"""Adaptive Thread-Level Attained Service: Autellix §4.2.1, eq. 2 as the single scalar of Algorithm 1, line 4."""

from __future__ import annotations

from weft.core.policies.base import Call
from weft.core.policies.multilevel import MultilevelPolicy


class Atlas(MultilevelPolicy):
    """Ranks a call by the longest critical path its program has shown so far.

    Parallel calls of a program inherit the same scalar, so they stand together; a wide program is not punished for its
    width, as it is under PLAS.
    """

    name = "atlas"

    def attained_service_s(self, call: Call) -> float:
        return call.program.service_s
