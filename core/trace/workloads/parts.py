"""Parts of workloads: whole numbers with a long tail, and chains of calls."""

from __future__ import annotations

import functools
import itertools
import math
import random
from bisect import bisect_left
from collections.abc import Callable, Iterator
from typing import Final

from weft.core.errors import SimulationError
from weft.core.trace.format import TraceCall


class LongTail:
    """A distribution of whole numbers from 1 to `largest`: a log-normal density that is cut off at `largest`.

    Args:
        mean: the mean of the distribution after the cut.
        largest: the largest number.
        spread: the standard deviation of the logarithm before the cut.

    Raises:
        SimulationError: the mean is not between 1 and half of `largest`, or the spread is not positive.
    """

    def __init__(self, mean: float, largest: int, spread: float) -> None:
        if not 1 < mean < (1 + largest) / 2 or spread <= 0:
            raise SimulationError(f"a mean of {mean} must lie between 1 and half of the largest number, {largest}.")
        low, high = -10.0, math.log(largest) + 1
        for _ in range(60):  # bisection: the mean grows with the centre of the logarithm
            middle = (low + high) / 2
            weights = [math.exp(-(((math.log(n) - middle) / spread) ** 2) / 2) / n for n in range(1, largest + 1)]
            if sum(n * weight for n, weight in enumerate(weights, 1)) < mean * sum(weights):
                low = middle
            else:
                high = middle
        self._sums = list(itertools.accumulate(weights))

    def draw(self, rng: random.Random) -> int:
        """Draw one number."""
        return bisect_left(self._sums, rng.random() * self._sums[-1]) + 1


long_tail: Final = functools.cache(LongTail)


def chain(
    rng: random.Random,
    count: int,
    prefill: Callable[[random.Random], int],
    output: Callable[[random.Random], int],
    *,
    system: int = 0,
    pause: Callable[[], tuple[str, float]] | None = None,
) -> Iterator[TraceCall]:
    """Yield a chain of calls, each with the prompts and outputs of all earlier calls in its prompt.

    Args:
        prefill: draws the tokens that a prompt adds to those of the earlier calls.
        output: draws the output tokens of a call.
        system: tokens of the system prompt, which all programs of the same name share.
        pause: draws the tool before a call that is not the first, and its time in seconds.
    """
    history, parents = system, ()  # type: int, tuple[str, ...]
    for number in range(count):
        output_tokens, prompt_tokens = output(rng), history + prefill(rng)
        tool, gap_s = pause() if pause is not None and number else (None, 0.0)
        call = TraceCall(
            call_id=f"c{number}",
            parents=parents,
            output_tokens=output_tokens,
            prompt_tokens=prompt_tokens,
            gap_s=gap_s,
            tool=tool,
            shared_prefix_tokens=history,
        )
        yield call
        history, parents = call.prompt_tokens + call.output_tokens, (call.call_id,)
