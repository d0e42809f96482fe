"""Multi-level feedback queue over single calls: the paper's MLFQ baseline, which knows no programs."""

from __future__ import annotations

from weft.core.policies.base import Call
from weft.core.policies.multilevel import MultilevelPolicy


class Mlfq(MultilevelPolicy):
    """Every new call starts in Q_1; a call starves by its own wait and run time."""

    name = "mlfq"

    def attained_service_s(self, call: Call) -> float:
        del call
        return 0.0

    def attained_wait_s(self, call: Call) -> float:
        del call
        return 0.0
