"""ATLAS with each queue in the order of the programs' arrival: a baseline."""

from __future__ import annotations

from weft.core.policies.atlas import Atlas
from weft.core.policies.multilevel import MultilevelParameters
from weft.core.policies.registry import register
from weft.core.policies.view import Call, Rank


@register("atlas_by_program", "ATLAS, each queue in the order of programs", MultilevelParameters, simulation_only=True)
class AtlasByProgram(Atlas):
    """ATLAS whose queues are first come, first served by program and not by call.

    This is not Algorithm 1. It shows how much of another policy's gain over ATLAS comes from this order alone.
    """

    def _enter(self, call: Call, level: int) -> None:
        super()._enter(call, level)
        entered = call.rank
        call.rank = Rank(entered.level, call.program.arrival_order, int(entered.order))
