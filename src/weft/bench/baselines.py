"""The schedulers that `weft bench` compares."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from weft.core.errors import BenchError
from weft.core.policies import PolicyConfig


@dataclass(frozen=True, slots=True)
class Baseline:
    """How an engine schedules: by vLLM's own policy or one of Weft's."""

    stock: Literal["fcfs", "priority"] | None = None
    policy: PolicyConfig | None = None
    swaps: bool = False  # the KV of preempted calls to host memory, always; else it is computed again

    @property
    def simulated(self) -> PolicyConfig | Literal["priority"]:
        """The policy of the simulator that does the same."""
        if self.policy is not None:
            return self.policy
        return "priority" if self.stock == "priority" else PolicyConfig("fcfs")


BASELINES: Final[dict[str, Baseline]] = {
    "stock-fcfs": Baseline(stock="fcfs"),
    "stock-again": Baseline(stock="fcfs"),  # against stock-fcfs: how much is noise
    # What a user of stock vLLM would do: a call's priority is its program's place in the order of arrival.
    "stock-priority": Baseline(stock="priority"),
    **{name: Baseline(policy=PolicyConfig(name)) for name in ("fcfs", "mlfq", "plas", "atlas")},
    "atlas-swap": Baseline(policy=PolicyConfig("atlas"), swaps=True),
}
DEFAULT_BASELINES: Final = ("stock-fcfs", "stock-priority", "fcfs", "mlfq", "plas", "atlas")


def check_baselines(names: Sequence[str]) -> None:
    """Refuse what cannot be compared.

    Raises:
        BenchError: no baseline, one that there is not, or one named twice.
    """
    unknown = [name for name in names if name not in BASELINES]
    if unknown or not names:
        raise BenchError(f"there is no baseline {', '.join(unknown)!r}; choose from {', '.join(BASELINES)}.")
    if len(set(names)) < len(names):
        raise BenchError("a baseline is named twice; name each once (stock-again plays stock-fcfs a second time).")
