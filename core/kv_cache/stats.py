"""Figures of the swap, which `engine.swap_stats` shows."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(slots=True)
class KvCounts:
    """Tokens of KV so far: what calls found where when they began, and what moved."""

    found_tokens: int = 0  # on the device
    loaded_tokens: int = 0  # in host memory, and loaded by the call itself
    recomputed_tokens: int = 0  # that an earlier call of the program had computed, and that were nowhere
    fetched_tokens: int = 0  # copied back before their call began
    spilled_tokens: int = 0  # copied to host memory


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
    min_tokens: float  # tokens from which on a call is swapped
    prefill_tokens_per_s: float | None
    out_bytes_per_s: float | None
    in_bytes_per_s: float | None

    @classmethod
    def together(cls, engines: Iterable[SwapStats]) -> SwapStats | None:
        """The figures of several engines as one: the sums of the counts, the highest `min_tokens` and the lowest
        speeds. None if there are no engines."""
        each = list(engines)
        if not each:
            return None
        columns = list(zip(*each, strict=True))
        counts = [sum(column) for column in columns[:10]]
        speeds = [min((value for value in column if value is not None), default=None) for column in columns[11:]]
        return cls._make([*counts, max(columns[10]), *speeds])
