"""Multi-level feedback queue over single calls: the baseline MLFQ of Autellix (§6.2), which does not know programs."""

from __future__ import annotations

from weft.core.policies.multilevel import MultilevelParameters, MultilevelPolicy
from weft.core.policies.registry import register
from weft.core.policies.view import Call


@register("mlfq", "a multi-level feedback queue over single calls, without programs", MultilevelParameters)
class Mlfq(MultilevelPolicy):
    """Every new call starts in Q_1. Only its own wait and run time count for anti-starvation."""

    def attained_service_s(self, call: Call) -> float:
        del call
        return 0.0

    def attained_wait_s(self, call: Call) -> float:
        del call
        return 0.0
