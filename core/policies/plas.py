"""Program-Level Attained Service: Autellix §4.2.1, eq. 1."""

from __future__ import annotations

from weft.core.policies.multilevel import MultilevelParameters, MultilevelPolicy
from weft.core.policies.registry import register
from weft.core.policies.view import Call


@register("plas", "least attained service first, summed over all calls of a program", MultilevelParameters)
class Plas(MultilevelPolicy):
    """Ranks a call by the total run time of its program's earlier calls."""

    def attained_service_s(self, call: Call) -> float:
        return call.program.attained.total_service_s

    def attained_wait_s(self, call: Call) -> float:
        return call.program.attained.total_wait_s
