"""Adaptive Thread-Level Attained Service: Autellix §4.2.1, eq. 2 as the single scalar of Algorithm 1, line 4."""

from __future__ import annotations

from weft.core.policies.multilevel import MultilevelParameters, MultilevelPolicy
from weft.core.policies.registry import register
from weft.core.policies.view import Call


@register("atlas", "least attained service first, along a program's critical path", MultilevelParameters)
class Atlas(MultilevelPolicy):
    """Ranks a call by the longest critical path that its program has shown so far.

    Parallel calls of a program inherit the same scalar and therefore rank equally. Unlike under PLAS, a wide program is
    not penalised for its width.
    """

    def attained_service_s(self, call: Call) -> float:
        return call.program.attained.service_s
