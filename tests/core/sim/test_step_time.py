"""The step-time model: fitted to steps, it gives them back."""

from __future__ import annotations

import random

import pytest

from weft.core.sim import SimulationError, StepSample, StepTime


def samples(truth: StepTime, count: int = 200, noise: float = 0.0) -> list[StepSample]:
    rng = random.Random(0)
    made = []
    for _ in range(count):
        decode, prefill, context = rng.randrange(65), rng.choice((0, 0, 512, 2048)), rng.randrange(100_000)
        step_s = truth.step_s(decode, prefill, context) * (1 + rng.gauss(0, noise))
        made.append(StepSample(decode, prefill, context, step_s))
    return made


@pytest.mark.parametrize("noise", [0.0, 0.02])
def test_a_fit_finds_the_coefficients(noise: float) -> None:
    """Exactly without noise, and within 10 % with 2 % of it."""
    truth = StepTime(8e-3, 2e-4, 1e-4, 6.5e-8)
    fitted = StepTime.fit(samples(truth, noise=noise))
    for name in ("fixed_s", "decode_token_s", "prefill_token_s", "context_token_s"):
        assert getattr(fitted, name) == pytest.approx(getattr(truth, name), rel=1e-6 if noise == 0 else 0.1)


def test_what_does_not_vary_is_zero() -> None:
    """Of steps that only decode, the time of a prompt token cannot be told."""
    only_decode = [StepSample(n, 0, 1000, 0.01 + n * 0.001) for n in range(1, 9)]
    fitted = StepTime.fit(only_decode)
    assert fitted.step_s(4, 0, 1000) == pytest.approx(0.014)
    assert (fitted.prefill_token_s, fitted.context_token_s) == (0.0, 0.0)


def test_no_coefficient_is_negative() -> None:
    """Where a larger context happened to go with shorter steps, the context is left out, and the rest fits."""
    made = [StepSample(n % 4, 0, 1000 * n, 0.1 - 0.001 * n + 0.01 * (n % 4)) for n in range(20)]
    fitted = StepTime.fit(made)
    assert fitted.context_token_s == 0.0
    assert fitted.decode_token_s == pytest.approx(0.01, rel=0.3)
    assert fitted.fixed_s > 0.05


def test_columns_that_depend_on_each_other() -> None:
    """Context that is always ten tokens a call: the two cannot be told apart, and the sum is right."""
    made = [StepSample(n, 0, 10 * n, 0.01 + 0.002 * n) for n in range(1, 30)]
    assert StepTime.fit(made).step_s(50, 0, 500) == pytest.approx(0.11)


def test_what_cannot_be_fitted() -> None:
    """One step, numbers that are none, steps that take no time."""
    for made in ([StepSample(1, 0, 0, 0.1)], [StepSample(1, 0, 0, float("nan"))] * 3):
        with pytest.raises(SimulationError, match="measure at least two"):
            StepTime.fit(made)
    with pytest.raises(SimulationError, match="takes some"):
        StepTime.fit([StepSample(1, 0, 0, 0.0), StepSample(2, 0, 0, 0.0)])
    with pytest.raises(SimulationError, match="0 or more"):
        StepTime(prefill_token_s=-1.0)
