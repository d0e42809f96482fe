"""Program-Level Attained Service: Autellix §4.2.1, eq. 1."""

from __future__ import annotations

from weft.core.policies.base import Call
from weft.core.policies.multilevel import MultilevelPolicy


class Plas(MultilevelPolicy):
    """Ranks a call by the run time of all its program's earlier calls together."""

    name = "plas"

    def attained_service_s(self, call: Call) -> float:
        return call.program.total_service_s

    def attained_wait_s(self, call: Call) -> float:
        return call.program.total_wait_s
