"""Scheduling policies, written once for vLLM's scheduler and for simulation.

To add a policy, write its module with `@register(...)` and import its class here (docs/how-to/add-a-policy.md).
"""

from typing import Final

from weft.core.policies.auto import Auto as Auto
from weft.core.policies.config import DEFAULT_POLICY as DEFAULT_POLICY
from weft.core.policies.config import PolicyConfig as PolicyConfig
from weft.core.policies.fair_shares.fair import Fair as Fair
from weft.core.policies.learned import Learned as Learned
from weft.core.policies.orders import Fcfs as Fcfs
from weft.core.policies.orders import Srpt as Srpt
from weft.core.policies.papers.astraea import Astraea as Astraea
from weft.core.policies.papers.multilevel import DEFAULT_BETA as DEFAULT_BETA
from weft.core.policies.papers.multilevel import Atlas as Atlas
from weft.core.policies.papers.multilevel import Mlfq as Mlfq
from weft.core.policies.papers.multilevel import MultilevelPolicy as MultilevelPolicy
from weft.core.policies.papers.multilevel import Plas as Plas
from weft.core.policies.papers.multilevel import RoundRobin as RoundRobin
from weft.core.policies.policy import Policy as Policy
from weft.core.policies.policy import PolicyEvent as PolicyEvent
from weft.core.policies.policy import register as register
from weft.core.policies.policy import registration as registration
from weft.core.policies.policy import registrations as registrations
from weft.core.policies.queues import DEFAULT_BOUNDS_S as DEFAULT_BOUNDS_S
from weft.core.policies.steps import StepCosts as StepCosts
from weft.core.policies.steps import StepTokens as StepTokens
from weft.core.policies.view import Call as Call
from weft.core.policies.view import KvSize as KvSize
from weft.core.policies.view import ProgramChanged as ProgramChanged
from weft.core.policies.view import ProgramEnded as ProgramEnded
from weft.core.policies.view import ProgramView as ProgramView
from weft.core.policies.view import Rank as Rank

POLICIES: Final = tuple(each.name for each in registrations() if not each.simulation_only)
SIMULATED_POLICIES: Final = tuple(each.name for each in registrations())
