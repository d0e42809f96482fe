"""What an engine can serve, so that rates can be given as multiples of it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

from weft.core.policies import PolicyConfig
from weft.core.sim.settings import SimSettings
from weft.core.sim.simulator import simulate
from weft.core.trace.format import TraceProgram


def capacity(programs: Iterable[TraceProgram], settings: SimSettings) -> float:
    """The programs that end in a unit of time when all of them are there at once.

    It is measured under FCFS and without a bound of the KV cache, so that nothing is computed twice. A policy cannot
    serve many more in the long run.

    Args:
        programs: Enough of them that the last ones, which leave slots empty, do not count. Their arrivals do not
            matter.
        settings: The engine.
    """
    crowd = [replace(program, arrival_s=0.0) for program in programs]
    return simulate(crowd, replace(settings, policy=PolicyConfig("fcfs"), kv_tokens=math.inf)).throughput
