"""How long an engine step takes, as a linear function of what is in it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass
from typing import Final, NamedTuple

from weft.core.errors import SimulationError


class StepSample(NamedTuple):
    """A step that was measured."""

    decode_tokens: int  # calls that decoded, one token each
    prefill_tokens: int  # prompt tokens computed
    context_tokens: int  # tokens in the KV cache that the step's calls attended to, over all calls
    step_s: float


@dataclass(frozen=True, slots=True)
class StepTime:
    """Coefficients in seconds. The defaults are made up: about an 8-billion-parameter model on one mid-size GPU
    (weights read in 8 ms, 10,000 prompt tokens a second, 128 KiB of KV a token read at 2 TB/s). `fit` finds yours.

    Raises:
        SimulationError: a negative coefficient, or a step that takes no time.
    """

    fixed_s: float = 8e-3
    decode_token_s: float = 2e-5
    prefill_token_s: float = 1e-4
    context_token_s: float = 6.5e-8

    def __post_init__(self) -> None:
        values = astuple(self)
        if not all(0 <= value < math.inf for value in values) or self.fixed_s + self.decode_token_s <= 0:
            raise SimulationError(f"step times must be seconds, 0 or more, and a decode step takes some; not {values}.")

    def step_s(self, decode_tokens: int, prefill_tokens: int, context_tokens: int) -> float:
        """Seconds of one step."""
        return (
            self.fixed_s
            + self.decode_token_s * decode_tokens
            + self.prefill_token_s * prefill_tokens
            + self.context_token_s * context_tokens
        )

    @classmethod
    def fit(cls, samples: Iterable[StepSample]) -> StepTime:
        """Least squares over measured steps, no coefficient below zero: the most negative one is set to zero and the
        others are fitted again. What never varies in the samples cannot be told from `fixed_s` and is zero.

        Raises:
            SimulationError: fewer than two samples, or steps that took no time.
        """
        rows = [(1.0, *map(float, sample[:3]), sample.step_s) for sample in samples]
        if len(rows) < 2 or not all(map(math.isfinite, (value for row in rows for value in row))):
            raise SimulationError(f"{len(rows)} finite samples of steps; measure at least two different ones.")
        used = [0, *(column for column in (1, 2, 3) if len({row[column] for row in rows}) > 1)]
        while True:
            fitted = dict(zip(used, _least_squares(rows, used), strict=True))
            worst = min(fitted, key=fitted.__getitem__)
            if fitted[worst] >= 0:
                break
            used.remove(worst)
        return cls(*(fitted.get(column, 0.0) for column in range(4)))


def _least_squares(rows: Sequence[tuple[float, ...]], columns: Sequence[int]) -> list[float]:
    """Solve the normal equations of scaled columns by elimination; a column that depends on others gets 0."""
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
                matrix[j] = [value - factor * own for value, own in zip(matrix[j], matrix[i], strict=True)]
    return [matrix[i][-1] / scale[columns[i]] if i in pivots else 0.0 for i in range(size)]


_SINGULAR: Final = 1e-9
UNIT_STEPS: Final = StepTime(fixed_s=1.0, decode_token_s=0.0, prefill_token_s=0.0, context_token_s=0.0)
