"""`weft profile`: what is measured, and a profile of the tiny model that `weft advise` takes."""

from __future__ import annotations

import pytest
from background import CommandResult
from bench_commands import bench_commands, printed
from hypothesis import given
from hypothesis import strategies as st

from weft.bench.profile import DECODE_STEPS, Crowd, crowds, medians
from weft.core.sim.settings import StepSample
from weft.core.sim.study.engine_profile import EngineProfile


@given(st.integers(1, 300), st.integers(64, 10_000), st.integers(64, 50_000), st.integers(64, 500_000))
def test_what_is_measured_fits_the_engine(batch_size: int, chunk_tokens: int, most_tokens: int, kv_tokens: int) -> None:
    """No crowd has more calls than run at once, more tokens than a call may have, or more than the KV cache holds."""
    for crowd in crowds(batch_size, chunk_tokens, most_tokens, kv_tokens):
        tokens = crowd.prompt_tokens + crowd.output_tokens
        assert 1 <= crowd.calls <= batch_size
        assert tokens <= most_tokens
        assert crowd.calls * tokens <= kv_tokens
        assert crowd.prompt_tokens >= 1


def test_few_and_many_calls_decode_at_several_contexts() -> None:
    """Otherwise the coefficients could not be told apart."""
    found = crowds(64, 2048, 8192, 262_144)
    decoding = [each for each in found if each.output_tokens == DECODE_STEPS]
    assert {each.calls for each in decoding} == {1, 4, 16, 64}
    assert {each.prompt_tokens for each in decoding} == {64, 512, 2048}
    assert [each for each in found if each.output_tokens == 1] == [Crowd(1, n, 1) for n in (512, 1024, 2048, 4096)]


def test_a_step_takes_the_median_of_its_repeats() -> None:
    """One slow repeat does not count."""
    repeats = [[StepSample(1, 0, 65, step_s)] for step_s in (0.001, 9.0, 0.002)]
    assert medians(repeats) == [StepSample(1, 0, 65, 0.002)]


@pytest.mark.engine
@pytest.mark.slow
@bench_commands
def test_a_profile_of_the_tiny_model(command_result: CommandResult) -> None:
    """The file has the engine's sizes and step times, and `weft advise` says that they were measured."""
    found = EngineProfile.read(command_result.folder / "engine.json")
    assert (found.kv_tokens, found.batch_size) == (8192, 4)
    assert found.kv_token_bytes == 4 * 2 * 64 * 4  # layers, keys and values, their width, bytes of a number
    assert found.step_time.step_s(1, 0, 64) > 0
    assert "steps were measured; their fitted time is off by" in printed(command_result, "profile")
    advice = printed(command_result, "advise")
    assert "The step times are measured on a CPU" in advice
    assert "with tiny by weft profile." in advice
