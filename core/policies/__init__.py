"""Scheduling policies, written once for the vLLM scheduler and for simulation."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Literal

from weft.core.errors import PolicyError
from weft.core.policies.atlas import Atlas
from weft.core.policies.base import Call, Policy, Rank
from weft.core.policies.fcfs import Fcfs
from weft.core.policies.mlfq import Mlfq
from weft.core.policies.multilevel import MultilevelPolicy
from weft.core.policies.oracles.srpt import Srpt
from weft.core.policies.plas import Plas
from weft.core.policies.priority import Priority
from weft.core.policies.round_robin import RoundRobin

POLICIES: Final = ("fcfs", "mlfq", "plas", "atlas", "rr")

# Where calibration starts. The first bound should be above the service of a typical call, or calls are demoted while
# they run and preempt each other for nothing (measured in the demo: a call takes 2 to 3 s, and with a first bound of
# 0.5 s each was preempted once). Above it, doubling bounds keep programs apart over a wide range. The last of the five
# queues is first come, first served; with seven it lay so far out that long programs ended late, all of them together.
DEFAULT_BOUNDS_S: Final = (4.0, 8.0, 16.0, 32.0)
DEFAULT_BETA: Final = 8.0


@dataclass(frozen=True, slots=True)
class PolicyConfig:
    """Which policy, and its parameters. `fcfs` uses none of them, `rr` the first quantum only.

    Raises:
        PolicyError: an unknown name, or parameters that the policy refuses.
    """

    name: str = "atlas"
    # Inner bounds of the queues, in seconds of service; "auto": the default, until calls show where they should be.
    bounds_s: tuple[float, ...] | Literal["auto"] = "auto"
    beta: float | None = DEFAULT_BETA  # promote a call at this ratio of wait to service; None: never
    quanta_s: tuple[float, ...] | None = None  # run time in each queue; None: the width of the queue's range
    decide_every: int = 1  # engine steps from one promotion and preemption to the next (§4.2.2, multi-step scheduling)
    # Count service in tokens instead of time, this many seconds for each that is computed for the first time, prompt
    # and output alike (Astraea §4.3: time hangs on who else is in the batch, tokens do not). None: model-executor time.
    token_s: float | None = None

    def __post_init__(self) -> None:
        if self.decide_every < 1 or self.decide_every % 1:
            raise PolicyError(f"decide_every must be a whole number of steps, at least 1, not {self.decide_every}.")
        if self.token_s is not None and not 0 < self.token_s < math.inf:
            raise PolicyError(f"token_s must be positive seconds, or None to count time, not {self.token_s}.")
        if isinstance(self.bounds_s, str) and self.bounds_s != "auto":
            raise PolicyError(f'bounds_s must be increasing seconds, or "auto", not {self.bounds_s!r}.')
        self.make()

    def make(self) -> Policy:
        """A new policy object, for one engine."""
        multilevel: dict[str, type[Mlfq | Plas | Atlas]] = {"mlfq": Mlfq, "plas": Plas, "atlas": Atlas}
        calibrate = self.bounds_s == "auto"
        bounds_s = DEFAULT_BOUNDS_S if isinstance(self.bounds_s, str) else self.bounds_s
        if self.name in multilevel:
            return multilevel[self.name](bounds_s, self.beta, self.quanta_s, calibrate=calibrate)
        if self.name == "fcfs":
            return Fcfs()
        if self.name == "rr":
            return RoundRobin((self.quanta_s or bounds_s)[0])
        raise PolicyError(f"unknown policy {self.name!r}; choose one of {', '.join(POLICIES)}.")


__all__ = [
    "DEFAULT_BETA",
    "DEFAULT_BOUNDS_S",
    "POLICIES",
    "Atlas",
    "Call",
    "Fcfs",
    "Mlfq",
    "MultilevelPolicy",
    "Plas",
    "Policy",
    "PolicyConfig",
    "Priority",
    "Rank",
    "RoundRobin",
    "Srpt",
]
