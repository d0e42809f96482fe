"""The exactness self-test of `weft doctor --engine`: preempted calls yield what they yield in vLLM's own order."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, NamedTuple

from weft.core.kv_cache.config import SwapConfig
from weft.engine.kv_cache.connector import transfer_config
from weft.engine.models.tiny import make_tiny_llama
from weft.engine.scheduler import WeftScheduler
from weft.engine.vllm_compat.names import EngineArgs, LLMEngine, SamplingParams, SchedulerOutput

_CALLS: Final = 50
_OUTPUT_TOKENS: Final = 24
_CHANCE: Final = 0.15  # that a running call is forced out before a step
_MOST: Final = 5  # times for each call, so that all of them end
_NEAR_TIE: Final = 1e-3  # a difference of logprobs that rounding can make


class GreedyAnswer(NamedTuple):
    """A greedy answer, and by how much each of its tokens was more likely than the second one."""

    token_ids: tuple[int, ...]
    leads: tuple[float, ...]


class Exactness(NamedTuple):
    """What came of the self-test."""

    calls: int
    preempted: int  # calls that were forced out at least once
    preemptions: int
    swapped_in: int  # preempted calls whose KV came back from host memory
    by_rounding: int  # answers that differ from a token on which was as likely as another one
    different: list[str]  # the calls with other differences


class SelfTestScheduler(WeftScheduler):
    """Forces running calls out before steps, at random."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._random = random.Random(0)  # noqa: S311  not a secret
        self.forced: dict[str, int] = {}

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        for request in list(self.running):
            times = self.forced.get(request.request_id, 0)
            if times < _MOST and self._random.random() < _CHANCE:
                self.forced[request.request_id] = times + 1
                self.force_out(request)
        return super().schedule(throttle_prefills)

    def swapped_in(self) -> int:
        """How many preempted calls have come back from host memory."""
        return 0 if self._swap is None else self._swap.stats().swaps_in


def self_test(scheduler: type[SelfTestScheduler] = SelfTestScheduler) -> Exactness:
    """Run 50 calls on the tiny model in vLLM's own order, then under Weft with random preemptions, half of them swapped
    to host memory. The engines live in this process: set `VLLM_ENABLE_V1_MULTIPROCESSING=0` before vLLM is imported.
    """
    rng = random.Random(0)  # noqa: S311  not a secret
    shared = [rng.randrange(10, 990) for _ in range(64)]
    prompts = [
        shared[: rng.choice((0, 32, 64))] + [rng.randrange(10, 990) for _ in range(rng.randrange(4, 160))]
        for _ in range(_CALLS)
    ]
    with TemporaryDirectory(prefix="weft-") as folder:
        arguments: dict[str, Any] = {
            "model": str(make_tiny_llama(Path(folder))),
            "dtype": "float32",
            "max_model_len": 512,
            "max_num_seqs": 8,
            "max_num_batched_tokens": 64,
            "kv_cache_memory_bytes": 64 << 20,
            "gpu_memory_utilization": 0.05,
            "enforce_eager": True,
            "use_tqdm_on_load": False,
        }
        stock = _answers(LLMEngine.from_engine_args(EngineArgs(**arguments)), prompts)
        arguments |= {
            "scheduler_cls": scheduler,
            "additional_config": {"weft": {"policy": {"name": "fcfs"}}},
            # Calls with more context than the median are swapped, the others are computed again.
            "kv_transfer_config": transfer_config(SwapConfig(space_gib=0.0625, min_tokens=100)),
        }
        engine = LLMEngine.from_engine_args(EngineArgs(**arguments))
        ours = _answers(engine, prompts)
    plugin: Any = engine.engine_core.engine_core.scheduler
    different, by_rounding = differences(stock, ours)
    return Exactness(
        calls=len(prompts),
        preempted=len(plugin.forced),
        preemptions=sum(plugin.forced.values()),
        swapped_in=plugin.swapped_in(),
        by_rounding=by_rounding,
        different=[f"call {number}" for number in different],
    )


def _answers(engine: LLMEngine, prompts: Sequence[list[int]]) -> list[GreedyAnswer]:
    params = SamplingParams(temperature=0.0, max_tokens=_OUTPUT_TOKENS, ignore_eos=True, logprobs=2)
    for number, prompt in enumerate(prompts):
        engine.add_request(str(number), {"prompt_token_ids": prompt}, params)
    answers: dict[int, GreedyAnswer] = {}
    while len(answers) < len(prompts):
        for output in engine.step():
            if output.finished:
                (sample,) = output.outputs
                leads = []
                for token_id, likely in zip(sample.token_ids, sample.logprobs, strict=True):
                    others = [each.logprob for other, each in likely.items() if other != token_id]
                    leads.append(likely[token_id].logprob - max(others))
                answers[int(output.request_id.partition("-")[0])] = GreedyAnswer(tuple(sample.token_ids), tuple(leads))
    return [answers[number] for number in range(len(prompts))]


def differences(stock: Sequence[GreedyAnswer], ours: Sequence[GreedyAnswer]) -> tuple[list[int], int]:
    """The numbers of the answers that differ, and how many more differ only from a near tie on."""
    different, by_rounding = [], 0
    for number, (expected, found) in enumerate(zip(stock, ours, strict=True)):
        if expected.token_ids == found.token_ids:
            continue
        pairs = zip(expected.token_ids, found.token_ids, strict=False)
        at = next((at for at, (one, other) in enumerate(pairs) if one != other), None)
        if at is not None and expected.leads[at] < _NEAR_TIE:
            by_rounding += 1
        else:
            different.append(number)
    return different, by_rounding
