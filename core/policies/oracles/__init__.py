"""Policies that know the future, as bounds on what a policy of an engine can reach. They run in simulation only."""

from __future__ import annotations

from weft.core.policies.oracles.sjf import Sjf
from weft.core.policies.oracles.srpt import Srpt

__all__ = ["Sjf", "Srpt"]
