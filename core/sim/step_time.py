"""The duration of an engine step as a linear function of its tokens, and its fit to measured steps."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass
from typing import Final, NamedTuple

from weft.core.errors import SimulationError


class StepSample(NamedTuple):
    """A measured step."""

    decode_tokens: int  # one for each call that decoded
    prefill_tokens: int  # prompt tokens that were computed
    context_tokens: int  # tokens in the KV cache that the calls attended to, summed over the calls
    step_s: float
    copied_tokens: int = 0  # whose KV was copied to host memory or back


@dataclass(frozen=True, slots=True)
class StepTime:
    """The coefficients of a step's duration, in seconds.

    The defaults are made up. They resemble an 8-billion-parameter model on one mid-size GPU: the weights are read in
    8 ms, 10,000 prompt tokens are computed a second, 128 KiB of KV for each token are read at 2 TB/s, and copied to
    host memory or back at 26 GB/s, for which the step waits. `fit` finds the coefficients of measured steps.

    Raises:
        SimulationError: A coefficient is negative or not finite, or a step that only decodes would take no time.
    """

    fixed_s: float = 8e-3
    decode_token_s: float = 2e-5
    prefill_token_s: float = 1e-4
    context_token_s: float = 6.5e-8
    copy_token_s: float = 5e-6

    def __post_init__(self) -> None:
        values = astuple(self)
        if not all(0 <= value < math.inf for value in values) or self.fixed_s + self.decode_token_s <= 0:
            raise SimulationError(
                f"the coefficients are {values}; give seconds of at least 0, and fixed_s + decode_token_s above 0."
            )

    def step_s(self, decode_tokens: int, prefill_tokens: int, context_tokens: int) -> float:
        """The duration of one step without copies in seconds, for numbers of tokens as in `StepSample`."""
        return (
            self.fixed_s
            + self.decode_token_s * decode_tokens
            + self.prefill_token_s * prefill_tokens
            + self.context_token_s * context_tokens
        )

    @classmethod
    def fit(cls, samples: Iterable[StepSample]) -> StepTime:
        """Fit the coefficients to measured steps by least squares, with no coefficient below zero.

        The most negative coefficient is set to zero and the others are fitted again, until none is negative. A number
        of tokens that is the same in all samples cannot be distinguished from `fixed_s`, so its coefficient is zero.
        If a few very slow steps leave neither `fixed_s` nor `decode_token_s`, every step takes the mean duration.

        Raises:
            SimulationError: There are fewer than two samples, a sample is not finite, or the steps took no time.
        """
        rows = [(1.0, *map(float, (*each[:3], each.copied_tokens)), each.step_s) for each in samples]
        if len(rows) < 2 or not all(map(math.isfinite, (value for row in rows for value in row))):
            raise SimulationError(
                f"step times cannot be fitted to {len(rows)} samples; measure at least two steps, with finite values."
            )
        used = [0, *(column for column in (1, 2, 3, 4) if len({row[column] for row in rows}) > 1)]
        while True:
            fitted = dict(zip(used, _least_squares(rows, used), strict=True))
            lowest = min(fitted, key=fitted.__getitem__)
            if fitted[lowest] >= 0:
                break
            used.remove(lowest)
        if not fitted.get(0) and not fitted.get(1):
            return cls(math.fsum(row[-1] for row in rows) / len(rows), 0.0, 0.0, 0.0, 0.0)
        return cls(*(fitted.get(column, 0.0) for column in range(5)))


def _least_squares(rows: Sequence[tuple[float, ...]], columns: Sequence[int]) -> list[float]:
    """Solve the normal equations by elimination. The columns are scaled; a column that depends on others gets 0.

    Args:
        rows: The values of the columns, and last the value to be fitted.
        columns: The columns to fit.
    """
    scale = {column: math.sqrt(sum(row[column] ** 2 for row in rows)) or 1.0 for column in columns}
    matrix = [
        [sum(row[a] * row[b] for row in rows) / (scale[a] * scale[b]) for b in columns]
        + [sum(row[a] * row[-1] for row in rows) / scale[a]]
        for a in columns
    ]
    size, pivots = len(columns), []
    for i in range(size):
        if abs(matrix[i][i]) < _SINGULAR:
            continue
        pivots.append(i)
        matrix[i] = [value / matrix[i][i] for value in matrix[i]]
        for j in range(size):
            if j != i:
                factor = matrix[j][i]
                matrix[j] = [value - factor * pivot for value, pivot in zip(matrix[j], matrix[i], strict=True)]
    return [matrix[i][-1] / scale[columns[i]] if i in pivots else 0.0 for i in range(size)]


_SINGULAR: Final = 1e-9
UNIT_STEPS: Final = StepTime(
    fixed_s=1.0, decode_token_s=0.0, prefill_token_s=0.0, context_token_s=0.0, copy_token_s=0.0
)
