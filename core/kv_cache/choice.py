"""Swap or recompute: the number of tokens from which on copying a preempted call's KV to host memory pays."""

from __future__ import annotations

import math
import statistics
from collections import deque
from typing import Final, Literal, NamedTuple

_MIN_PREFILL_TOKENS: Final = 128  # steps of fewer tokens say little about the speed of prefill
_WINDOW_STEPS: Final = 64  # the latest of these steps, of which the median counts


class CopySpeed(NamedTuple):
    """How fast KV blocks move, as measured."""

    call_s: float  # seconds that every swap takes, however little it moves
    out_bytes_per_s: float
    in_bytes_per_s: float

    def slowest(self, other: CopySpeed) -> CopySpeed:
        """The speed of two workers together. Each copies its shard at the same time, so the slower one counts."""
        return CopySpeed(
            max(self.call_s, other.call_s),
            min(self.out_bytes_per_s, other.out_bytes_per_s),
            min(self.in_bytes_per_s, other.in_bytes_per_s),
        )


class SwapChoice:
    """Swaps a call if that takes less of the engine's time than computing its KV again.

    A swap takes `call_s` each way, and time for each byte. Computing again takes time for each token. So a swap pays
    from some number of tokens on. Every call is swapped while one of the two speeds is unknown.

    Args:
        min_tokens: as in `SwapConfig`.
        token_bytes: KV bytes of a token on one worker, all layers.

    Attributes:
        token_bytes: As passed.
        copy_speed: As measured; None before the first measurement.
    """

    def __init__(self, min_tokens: int | Literal["auto"], token_bytes: float) -> None:
        self._fixed = None if min_tokens == "auto" else min_tokens
        self.token_bytes = token_bytes
        self._prefill: deque[float] = deque(maxlen=_WINDOW_STEPS)  # seconds a token
        self.copy_speed: CopySpeed | None = None
        self._min_tokens: float | None = None
        self._prefill_tokens_per_s: float | None = None

    def observe_step(self, tokens: int, step_s: float) -> None:
        """A step that computed `tokens` tokens has taken `step_s` seconds."""
        if tokens >= _MIN_PREFILL_TOKENS and step_s > 0:
            self._prefill.append(step_s / tokens)
            self._min_tokens = self._prefill_tokens_per_s = None

    def observe_copy(self, speed: CopySpeed) -> None:
        """The workers have measured how fast they copy."""
        self.copy_speed = speed
        self._min_tokens = None

    @property
    def prefill_tokens_per_s(self) -> float | None:
        """Median over the latest steps of many tokens; None before the first such step."""
        if self._prefill_tokens_per_s is None and self._prefill:
            self._prefill_tokens_per_s = 1 / statistics.median(self._prefill)
        return self._prefill_tokens_per_s

    @property
    def min_tokens(self) -> float:
        """The number of tokens from which on a call is swapped; infinite if swapping never pays."""
        if self._fixed is not None:
            return self._fixed
        if self._min_tokens is None:
            self._min_tokens = self._break_even()
        return self._min_tokens

    def _break_even(self) -> float:
        prefill_tokens_per_s, speed = self.prefill_tokens_per_s, self.copy_speed
        if prefill_tokens_per_s is None or speed is None:
            return 0.0
        copy_s = self.token_bytes * (1 / speed.out_bytes_per_s + 1 / speed.in_bytes_per_s)
        gain_s = 1 / prefill_tokens_per_s - copy_s
        return 2 * speed.call_s / gain_s if gain_s > 0 else math.inf
