"""The model of step times, fitted to steps that a known model made."""

from __future__ import annotations

import random

import pytest

from weft.core.sim import SimulationError, StepSample, StepTime


def samples(truth: StepTime, count: int = 200, noise: float = 0.0) -> list[StepSample]:
    """Random steps that take as long as `truth` says, with a relative error of this standard deviation."""
    rng = random.Random(0)
    made = []
    for _ in range(count):
        decode, prefill, context = rng.randrange(65), rng.choice((0, 0, 512, 2048)), rng.randrange(100_000)
        step_s = truth.step_s(decode, prefill, context) * (1 + rng.gauss(0, noise))
        made.append(StepSample(decode, prefill, context, step_s))
    return made


@pytest.mark.parametrize("noise", [0.0, 0.02])
def test_a_fit_finds_the_coefficients(noise: float) -> None:
    """The fit finds the coefficients exactly without noise, and within 10 % with 2 % noise."""
    truth = StepTime(8e-3, 2e-4, 1e-4, 6.5e-8)
    fitted = StepTime.fit(samples(truth, noise=noise))
    for name in ("fixed_s", "decode_token_s", "prefill_token_s", "context_token_s"):
        assert getattr(fitted, name) == pytest.approx(getattr(truth, name), rel=1e-6 if noise == 0 else 0.1)


def test_a_coefficient_without_variation_is_zero() -> None:
    """From steps that only decode, the time of a prompt token cannot be learned."""
    only_decode = [StepSample(n, 0, 1000, 0.01 + n * 0.001) for n in range(1, 9)]
    fitted = StepTime.fit(only_decode)
    assert fitted.step_s(4, 0, 1000) == pytest.approx(0.014)
    assert (fitted.prefill_token_s, fitted.context_token_s) == (0.0, 0.0)


def test_no_coefficient_is_negative() -> None:
    """If steps with a larger context happen to be shorter, the context is left out of the fit."""
    made = [StepSample(n % 4, 0, 1000 * n, 0.1 - 0.001 * n + 0.01 * (n % 4)) for n in range(20)]
    fitted = StepTime.fit(made)
    assert fitted.context_token_s == 0.0
    assert fitted.decode_token_s == pytest.approx(0.01, rel=0.3)
    assert fitted.fixed_s > 0.05


def test_columns_that_depend_on_each_other() -> None:
    """If the context always has ten tokens for each call, the two cannot be distinguished, but their sum is right."""
    made = [StepSample(n, 0, 10 * n, 0.01 + 0.002 * n) for n in range(1, 30)]
    assert StepTime.fit(made).step_s(50, 0, 500) == pytest.approx(0.11)


def test_samples_that_cannot_be_fitted_are_refused() -> None:
    """A single step, values that are not finite, and steps that take no time are errors that say so."""
    for made in ([StepSample(1, 0, 0, 0.1)], [StepSample(1, 0, 0, float("nan"))] * 3):
        with pytest.raises(SimulationError, match="measure at least two"):
            StepTime.fit(made)
    with pytest.raises(SimulationError, match=r"fixed_s \+ decode_token_s above 0"):
        StepTime.fit([StepSample(1, 0, 0, 0.0), StepSample(2, 0, 0, 0.0)])
    with pytest.raises(SimulationError, match="at least 0"):
        StepTime(prefill_token_s=-1.0)


def test_a_stall_of_the_machine_leaves_the_mean() -> None:
    """One step with a long prompt that took eight seconds makes both coefficients of a step without prompts negative. A
    session's report must not be lost for that, so every step takes the mean."""
    made = [StepSample(4 - tokens % 2, tokens, 0, 0.01) for tokens in range(1000)] + [StepSample(3, 3000, 0, 8.0)]
    assert StepTime.fit(made).step_s(4, 3000, 0) == StepTime.fit(made).fixed_s == pytest.approx(0.018, rel=0.01)
