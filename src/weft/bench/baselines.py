"""The schedulers that `weft bench` compares."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from weft.core.errors import BenchError
from weft.core.policies import POLICIES, PolicyConfig


@dataclass(frozen=True, slots=True)
class Baseline:
    """How an engine schedules: with vLLM's own scheduler, or with Weft's under one of its policies."""

    stock: Literal["fcfs", "priority"] | None = None  # vLLM's `scheduling_policy`
    policy: PolicyConfig | None = None
    swaps: bool = False  # The KV of every preempted call is swapped to host memory; otherwise it is computed again.

    @property
    def simulated(self) -> PolicyConfig:
        """The policy with which the simulator schedules the same way."""
        if self.policy is not None:
            return self.policy
        return PolicyConfig("priority" if self.stock == "priority" else "fcfs")


BASELINES: Final[dict[str, Baseline]] = {
    "stock-fcfs": Baseline(stock="fcfs"),
    "stock-again": Baseline(stock="fcfs"),  # The difference between it and stock-fcfs is noise.
    # A user of stock vLLM can give a program's position in the order of arrival as the priority of its calls.
    "stock-priority": Baseline(stock="priority"),
    **{name: Baseline(policy=PolicyConfig(name)) for name in POLICIES},
    "atlas-swap": Baseline(policy=PolicyConfig("atlas"), swaps=True),
}
DEFAULT_BASELINES: Final = ("stock-fcfs", "stock-priority", "mlfq", "plas", "atlas", "auto")


def check_baselines(names: Sequence[str]) -> None:
    """Check that these baselines can be compared.

    Raises:
        BenchError: there is no name, a name is unknown, or a name occurs twice.
    """
    unknown = [name for name in names if name not in BASELINES]
    if unknown or not names:
        raise BenchError(f"there is no baseline {', '.join(unknown)!r}; choose from {', '.join(BASELINES)}.")
    if len(set(names)) < len(names):
        raise BenchError(
            f"--baselines is {','.join(names)}, in which a baseline is named twice; name each once (stock-again "
            "schedules like stock-fcfs)."
        )
