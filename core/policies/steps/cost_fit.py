"""Fits `StepCosts` to the steps that an engine makes."""

from __future__ import annotations

from typing import Final

import numpy as np

from weft.core.policies.steps.costs import StepCosts

_FORGET: Final = 0.999  # the weight of all earlier steps with each new one: the fit follows the last thousand steps
_LEAST_STEPS: Final = 16  # before the first fit
_NOISE: Final = 1e-9  # the part of the steps' time that rounding may explain


class StepCostFit:
    """Fits the costs by least squares. Later steps count more, and only sums are kept."""

    def __init__(self) -> None:
        self._sums = [0.0] * 9  # of products of two figures of a step; see `observe`
        self._steps = 0
        self._slots = 1

    def observe(self, decode_tokens: int, prefill_tokens: int, step_s: float) -> None:
        """A step was made.

        Args:
            decode_tokens: The tokens that it decoded, one for each call that decodes.
            prefill_tokens: The prompt tokens that it computed.
            step_s: Its duration in seconds.
        """
        new = (
            1.0,
            decode_tokens,
            prefill_tokens,
            decode_tokens * decode_tokens,
            decode_tokens * prefill_tokens,
            prefill_tokens * prefill_tokens,
            step_s,
            decode_tokens * step_s,
            prefill_tokens * step_s,
        )
        self._sums = [_FORGET * each + more for each, more in zip(self._sums, new, strict=True)]
        self._steps += 1
        self._slots = max(self._slots, decode_tokens)

    def costs(self) -> StepCosts | None:
        """The fitted costs.

        A negative coefficient is set to zero and the others are fitted again. If a number of tokens never varied, its
        cost cannot be told from the fixed part. A coefficient that explains no more of the time than rounding does is
        zero, too: if all steps take as long, tokens cost nothing.

        Returns:
            The costs. None if too few steps were seen, or they took no time.
        """
        if self._steps < _LEAST_STEPS:
            return None
        one, decode, prefill, decode_2, both, prefill_2, *times = self._sums
        products = np.array([[one, decode, prefill], [decode, decode_2, both], [prefill, both, prefill_2]])
        used, fitted = [0, 1, 2], np.zeros(3)
        while used:
            scale = np.sqrt(np.maximum(products[used, used], 1e-30))
            matrix = products[np.ix_(used, used)] / np.outer(scale, scale)
            found = np.linalg.lstsq(matrix, np.array(times)[used] / scale, rcond=1e-9)[0] / scale
            if found.min() >= 0:
                fitted[used] = found
                break
            used.pop(int(found.argmin()))
        is_noise = fitted * products[0] <= _NOISE * times[0]  # both are sums over the steps
        fixed_s, decode_token_s, prefill_token_s = map(float, np.where(is_noise, 0.0, fitted))
        if fixed_s + decode_token_s <= 0:
            return None
        return StepCosts(fixed_s, decode_token_s, prefill_token_s, self._slots)
