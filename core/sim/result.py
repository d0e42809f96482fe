"""The result of a simulation, and its statistics."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from weft.core.sim.batch import Jump
from weft.core.sim.settings import StepTime


def percentile(values: Iterable[float], percent: float) -> float:
    """The value that `percent` percent of the values do not exceed, interpolated linearly. Needs at least one value."""
    ranked = sorted(values)
    position = (len(ranked) - 1) * percent / 100
    low = ranked[math.floor(position)]
    return low + (ranked[math.ceil(position)] - low) * (position % 1)


class Execution(NamedTuple):
    """The time that a call spent in a replica's batch without a break."""

    program: str
    call_id: str
    replica: int
    start_s: float
    end_s: float


class Batch(NamedTuple):
    """Consecutive steps of a replica with the same calls."""

    replica: int
    began_s: float
    steps: int
    decode_tokens: int  # in each step: one for each call that decodes
    prefill_tokens: int  # in each step
    context_tokens: int  # tokens attended to in the first step; each further step attends to those computed before, too
    copied_tokens: int  # to host memory and back, with all of the steps

    def took_s(self, step_time: StepTime) -> float:
        """Seconds that all of the steps take together."""
        first_s = step_time.step_s(self.decode_tokens, self.prefill_tokens, self.context_tokens)
        growth_s = step_time.context_token_s * (self.decode_tokens + self.prefill_tokens)
        steps_s = Jump(self.began_s, first_s, growth_s, self.steps).duration_s(self.steps)
        return steps_s + self.copied_tokens * step_time.copy_token_s


@dataclass(slots=True)
class Counts:
    """Totals over all replicas: numbers of tokens, and the numbers of preemptions and of calls that moved."""

    prompt: int = 0  # prompt tokens of the calls that have started
    prefix_hits: int = 0  # the part of these that was in the prefix cache when the call first started
    host_hits: int = field(default=0, repr=False)  # a further part, in host memory. Tests keep digests of the repr
    recomputed: int = 0  # tokens computed again after a preemption
    again: int = 0  # prompt tokens that a call shares with its parents, but that were computed again at its start
    spilled: int = 0  # copied to host memory for later calls
    fetched: int = 0  # copied back for them
    swapped: int = 0  # copied to host memory at preemptions
    preemptions: int = 0
    moved: int = 0  # calls that moved to another replica before they began


class ProgramResult(NamedTuple):
    """The times of a program, in seconds (in units of time with `unit_steps`)."""

    arrival: float
    finish: float
    wait: float  # in queues, summed over its calls
    service: float  # in batches, summed over its calls
    calls: int

    @property
    def latency(self) -> float:
        return self.finish - self.arrival


@dataclass(frozen=True, slots=True)
class SimResult:
    """The result of a simulation. Times are in seconds (in units of time with `unit_steps`)."""

    policy: str
    programs: dict[str, ProgramResult]  # in the order of the trace
    counts: Counts
    runs: tuple[Execution, ...] = field(default=(), repr=False)  # only with `simulate(runs=True)`
    batches: tuple[Batch, ...] = field(default=(), repr=False)  # only with `simulate(batches=True)`

    @property
    def makespan(self) -> float:
        """Time from the first arrival of a program to the end of the last one."""
        rows = self.programs.values()
        return max(row.finish for row in rows) - min(row.arrival for row in rows)

    @property
    def total_wait(self) -> float:
        return sum(row.wait for row in self.programs.values())

    @property
    def mean_latency(self) -> float:
        """Mean time of a program from arrival to end: the average job completion time."""
        return sum(row.latency for row in self.programs.values()) / len(self.programs)

    def latency(self, percent: float) -> float:
        """The latency that `percent` percent of the programs do not exceed, interpolated linearly."""
        return percentile([row.latency for row in self.programs.values()], percent)

    @property
    def throughput(self) -> float:
        """Programs that end in a unit of time, from the first arrival to the last end."""
        return len(self.programs) / self.makespan

    @property
    def prefix_hit_rate(self) -> float:
        """Share of the prompt tokens found in the prefix cache when a call first started; 0 without prompt tokens."""
        return self.counts.prefix_hits / self.counts.prompt if self.counts.prompt else 0.0

    @property
    def host_hit_rate(self) -> float:
        """Share of the prompt tokens found only in host memory when a call first started; 0 without prompt tokens."""
        return self.counts.host_hits / self.counts.prompt if self.counts.prompt else 0.0

    def to_dict(self) -> dict[str, object]:
        """The result as values that JSON can hold, without `runs` and `batches`."""
        return {
            "policy": self.policy,
            "makespan": self.makespan,
            "total_wait": self.total_wait,
            "mean_latency": self.mean_latency,
            "p95_latency": self.latency(95),
            "p99_latency": self.latency(99),
            "prefix_hit_rate": self.prefix_hit_rate,
            "host_hit_rate": self.host_hit_rate,
            "recomputed_tokens": self.counts.recomputed,
            "again_tokens": self.counts.again,
            "spilled_tokens": self.counts.spilled,
            "fetched_tokens": self.counts.fetched,
            "swapped_tokens": self.counts.swapped,
            "preemptions": self.counts.preemptions,
            "programs": {name: row._asdict() for name, row in self.programs.items()},
        }
