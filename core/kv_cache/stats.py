"""Figures of the KV cache and of the swap, which `engine.kv_stats` and `engine.swap_stats` show."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(slots=True)
class KvCounts:
    """Tokens that moved between the device and host memory so far."""

    loaded_tokens: int = 0  # to the device, when their call began
    fetched_tokens: int = 0  # to the device, before their call began
    spilled_tokens: int = 0  # to host memory
    moved_tokens: int = 0  # of those loaded: from the host memory of other replicas


class ToolStats(NamedTuple):
    """What an engine has learned of a tool's time, or of the pauses after the calls of programs of one name."""

    name: str
    samples: int  # the latest times, at most 256
    mean_s: float
    q95_s: float  # the next time does not exceed it in 95 % of all cases


@dataclass(frozen=True, slots=True)
class KvStats:
    """What an engine's KV cache has done so far, and what is held now. Tokens are counted when a call begins to run."""

    policy: str  # the KV policy
    found_tokens: int  # found on the device
    fetched_tokens: int  # copied from host memory, ahead of a call or when it began
    # Computed again, because they were found neither on the device nor in host memory: full blocks of a prompt that an
    # earlier call of the same program had computed, and what a call had computed before it was preempted.
    recomputed_tokens: int
    spilled_tokens: int  # copied to host memory
    held_blocks: int  # blocks of contexts between calls that the policy holds now
    programs_held: int  # the number of programs whose contexts these are
    host_used_bytes: int  # on one worker
    host_capacity_bytes: int  # on one worker
    tools: tuple[ToolStats, ...] = ()  # those with the most samples

    @classmethod
    def together(cls, engines: Iterable[KvStats]) -> KvStats | None:
        """Join the figures of several engines. None if there are no engines.

        Counts are added up. The figures of a tool are from the engine with the most samples of it.
        """
        each = list(engines)
        if not each:
            return None
        tools: dict[str, ToolStats] = {}
        for tool in sorted((tool for one in each for tool in one.tools), key=lambda tool: -tool.samples):
            tools.setdefault(tool.name, tool)
        counts = {name: sum(getattr(one, name) for one in each) for name in COUNTS}
        policies = dict.fromkeys(one.policy for one in each)
        return cls(policy=", ".join(policies), **counts, tools=tuple(tools.values()))


COUNTS = tuple(name for name in KvStats.__slots__ if name not in {"policy", "tools"})


class SwapStats(NamedTuple):
    """What an engine's swap has done so far, and how full its host memory is."""

    slots: int  # KV blocks that the host memory holds
    used: int  # slots in use now
    peak: int  # most slots that were ever in use at once
    swaps_out: int
    swaps_in: int
    out_tokens: int  # tokens whose KV was copied out; blocks that have a host copy already are not copied again
    in_tokens: int  # tokens whose KV was copied in
    too_short: int  # preemptions of calls with fewer than `min_tokens` tokens
    too_full: int  # preemptions of calls that found too few free slots
    evicted: int  # copies given up for others
    failed: int  # copies of blocks that did not arrive, out or in; their tokens are computed again
    min_tokens: float  # tokens from which on a call is swapped
    prefill_tokens_per_s: float | None
    out_bytes_per_s: float | None
    in_bytes_per_s: float | None

    @classmethod
    def together(cls, engines: Iterable[SwapStats]) -> SwapStats | None:
        """Join the figures of several engines. None if there are no engines.

        Counts are added up. `min_tokens` is the highest, and the speeds are the lowest.
        """
        each = list(engines)
        if not each:
            return None
        columns = list(zip(*each, strict=True))
        counts = [sum(column) for column in columns[:11]]
        speeds = [min((value for value in column if value is not None), default=None) for column in columns[12:]]
        return cls._make([*counts, max(columns[11]), *speeds])
