"""Measures an engine's steps and sizes for the simulator: `weft profile`."""

from __future__ import annotations

import math
import platform
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from weft.bench.baselines import baseline_of
from weft.bench.engines import model_folder, run_in_this_process, token_ids
from weft.bench.replay import EngineCall
from weft.bench.settings import BLOCK_TOKENS
from weft.core.errors import BenchError
from weft.core.sim.settings import StepSample, StepTime
from weft.core.sim.study.engine_profile import EngineProfile

if TYPE_CHECKING:
    from weft.bench.stepper import Stepper

DECODE_STEPS: Final = 24  # of each crowd of calls
_CONTEXTS: Final = (64, 512, 2048)  # prompt tokens of the calls that decode
_ROUNDS: Final = 3  # after one that warms up
_COPY_BYTES: Final = 1 << 27


class Crowd(NamedTuple):
    """Calls that begin at once."""

    calls: int
    prompt_tokens: int
    output_tokens: int


class Profile(NamedTuple):
    """A measured engine, and how well its step times fit."""

    engine: EngineProfile
    steps: int
    error: float  # the median over crowds of the relative error of the time that all of their steps take


def crowds(batch_size: int, chunk_tokens: int, most_tokens: int, kv_tokens: int) -> list[Crowd]:
    """What is measured: prompts of several lengths alone, and calls that decode, few and many, at several contexts.

    `most_tokens` is the most that a call has.
    """
    most_tokens = min(most_tokens, kv_tokens - BLOCK_TOKENS)
    prompts = sorted({min(chunk_tokens * part // 4, most_tokens - 1) for part in (1, 2, 4, 8)})
    found = [Crowd(1, prompt, 1) for prompt in prompts]
    sizes = sorted({1, *(min(1 << power, batch_size) for power in range(2, batch_size.bit_length() + 1, 2))})
    for prompt in _CONTEXTS:
        room = kv_tokens // (prompt + DECODE_STEPS + BLOCK_TOKENS)
        if prompt + DECODE_STEPS <= most_tokens:
            found += [Crowd(calls, prompt, DECODE_STEPS) for calls in sizes if calls <= room]
    return found


def profile(
    model: str,
    *,
    batch_size: int,
    chunk_tokens: int | None,
    kv_tokens: int | None,
    begin: Callable[[int], object],
    advance: Callable[[], object],
) -> Profile:
    """Start stock vLLM with a model in this process, measure its steps, and fit their times.

    Args:
        model: "tiny", "embedded", or a folder or hub name.
        chunk_tokens: The most tokens of a step, vLLM's `max_num_batched_tokens`. By default it is vLLM's.
        kv_tokens: The tokens that the KV cache holds. By default vLLM sizes it.
        begin: Called with the number of crowds of calls, when the engine has started.
        advance: Called when a crowd has ended.

    Raises:
        VllmUnavailableError, UnsupportedVllmError, ModelNotFoundError, EngineStartError: The engine cannot start.
        BenchError: The KV cache is too small to measure anything.
        SimulationError: The steps cannot be fitted.
    """
    run_in_this_process(one_thread=model == "tiny")
    from weft.bench.stepper import EngineCapacity, Stepper, model_limits

    with tempfile.TemporaryDirectory() as folder:
        path = model_folder(model, Path(folder))
        blocks = None if kv_tokens is None else kv_tokens // BLOCK_TOKENS
        capacity = EngineCapacity(batch_size, blocks, chunk_tokens, engines=1)
        most_tokens, vocabulary = model_limits(path, capacity)
        engine = Stepper(path, baseline_of("stock-fcfs"), capacity, most_tokens, counts_steps=False)
        limits = engine.limits
        held_tokens = limits.kv_tokens if kv_tokens is None else min(kv_tokens, limits.kv_tokens)
        found = crowds(batch_size, limits.chunk_tokens, most_tokens, held_tokens)
        if not any(crowd.output_tokens > 1 for crowd in found):
            raise BenchError(
                f"a KV cache of {held_tokens} tokens is too small to measure; give --kv-tokens of at least 200."
            )
        begin(len(found) * (1 + _ROUNDS))
        rounds: list[list[list[StepSample]]] = []
        draws = random.Random(0)  # noqa: S311
        for _ in range(1 + _ROUNDS):
            rounds.append([])
            for crowd in found:
                rounds[-1].append(_measure(engine, crowd, draws, token_ids(vocabulary)))
                advance()
    measured = [medians(repeats) for repeats in zip(*rounds[1:], strict=True)]
    step_time = StepTime.fit(sample for samples in measured for sample in samples)
    source = f"measured on {_device()} with {model} by weft profile"
    step_time = replace(step_time, copy_token_s=limits.kv_token_bytes / _copied_bytes_s())
    fitted = EngineProfile(
        source, step_time, held_tokens, limits.kv_token_bytes, batch_size, limits.chunk_tokens, BLOCK_TOKENS
    )
    return Profile(fitted, sum(map(len, measured)), _error(measured, step_time))


def _measure(engine: Stepper, crowd: Crowd, draws: random.Random, tokens: range) -> list[StepSample]:
    """Run a crowd of calls with prompts that no call has had, and return its steps."""
    engine.reset()
    for number in range(crowd.calls):
        prompt = draws.choices(tokens, k=crowd.prompt_tokens)
        engine.send(EngineCall(f"p{number}-0", prompt, crowd.output_tokens, number, number), None)
    ended = 0
    while ended < crowd.calls:
        ended += len(engine.step())
    return engine.meter.samples


def medians(repeats: Sequence[Sequence[StepSample]]) -> list[StepSample]:
    """The steps of a crowd, each with the median time of its repeats, so that other work on the machine counts less."""
    return [
        each[0]._replace(step_s=statistics.median(sample.step_s for sample in each))
        for each in zip(*repeats, strict=True)
    ]


def _error(measured: Sequence[Sequence[StepSample]], step_time: StepTime) -> float:
    errors = []
    for samples in measured:
        took_s = math.fsum(sample.step_s for sample in samples)
        fitted_s = math.fsum(step_time.step_s(*sample[:3]) for sample in samples)
        errors.append(abs(fitted_s / took_s - 1))
    return statistics.median(errors)


def _device() -> str:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else f"a CPU ({platform.machine()})"


def _copied_bytes_s() -> float:
    """How many bytes a second are copied from the device to host memory."""
    import torch

    on_gpu = torch.cuda.is_available()
    source = torch.empty(_COPY_BYTES, dtype=torch.uint8, device="cuda" if on_gpu else "cpu")
    target = torch.empty(_COPY_BYTES, dtype=torch.uint8, pin_memory=on_gpu)
    took_s = []
    for _ in range(4):
        began_s = time.perf_counter()
        target.copy_(source)
        if on_gpu:
            torch.cuda.synchronize()
        took_s.append(time.perf_counter() - began_s)
    return _COPY_BYTES / statistics.median(took_s[1:])
