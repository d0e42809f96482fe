"""Simulation of program-aware serving, with the same policies and balancers as the engines (docs/simulator.md)."""

from __future__ import annotations

from weft.core.errors import SimulationError
from weft.core.sim.records import Batch, Execution
from weft.core.sim.settings import SimSettings
from weft.core.sim.simulator import ProgramResult, SimResult, simulate
from weft.core.sim.step_time import StepSample, StepTime
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
    "simulate",
]
