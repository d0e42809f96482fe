"""Scheduling policies, written once for the vLLM scheduler and for simulation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from weft.core.errors import PolicyError
from weft.core.policies.atlas import Atlas
from weft.core.policies.base import Call, Policy, Rank
from weft.core.policies.fcfs import Fcfs
from weft.core.policies.multilevel import MultilevelPolicy
from weft.core.policies.plas import Plas

POLICIES: Final = ("fcfs", "plas", "atlas")

# A call of a small model on CPU or of a large one on GPU takes from some tenths of a second to a minute; doubling
# bounds keep programs apart over that range whatever the unit turns out to be.
DEFAULT_BOUNDS_S: Final = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
DEFAULT_BETA: Final = 8.0


@dataclass(frozen=True, slots=True)
class PolicyConfig:
    """Which policy, and its parameters. `fcfs` has none and ignores them.

    Raises:
        PolicyError: an unknown name, or parameters that the policy refuses.
    """

    name: str = "atlas"
    bounds_s: tuple[float, ...] = DEFAULT_BOUNDS_S  # inner bounds of the queues, in seconds of service
    beta: float | None = DEFAULT_BETA  # promote a call at this ratio of wait to service; None: never

    def __post_init__(self) -> None:
        self.make()

    def make(self) -> Policy:
        """A new policy object, for one engine."""
        if self.name == "fcfs":
            return Fcfs()
        if self.name == "plas":
            return Plas(self.bounds_s, self.beta)
        if self.name == "atlas":
            return Atlas(self.bounds_s, self.beta)
        raise PolicyError(f"unknown policy {self.name!r}; choose one of {', '.join(POLICIES)}.")


__all__ = [
    "DEFAULT_BETA",
    "DEFAULT_BOUNDS_S",
    "POLICIES",
    "Atlas",
    "Call",
    "Fcfs",
    "MultilevelPolicy",
    "Plas",
    "Policy",
    "PolicyConfig",
    "Rank",
]
