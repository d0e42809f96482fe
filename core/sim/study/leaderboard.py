"""Every policy beside every plain rival on the same programs: gated and not, with and without host memory."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Final, NamedTuple

from weft.core.kv_cache.policies import KvPolicyConfig
from weft.core.policies import DEFAULT_POLICY, PolicyConfig
from weft.core.sim.result import SimResult, percentile
from weft.core.sim.settings import SimSettings
from weft.core.sim.simulator import simulate
from weft.core.trace.format import TraceProgram

POLICIES: Final = ("fcfs", "priority", "mlfq", "plas", "atlas", "astraea", "fair", "learned")
PLAIN: Final = ("fcfs", "priority")  # policies that need no idea of what a program will do
ORACLE: Final = "srpt"
NO_HOST: Final = ""
HOST_LRU: Final = "host lru"  # vLLM's kv_offloading_size
HOST_NEXT_USE: Final = "host next-use"
# What a program may take at most, for the throughput at an objective: this multiple of its time on an idle engine.
SLO_MULTIPLE: Final = 3.0
_APART_S: Final = 1e7  # longer than any program takes


class Rival(NamedTuple):
    """A way to serve, which the leaderboard compares.

    Attributes:
        gate: Whether it has the gate; None: the policy's default.
        host: `NO_HOST`, `HOST_LRU` or `HOST_NEXT_USE`.
        knows_pauses: Whether the KV policy is an oracle that knows the next uses.
    """

    policy: str
    gate: bool | None
    host: str
    knows_pauses: bool = False

    @property
    def name(self) -> str:
        """Its name in tables."""
        gate = {None: "", True: " + gate", False: ", no gate"}[self.gate]
        policy = f"{self.policy}{' (default)' if self.is_default else ''}{gate}"
        host = f" + {self.host}" if self.host else ""
        return f"{policy}{host}{', next uses known' if self.knows_pauses else ''}"

    @property
    def is_default(self) -> bool:
        """Whether it is what `weft.Engine` does by default, with as much host memory as the engine has."""
        return self == DEFAULT

    @property
    def is_plain(self) -> bool:
        """Whether anybody could build it in a day: order of arrival, a gate, and host memory with plain LRU."""
        return self.policy in PLAIN and self.host in {NO_HOST, HOST_LRU}

    @property
    def is_oracle(self) -> bool:
        """Whether it knows the future."""
        return self.policy == ORACLE or self.knows_pauses

    def without_host(self) -> Rival:
        """The same without host memory."""
        return self._replace(host=NO_HOST)

    def settings(self, base: SimSettings) -> SimSettings:
        """The settings of an engine that serves so.

        Args:
            base: The engine. Its policies do not matter, and its `host_kv_tokens` counts for rivals with host memory.
        """
        uses = KvPolicyConfig("next-use")
        kv_policies = {
            NO_HOST: uses if self.knows_pauses else None,
            HOST_LRU: KvPolicyConfig("lru"),
            HOST_NEXT_USE: uses,
        }
        return replace(
            base,
            policy=PolicyConfig(self.policy, gate=self.gate),
            host_kv_tokens=base.host_kv_tokens if self.host else 0,
            kv_policy=kv_policies[self.host],
            knows_pauses=self.knows_pauses,
        )


DEFAULT: Final = Rival(DEFAULT_POLICY, None, HOST_NEXT_USE)


def rivals(*, host: bool) -> list[Rival]:
    """All rivals: policies with and without the gate, the default, and those that know the future.

    `host` says whether the engine has host memory, so that each is there without it, with LRU and with next-use.
    """
    hosts = (NO_HOST, HOST_LRU, HOST_NEXT_USE) if host else (NO_HOST,)
    found = [Rival(policy, gate, where) for where in hosts for policy in POLICIES for gate in (False, True)]
    found += [Rival(DEFAULT_POLICY, gate, where) for where in hosts for gate in (None, False)]
    found += [Rival(ORACLE, gate, where) for where in hosts for gate in (False, True)]
    return [*found, Rival(ORACLE, True, HOST_NEXT_USE if host else NO_HOST, knows_pauses=True)]


@dataclass(frozen=True, slots=True)
class Score:
    """What one rival makes of the programs. Times are in seconds; those per token are of a program's output tokens."""

    rival: Rival
    mean_s: float
    p95_s: float
    p99_s: float
    worst_s: float
    token_mean_s: float
    token_p95_s: float
    token_p99_s: float
    token_worst_s: float
    throughput: float  # programs a second
    slo_throughput: float  # of these, programs within `SLO_MULTIPLE` of their time on an idle engine
    prefix_hits: float  # the share of prompt tokens that were in the KV cache or in host memory
    recomputed_tokens: int  # computed again: after preemptions, or although an earlier call of the program had them

    @property
    def measures(self) -> dict[str, float]:
        """All figures by name."""
        return {each.name: getattr(self, each.name) for each in fields(self) if each.name != "rival"}


def score(rival: Rival, result: SimResult, programs: Sequence[TraceProgram], alone_s: Mapping[str, float]) -> Score:
    """What a rival makes of the programs.

    Args:
        alone_s: For each program, the seconds that it takes on an idle engine.
    """
    latencies = [result.programs[program.program].latency for program in programs]
    tokens = [sum(call.output_tokens for call in program.calls) for program in programs]
    by_token = [latency / count for latency, count in zip(latencies, tokens, strict=True)]
    in_time = sum(
        latency <= SLO_MULTIPLE * alone_s[program.program] for latency, program in zip(latencies, programs, strict=True)
    )
    return Score(
        rival,
        sum(latencies) / len(latencies),
        percentile(latencies, 95),
        percentile(latencies, 99),
        max(latencies),
        sum(by_token) / len(by_token),
        percentile(by_token, 95),
        percentile(by_token, 99),
        max(by_token),
        result.throughput,
        result.throughput * in_time / len(programs),
        result.prefix_hit_rate + result.host_hit_rate,
        result.counts.again + result.counts.recomputed,
    )


def best_plain(scores: Iterable[Score], *, host: bool = True) -> Score:
    """The plain rival with the smallest mean completion time. There must be a plain one.

    `host` says whether rivals with host memory count.
    """
    plain = (each for each in scores if each.rival.is_plain and (host or not each.rival.host))
    return min(plain, key=lambda each: each.mean_s)


def ranked(scores: Sequence[Score]) -> Iterator[tuple[Score, float]]:
    """Yield the scores with the ratios of their mean completion times to the best plain rival's, the smallest first."""
    least_s = best_plain(scores).mean_s  # above 0, because every call takes a step
    for each in sorted(scores, key=lambda each: each.mean_s):
        yield each, each.mean_s / least_s


def alone(programs: Sequence[TraceProgram], base: SimSettings) -> dict[str, float]:
    """The seconds that each program takes on an idle engine, which keeps its context between its calls."""
    apart = [replace(program, arrival_s=number * _APART_S) for number, program in enumerate(programs)]
    engine = replace(base, policy=PolicyConfig("fcfs"), kv_tokens=math.inf, host_kv_tokens=0, concurrency=None)
    return {name: row.latency for name, row in simulate(apart, engine).programs.items()}
