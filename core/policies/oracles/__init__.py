"""Policies that know the future. They run in simulation only, as bounds on what a real policy can reach."""

from __future__ import annotations

from weft.core.policies.oracles.sjf import Sjf
from weft.core.policies.oracles.srpt import Srpt

__all__ = ["Sjf", "Srpt"]
