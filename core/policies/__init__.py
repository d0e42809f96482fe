"""Scheduling policies, written once for vLLM's scheduler and for simulation.

To add a policy, write its module with `@register(...)` and import its class here (docs/how-to/add-a-policy.md).
"""

from __future__ import annotations

from typing import Final

from weft.core.policies.auto import Auto
from weft.core.policies.config import DEFAULT_POLICY, PolicyConfig
from weft.core.policies.fair import Fair
from weft.core.policies.fcfs import Fcfs, Priority
from weft.core.policies.learned import Learned
from weft.core.policies.oracles import Sjf, Srpt
from weft.core.policies.papers.astraea import Astraea, AstraeaOracle
from weft.core.policies.papers.multilevel import (
    DEFAULT_BETA,
    DEFAULT_BOUNDS_S,
    Atlas,
    AtlasByProgram,
    Mlfq,
    MultilevelParameters,
    MultilevelPolicy,
    Plas,
)
from weft.core.policies.papers.round_robin import RoundRobin
from weft.core.policies.policy import Policy
from weft.core.policies.registry import register, registration, registrations
from weft.core.policies.steps import Room, StepCosts, StepTokens
from weft.core.policies.view import Call, ProgramView, Rank

POLICIES: Final = tuple(each.name for each in registrations() if not each.simulation_only)
SIMULATED_POLICIES: Final = tuple(each.name for each in registrations())

__all__ = [
    "DEFAULT_BETA",
    "DEFAULT_BOUNDS_S",
    "DEFAULT_POLICY",
    "POLICIES",
    "SIMULATED_POLICIES",
    "Astraea",
    "AstraeaOracle",
    "Atlas",
    "AtlasByProgram",
    "Auto",
    "Call",
    "Fair",
    "Fcfs",
    "Learned",
    "Mlfq",
    "MultilevelParameters",
    "MultilevelPolicy",
    "Plas",
    "Policy",
    "PolicyConfig",
    "Priority",
    "ProgramView",
    "Rank",
    "Room",
    "RoundRobin",
    "Sjf",
    "Srpt",
    "StepCosts",
    "StepTokens",
    "register",
    "registration",
    "registrations",
]
