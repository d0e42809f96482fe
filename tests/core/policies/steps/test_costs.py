"""The costs of steps, fitted to steps of known duration."""

from __future__ import annotations

import random

import pytest

from weft.core.policies import StepCosts
from weft.core.policies.steps import StepCostFit


def fitted(true: StepCosts, steps: int, *, prompts: bool = True, noise: float = 0.0) -> StepCosts | None:
    """What the fit finds after steps of up to 16 calls."""
    rng, fit = random.Random(0), StepCostFit()
    for _ in range(steps):
        decode, prefill = rng.randint(0, 16), rng.choice((0, 0, 500, 2000)) if prompts else 0
        step_s = true.fixed_s + true.decode_token_s * decode + true.prefill_token_s * prefill
        fit.observe(decode, prefill, step_s * (1 + noise * rng.uniform(-1, 1)))
    return fit.costs()


def test_the_costs_of_exact_steps_are_found() -> None:
    """Fixed part, decode and prefill are found, and the slots are the most calls that decoded together."""
    true = StepCosts(0.01, 3e-4, 2e-4, 16)
    found = fitted(true, 200)
    assert found is not None
    assert (found.fixed_s, found.decode_token_s, found.prefill_token_s) == pytest.approx((0.01, 3e-4, 2e-4))
    assert found.slots == 16
    assert found.prompt_weight == pytest.approx(2e-4 / (0.01 / 16 + 3e-4))


def test_noise_matters_little() -> None:
    """Steps that vary by a fifth give ω within a fifth."""
    true = StepCosts(0.01, 3e-4, 2e-4, 16)
    found = fitted(true, 1000, noise=0.2)
    assert found is not None
    assert found.prompt_weight == pytest.approx(true.prompt_weight, rel=0.2)


def test_a_few_steps_say_nothing() -> None:
    """Until enough steps were made there are no costs, and the policy keeps those that it has."""
    assert fitted(StepCosts(), 15) is None
    assert StepCostFit().costs() is None


def test_no_cost_is_negative() -> None:
    """Steps that are quicker with more calls would give a negative cost; it is zero, and the rest fits."""
    fit = StepCostFit()
    for decode in (1, 2, 3, 4) * 10:
        fit.observe(decode, 100 * decode, 0.1 - 0.01 * decode)
    found = fit.costs()
    assert found is not None
    assert min(found.fixed_s, found.decode_token_s, found.prefill_token_s) >= 0
    assert found.token_s > 0


def test_prompts_that_never_came_cost_nothing() -> None:
    """Without prompts their cost cannot be told; it is zero."""
    found = fitted(StepCosts(0.01, 3e-4, 2e-4, 16), 100, prompts=False)
    assert found is not None
    assert found.prefill_token_s == 0
    assert found.prompt_weight == 0


def test_steps_that_are_all_alike_make_tokens_cost_nothing() -> None:
    """If all steps take the same time, decoding and prompts cost exactly nothing, not what rounding makes of it. A KV
    policy would otherwise believe that prompts are computed at once, and not that their cost is unknown."""
    rng, fit = random.Random(0), StepCostFit()
    for count in range(1, 500):
        fit.observe(rng.randint(0, 16), rng.choice((0, 0, 41, 2000)), 1 / 128)
        found = fit.costs()
        if count >= 16:
            assert found is not None
            assert (found.decode_token_s, found.prefill_token_s) == (0, 0)
            assert found.fixed_s == pytest.approx(1 / 128)
