"""The simulation of program-aware serving, with the policies and balancers of the engines (docs/how-to/simulate.md).

`weft sim`, benchmarks and tests use `simulate`. It repeats to the digit.
"""

from __future__ import annotations

from weft.core.errors import SimulationError
from weft.core.sim.result import Batch, Execution, ProgramResult, SimResult
from weft.core.sim.settings import SimSettings
from weft.core.sim.simulator import simulate
from weft.core.sim.step_time import StepSample, StepTime
from weft.core.sim.study.load import capacity
from weft.core.trace.format import TraceCall, TraceProgram

__all__ = [
    "Batch",
    "Execution",
    "ProgramResult",
    "SimResult",
    "SimSettings",
    "SimulationError",
    "StepSample",
    "StepTime",
    "TraceCall",
    "TraceProgram",
    "capacity",
    "simulate",
]
