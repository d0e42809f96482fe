"""Scheduling policies, written once for vLLM's scheduler and for simulation.

To add a policy, write its module with `@register(...)` and import its class here (docs/how-to/add-a-policy.md).
"""

from __future__ import annotations

from typing import Final

from weft.core.policies.astraea import Astraea, AstraeaOracle
from weft.core.policies.atlas import Atlas
from weft.core.policies.atlas_by_program import AtlasByProgram
from weft.core.policies.auto import Auto
from weft.core.policies.base import Policy
from weft.core.policies.config import DEFAULT_POLICY, PolicyConfig
from weft.core.policies.fair import Fair
from weft.core.policies.fcfs import Fcfs
from weft.core.policies.learned import Learned
from weft.core.policies.mlfq import Mlfq
from weft.core.policies.multilevel import DEFAULT_BETA, DEFAULT_BOUNDS_S, MultilevelParameters, MultilevelPolicy
from weft.core.policies.oracles import Sjf, Srpt
from weft.core.policies.plas import Plas
from weft.core.policies.priority import Priority
from weft.core.policies.registry import register, registration, registrations
from weft.core.policies.round_robin import RoundRobin
from weft.core.policies.steps.costs import StepCosts
from weft.core.policies.steps.room import Room
from weft.core.policies.steps.tokens import StepTokens
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
