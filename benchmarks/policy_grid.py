"""The grid of `bench_policy_grid.py`: settings, programs, and what one policy makes of them.

A setting is a workload on an engine at a load. `GRID` has 62 of them:

- 48: each workload, with a KV cache that never fills, one of 262,144 and one of 65,536 tokens, at two, three and five
  times the latency that programs have alone, and closed, where all programs arrive at once. 16 slots.
- 8: each workload with 8 and with 64 slots, at three times, with a KV cache that never fills.
- 6: `tools` and `mixed` with tools that take 30 s instead of half a second, on each KV cache. They arrive as often as
  with half a second at three times.
"""

from __future__ import annotations

import functools
import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Final, NamedTuple

from arrival_rates import ALONE_PER_S, arriving, highest_rate

from weft.bench.results.measures import summarise
from weft.core.errors import SimulationError
from weft.core.policies import PolicyConfig
from weft.core.sim import SimSettings, TraceProgram, simulate
from weft.core.trace.format import path_tokens
from weft.core.trace.workloads import AUTELLIX, generate, poisson

# A workload's number of programs as a multiple of `--programs`: more of the short ones.
SHARE: Final = {"chat": 2, "tools": 2, "search": 0.2, "mixed": 1}
GUESSES: Final = {"chat": 0.7, "tools": 1.0, "search": 0.065, "mixed": 0.2}  # programs per second where a search begins
CLOSED: Final = math.inf
LONG_GAPS: Final = 60.0  # times those of the workload, which are half a second in the mean
METRICS: Final = tuple(f"{what} {key}" for what in ("per token", "completion") for key in ("mean", "p95", "p99"))
NAMES: Final = ("true", "shuffled", "unique", "drifting", "removed")


class Setting(NamedTuple):
    """A workload on an engine."""

    workload: str
    kv_tokens: float
    load: float  # the mean latency under FCFS, as a multiple of that alone; `CLOSED`: all programs arrive at once
    slots: int = 16
    gaps: float = 1.0  # times those of the workload
    arrivals_of_kv: float = 0  # programs arrive as often as with a KV cache of so many tokens; 0: with its own

    def __str__(self) -> str:
        kv = "KV ∞" if math.isinf(self.kv_tokens) else f"KV {self.kv_tokens:,.0f}"
        load = "closed" if self.load == CLOSED else f"load {self.load:g}"
        others = [f"{self.slots} slots"] * (self.slots != 16) + ["30 s gaps"] * (self.gaps > 1)
        others += [f"arrivals of KV {self.arrivals_of_kv:,.0f}"] * (self.arrivals_of_kv > 0)
        return ", ".join([self.workload, kv, load, *others])

    def engine(self, policy: PolicyConfig) -> SimSettings:
        """The engine under a policy."""
        return SimSettings(policy=policy, batch_size=self.slots, kv_tokens=self.kv_tokens)


_KV: Final = (math.inf, 262_144, 65_536)
GRID: Final = (
    *itertools.starmap(Setting, itertools.product(AUTELLIX, _KV, (2.0, 3.0, 5.0, CLOSED))),
    *(Setting(workload, math.inf, 3.0, slots) for workload in AUTELLIX for slots in (8, 64)),
    *(Setting(workload, kv, 3.0, gaps=LONG_GAPS) for workload in ("tools", "mixed") for kv in _KV),
)


def policy_of(name: str) -> PolicyConfig:
    """A policy by name; `+gate` puts it behind the gate, where `auto` always is."""
    return PolicyConfig(name.removesuffix("+gate"), gate=name.endswith("+gate") or None)


def programs_of(setting: Setting, seed: int, programs: int) -> tuple[TraceProgram, ...]:
    """The programs of a setting and seed, without arrivals that mean something. More slots need more of them."""
    return _generated(
        setting.workload, seed, math.ceil(programs * SHARE[setting.workload] * max(1, setting.slots / 16))
    )


@functools.lru_cache(maxsize=16)
def _generated(workload: str, seed: int, count: int) -> tuple[TraceProgram, ...]:
    return tuple(generate(workload, count, poisson(random.Random(0), 1.0), random.Random(f"{workload} {seed}")))


def rate_of(setting: Setting, seed: int, programs: int) -> float:
    """The rate in programs per second at which FCFS is at the setting's load; `CLOSED`: inf."""
    if setting.load == CLOSED:
        return math.inf
    return _rate(
        setting._replace(kv_tokens=setting.arrivals_of_kv or setting.kv_tokens, arrivals_of_kv=0, gaps=1.0),
        seed,
        programs,
    )


@functools.lru_cache(maxsize=64)
def _rate(setting: Setting, seed: int, programs: int) -> float:
    made, fcfs = programs_of(setting, seed, programs), setting.engine(PolicyConfig("fcfs"))
    allowed_s = setting.load * simulate(arriving(made, ALONE_PER_S, seed), fcfs).mean_latency
    return highest_rate(
        lambda rate: simulate(arriving(made, rate, seed), fcfs).mean_latency / allowed_s, GUESSES[setting.workload]
    )


def shown_names(programs: Sequence[TraceProgram], names: str) -> dict[str, str] | None:
    """The name of each program that policies see, by its id.

    - true: its own.
    - shuffled: that of any program, drawn by chance.
    - unique: its id.
    - drifting: its own in the first half; then the names change places.
    - removed: none.
    """
    own = [program.name or "" for program in programs]
    ids = [program.program for program in programs]
    if names == "true":
        return None
    if names == "shuffled":
        shown = random.Random("names").sample(own, len(own))
    elif names == "unique":
        shown = ids
    elif names == "drifting":
        kinds = sorted(set(own))
        later = dict(zip(kinds, [*kinds[1:], kinds[0]], strict=True))
        shown = [name if 2 * number < len(own) else later[name] for number, name in enumerate(own)]
    elif names == "removed":
        shown = [""] * len(own)
    else:
        raise SimulationError(f"names are {names!r}; choose one of {', '.join(NAMES)}.")
    return dict(zip(ids, shown, strict=True))


def arrived_programs(setting: Setting, seed: int, programs: int, rate: float) -> list[TraceProgram]:
    """The programs of a setting and seed, with their arrivals."""
    made = programs_of(setting, seed, programs)
    arrived = [replace(each, arrival_s=0.0) for each in made] if math.isinf(rate) else arriving(made, rate, seed)
    return [_with_gaps(program, setting.gaps) for program in arrived] if setting.gaps != 1 else arrived


def play(setting: Setting, seed: int, programs: int, rate: float, policy: PolicyConfig, names: str) -> list[float]:
    """Simulate a setting under a policy.

    Returns:
        The figures in the order of `METRICS`, in seconds.
    """
    arrived = arrived_programs(setting, seed, programs, rate)
    result = simulate(arrived, setting.engine(policy), names=shown_names(arrived, names))
    latencies = [result.programs[program.program].latency for program in arrived]
    per_token = [latency / path_tokens(each.calls) for each, latency in zip(arrived, latencies, strict=True)]
    return [summarise(values)[key] for values in (per_token, latencies) for key in ("mean", "p95", "p99")]


def _with_gaps(program: TraceProgram, times: float) -> TraceProgram:
    return replace(program, calls=tuple(replace(call, gap_s=times * call.gap_s) for call in program.calls))
