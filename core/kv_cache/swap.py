"""When the KV cache of a preempted call is worth keeping in host memory: configuration, choice, and what came of it."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

from weft.core.errors import SwapArgumentError

_MIN_PREFILL_TOKENS: Final = 128  # a step of fewer tokens says little about the speed of prefill
_WINDOW_STEPS: Final = 64


@dataclass(frozen=True)
class SwapConfig:
    """Host memory for the KV cache of preempted calls (Autellix §4.2.2).

    Args:
        space_gib: how much, in GiB, for each worker process. On a GPU it is page-locked.
        min_tokens: keep the KV cache of calls with at least so many tokens; shorter ones are computed again. "auto":
            measured by the engine when it starts, and again as it runs.

    Raises:
        SwapArgumentError: a size that is not positive, or a number of tokens that is negative.
    """

    space_gib: float = 4.0
    min_tokens: int | Literal["auto"] = "auto"

    def __post_init__(self) -> None:
        if not 0 < self.space_gib < math.inf:
            raise SwapArgumentError(f"space_gib is {self.space_gib}. Give more than 0, or swap=None to recompute.")
        if self.min_tokens != "auto" and (self.min_tokens < 0):
            raise SwapArgumentError(f'min_tokens is {self.min_tokens!r}. Give "auto" or a number of tokens, 0 or more.')

    @property
    def space_bytes(self) -> int:
        """The memory in bytes."""
        return int(self.space_gib * 2**30)


class CopySpeed(NamedTuple):
    """How fast KV blocks move, as measured."""

    call_s: float  # of a swap, however little it moves
    out_bytes_per_s: float
    in_bytes_per_s: float

    def slowest(self, other: CopySpeed) -> CopySpeed:
        """Of two workers that copy at once, each its shard."""
        return CopySpeed(
            max(self.call_s, other.call_s),
            min(self.out_bytes_per_s, other.out_bytes_per_s),
            min(self.in_bytes_per_s, other.in_bytes_per_s),
        )


class SwapChoice:
    """Swap or recompute: whichever takes less of the engine's time.

    A swap takes `call_s` each way and then time by the byte; computing again takes time by the token. So calls from
    some length on are swapped. As long as one of the two is not known, all are.

    Args:
        min_tokens: what `SwapConfig` says.
        token_bytes: KV bytes of a token on one worker, all layers.
    """

    def __init__(self, min_tokens: int | Literal["auto"], token_bytes: float) -> None:
        self._fixed = None if min_tokens == "auto" else min_tokens
        self._token_bytes = token_bytes
        self._prefill: deque[float] = deque(maxlen=_WINDOW_STEPS)  # seconds a token
        self.copy_speed: CopySpeed | None = None
        self._min_tokens: float | None = None

    def observe_step(self, tokens: int, step_s: float) -> None:
        """A step that computed so many tokens has taken `step_s` seconds."""
        if tokens >= _MIN_PREFILL_TOKENS and step_s > 0:
            self._prefill.append(step_s / tokens)
            self._min_tokens = None

    def observe_copy(self, speed: CopySpeed) -> None:
        """The workers have measured how fast they copy."""
        self.copy_speed = speed
        self._min_tokens = None

    @property
    def prefill_tokens_per_s(self) -> float | None:
        """Median over the latest steps of many tokens; None before the first."""
        return 1 / statistics.median(self._prefill) if self._prefill else None

    @property
    def min_tokens(self) -> float:
        """From how many tokens on a call is swapped; infinite if swapping never pays."""
        if self._fixed is not None:
            return self._fixed
        if self._min_tokens is None:
            self._min_tokens = self._break_even()
        return self._min_tokens

    def _break_even(self) -> float:
        prefill_tokens_per_s, speed = self.prefill_tokens_per_s, self.copy_speed
        if prefill_tokens_per_s is None or speed is None:
            return 0.0
        copy_s = self._token_bytes * (1 / speed.out_bytes_per_s + 1 / speed.in_bytes_per_s)
        gain_s = 1 / prefill_tokens_per_s - copy_s
        return 2 * speed.call_s / gain_s if gain_s > 0 else math.inf


class SwapStats(NamedTuple):
    """What an engine's swap has done so far, and how full its host memory is."""

    slots: int  # KV blocks that the host memory takes
    used: int  # of them, now
    peak: int
    swaps_out: int
    swaps_in: int
    out_tokens: int  # tokens whose KV was copied out; what was there already is not copied again
    in_tokens: int
    too_short: int  # preemptions below `min_tokens`
    too_full: int  # preemptions for which there was no room
    evicted: int  # copies given up for others
    min_tokens: float
    prefill_tokens_per_s: float | None
    out_bytes_per_s: float | None
    in_bytes_per_s: float | None

    @classmethod
    def together(cls, engines: Iterable[SwapStats]) -> SwapStats | None:
        """Of several engines: counts add up; the highest threshold and the lowest speeds count. None for none."""
        each = list(engines)
        if not each:
            return None
        columns = list(zip(*each, strict=True))
        counts = [sum(column) for column in columns[:10]]
        speeds = [min((value for value in column if value is not None), default=None) for column in columns[11:]]
        return cls._make([*counts, max(columns[10]), *speeds])
