"""The loads of `bench_policies_sim.py`: programs at the rate at which FCFS is slow, and the figures of a run."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from arrival_rates import ALONE_PER_S, arriving, highest_rate

from weft.bench.results.measures import summarise
from weft.core.policies import PolicyConfig
from weft.core.sim import SimResult, SimSettings, TraceProgram, simulate
from weft.core.trace.format import path_tokens
from weft.core.trace.workloads import generate, poisson

# A workload's number of programs as a multiple of `--programs`: more of the short ones.
SHARE = {"chat": 2, "tools": 2, "search": 0.2, "mixed": 1}
GUESSES = {"chat": 0.7, "tools": 1.0, "search": 0.065, "mixed": 0.2}  # programs per second where the search begins
Summary = dict[str, Any]


@dataclass(frozen=True)
class Load:
    """The programs of a workload and seed, and their arrival rate."""

    workload: str
    seed: int
    programs: tuple[TraceProgram, ...]
    rate: float = math.nan

    def call_service_s(self, settings: SimSettings) -> float:
        """The 90th percentile of the service of calls under FCFS, which is the first bound that calibration finds."""
        programs = arriving(self.programs, self.rate, self.seed)
        executions = simulate(programs, with_policy(settings, "fcfs"), runs=True).runs
        return statistics.quantiles((each.end_s - each.start_s for each in executions), n=10)[-1]

    def simulate(self, settings: SimSettings, policy: PolicyConfig | str) -> Summary:
        """Simulate the programs under a policy."""
        programs = arriving(self.programs, self.rate, self.seed)
        return summary(programs, simulate(programs, with_policy(settings, policy)))


def with_policy(settings: SimSettings, policy: PolicyConfig | str) -> SimSettings:
    return replace(settings, policy=PolicyConfig(policy) if isinstance(policy, str) else policy)


def summary(programs: Sequence[TraceProgram], result: SimResult) -> Summary:
    """The figures by which policies are compared, with times in seconds.

    `kinds` has the mean latency of all programs with the same name.
    """
    latencies = [result.programs[program.program].latency for program in programs]
    kinds: dict[str, list[float]] = {}
    for program, latency in zip(programs, latencies, strict=True):
        kinds.setdefault(program.name or "", []).append(latency)
    outputs = [[call.output_tokens for call in program.calls] for program in programs]
    both = list(zip(programs, latencies, outputs, strict=True))
    waited_s, served_s = result.total_wait, sum(row.service for row in result.programs.values())
    return {
        "latency": summarise(latencies),
        "per_token": summarise([latency / path_tokens(program.calls) for program, latency, _ in both]),
        "per_token_of_all": summarise([latency / sum(tokens) for _, latency, tokens in both]),
        "kinds": {kind: statistics.fmean(found) for kind, found in sorted(kinds.items())},
        "tokens_per_s": sum(map(sum, outputs)) / result.makespan,
        "wait_share": waited_s / (waited_s + served_s),
        "hit_rate": result.prefix_hit_rate,
        "preemptions": result.counts.preemptions,
        "recomputed_tokens": result.counts.recomputed,
    }


def loaded(workload: str, seed: int, programs: int, times_alone: float, settings: SimSettings) -> Load:
    """Programs with the arrival rate at which FCFS has a mean latency of so many times that which they have alone.

    Args:
        programs: The programs of the mixed workload; the other workloads have multiples of it.
    """
    count = math.ceil(programs * SHARE[workload])
    made = generate(workload, count, poisson(random.Random(0), 1.0), random.Random(f"{workload} {seed}"))
    load = Load(workload, seed, tuple(made))
    allowed_s = times_alone * replace(load, rate=ALONE_PER_S).simulate(settings, "fcfs")["latency"]["mean"]

    def ratio(rate: float) -> float:
        return float(replace(load, rate=rate).simulate(settings, "fcfs")["latency"]["mean"] / allowed_s)

    return replace(load, rate=highest_rate(ratio, GUESSES[workload]))
