"""Real vLLM engines in this process, whose running calls are preempted at random points.

    python tests/support/exactness_engine.py MODEL OUT.json [--preemptions 30] [--seed 0] [--engine async+caching ...]
        [--second-runner | --gpu [--dtype bfloat16]]

The script runs the same calls with and without preemptions on an engine of each kind. It writes the counts of the
preemptions and every difference between the outputs to OUT.json. It is a process of its own because an in-process
engine of vLLM leaves its distributed state and its patches of torch behind.

On a GPU vLLM's batch-invariant kernels compute a token alike in every batch, so that rounding excuses no difference.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ["VLLM_CONFIGURE_LOGGING"] = "0"
os.environ["VLLM_BATCH_INVARIANT"] = str(int("--gpu" in sys.argv))
os.environ["OMP_NUM_THREADS"] = "1"  # two threads would split sums by the shape of the batch

import torch
from interpreted_triton import SECOND_RUNNER

from weft.core.errors import SwapDeviceError
from weft.core.kv_cache.config import SwapConfig
from weft.engine.kv_cache.connector import transfer_config
from weft.engine.scheduler import WeftScheduler
from weft.engine.vllm.start import CPU_WORKER
from weft.engine.vllm_compat.names import (
    CompletionOutput,
    EngineArgs,
    LLMEngine,
    Request,
    RequestOutputKind,
    SamplingParams,
    SchedulerOutput,
    StructuredOutputsParams,
    kv_transfer_state,
)

GPU = "--gpu" in sys.argv
ENGINES = {  # by name: whether steps overlap, prefixes are cached, and KV is swapped
    "+".join(["async" if parts[0] else "sync", *["caching"] * parts[1], *["swap"] * parts[2]]): parts
    for parts in itertools.product((False, True), repeat=3)
}
FEATURES = (
    "greedy",
    "seeded",
    "chunked prompt",
    "logprobs",
    "structured",
    "n > 1",
    "stop string",
    "stop token",
    "penalties",
    "min_tokens",
    "streamed",
)
FAULTS = ("trusts freed blocks", "loses a token")
PHASES = ("prefill", "first token", "decode", "recompute")

# The largest difference of two logprobs that rounding may cause. A recomputed call shares its steps with other calls
# than before, and a float32 matrix product of another shape may add up in another order. With one thread no bit
# differed where this was measured. With two threads the logprobs of undisturbed calls differed by 2e-5 from batch to
# batch. Other processors have other kernels. A wrong KV slot causes a difference of 0.1 or more.
TOLERANCE = 1e-4

_BLOCK_TOKENS = 32
_BLOCKS = 18  # so few that vLLM itself runs out of blocks, and preempts calls
_SLOTS = 8
_SWAP_BLOCKS = 12  # so few that host memory is full at times
_FORCED_PER_REQUEST = 8  # a limit, so that every call ends
_STEPS_PER_RUN = 20_000


@dataclass
class Call:
    """A request, the features that it exercises, and the form in which its outputs are delivered."""

    key: str
    prompt: list[int]
    params: dict[str, Any]
    features: frozenset[str]
    output_kind: RequestOutputKind

    @property
    def samples(self) -> int:
        return self.params.get("n", 1)

    @property
    def blocks(self) -> int:
        """The most KV blocks that the call holds."""
        return self.samples * -(-(len(self.prompt) + self.params["max_tokens"] + 1) // _BLOCK_TOKENS)

    def sampling_params(self, output_kind: RequestOutputKind | None = None) -> SamplingParams:
        params = dict(self.params)
        if "structured_outputs" in params:
            params["structured_outputs"] = StructuredOutputsParams(**params["structured_outputs"])
        return SamplingParams(output_kind=output_kind or self.output_kind, **params)


@dataclass
class Sample:
    """The output of one sample, as its caller receives it."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[dict[int, Any]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    continued_after_its_end: bool = False

    def receive(self, output: CompletionOutput, kind: RequestOutputKind) -> None:
        self.continued_after_its_end |= self.finish_reason is not None
        logprobs = None if output.logprobs is None else list(output.logprobs)
        if kind == RequestOutputKind.DELTA:
            self.token_ids += output.token_ids
            self.text += output.text
            self.logprobs = logprobs if self.logprobs is None else self.logprobs + (logprobs or [])
        else:
            self.token_ids, self.text, self.logprobs = list(output.token_ids), output.text, logprobs
        self.finish_reason, self.stop_reason = output.finish_reason, output.stop_reason


# -- preemption


def phase_of(request: Request) -> str:
    """The phase of a running request. Tokens in flight under asynchronous scheduling count as computed."""
    if request.is_prefill_chunk:
        return "recompute" if request.num_output_tokens else "prefill"
    return "first token" if request.num_output_tokens + request.num_output_placeholders <= 1 else "decode"


class PreemptingScheduler(WeftScheduler):
    """Preempts random running requests before each step, as it preempts a policy's victims, and counts preemptions."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.set_clock(itertools.count(0.0, 0.001).__next__)  # the policy decides the same in every run
        self.rng = random.Random()
        self.chances: dict[str, float] = {}
        self.counts: Counter[tuple[str, str, str]] = Counter()  # preemptions by cause, phase and call
        self.in_flight = 0
        self.yielded = 0  # chunks of prompts that were shortened for calls of better rank
        self.fault: str | None = None  # one of FAULTS, which the comparison must notice
        self._cause = "memory"
        self._forced: Counter[str] = Counter()

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        self._cause = "forced"
        for request in list(self.running):
            chance = self.chances.get(phase_of(request), 0.0)
            if self._forced[request.request_id] < _FORCED_PER_REQUEST and self.rng.random() < chance:
                self._forced[request.request_id] += 1
                self.disturb(request)
        self.check_integrity()
        self._cause = "memory"
        output = super().schedule(throttle_prefills)
        self.check_integrity()
        return output

    def disturb(self, request: Request) -> None:
        self.force_out(request)
        if self.fault == "trusts freed blocks" and request.num_tokens > _BLOCK_TOKENS + 1:
            request.num_computed_tokens = _BLOCK_TOKENS
        elif self.fault == "loses a token" and request.num_output_tokens > 1:
            request._output_token_ids.pop()
            request._all_token_ids.pop()

    def force_out(self, request: Request) -> None:
        cause = self._cause
        self._cause = "forced" if cause == "forced" else "policy"
        super().force_out(request)
        self._cause = cause

    def _reserve_prefill_lookahead(self, request: Request, num_computed_tokens: int, num_new_tokens: int) -> int:
        tokens = super()._reserve_prefill_lookahead(request, num_computed_tokens, num_new_tokens)
        self.yielded += tokens < num_new_tokens
        return tokens

    def _preempt_request(self, request: Request, timestamp: float, drop_stale_output: bool = False) -> None:
        self.counts[self._cause, phase_of(request), request.sampling_params.extra_args["call_id"]] += 1
        self.in_flight += request.num_in_flight_tokens > 0
        super()._preempt_request(request, timestamp, drop_stale_output)

    def update_from_output(self, *args: Any) -> Any:
        outputs = super().update_from_output(*args)
        self.check_integrity()
        return outputs


# -- features that vLLM lacks on CPU


class _Immediate:
    """A CUDA stream or event of a device on which every operation has finished when its call returns."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def wait_stream(self, *_: Any) -> None: ...

    def record(self, *_: Any) -> None: ...

    def synchronize(self) -> None: ...


def patch_for_cpu() -> None:
    """Make the model runner record near ties, and deliver its outputs one step later, as it does on a GPU.

    The second model runner draws tokens by seed and position, and does not record near ties.
    """
    from weft.engine.vllm_compat.names import CPUModelRunner, cpu_worker

    class WatchedRunner(CPUModelRunner):
        """Records near ties."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.near_ties: set[tuple[str, int]] | None = None  # request and position; None: not recorded
            self._sample_once = self.sampler.sample
            self.sampler.sample = self._sample_watched

        def _sample_watched(self, logits: torch.Tensor, metadata: Any, *args: Any, **kwargs: Any) -> Any:
            if self.near_ties is None:
                return self._sample_once(logits, metadata, *args, **kwargs)
            before = {row: generator.get_state() for row, generator in metadata.generators.items()}
            again = logits.clone()
            sampled, logprobs = self._sample_once(logits, metadata, *args, **kwargs)
            after = {row: generator.get_state() for row, generator in metadata.generators.items()}
            for row, generator in metadata.generators.items():
                generator.set_state(before[row])
            again[torch.arange(len(again)), sampled.long()] -= TOLERANCE
            close = self._sample_once(again, metadata, *args, **kwargs)[0] != sampled
            for row in torch.nonzero(close).flatten().tolist():
                if not self.discard_request_mask.np[row]:
                    request_id = self.input_batch.req_ids[row]
                    self.near_ties.add((request_id, len(self.requests[request_id].output_token_ids)))
            for row, generator in metadata.generators.items():
                generator.set_state(after[row])
            return sampled, logprobs

    cpu_worker.CPUModelRunner = WatchedRunner
    torch.cuda.Event = torch.cuda.Stream = _Immediate
    torch.cuda.current_stream = _Immediate
    torch.cuda.stream = contextlib.nullcontext


# -- calls


def make_calls(seed: str, number: int, overlapping: bool) -> list[Call]:
    """Draw random calls. Each feature occurs, alone and in combination with others."""
    rng = random.Random(seed)
    prefixes = [[rng.randrange(10, 990) for _ in range(length)] for length in (64, 130, 200)]
    calls = []
    for index in range(number):
        features = _choose_features(rng, FEATURES[index % len(FEATURES)], overlapping)
        calls.append(_make_call(rng, f"{seed}/{index}", features, prefixes))
    return calls


def _choose_features(rng: random.Random, first: str, overlapping: bool) -> set[str]:
    features = {first} | {feature for feature in FEATURES if rng.random() < 0.25}
    if first == "greedy":
        features.discard("n > 1")  # vLLM refuses several greedy samples
    if "structured" in features:
        features -= {"stop token", "min_tokens"}  # in combination they may allow no token at all
    if overlapping and "min_tokens" in features:
        # vLLM 0.32 has a fault here, also without preemptions: when a call with penalties joins the batch, it loses
        # count of the output tokens of the calls without penalties.
        features.add("penalties")
    greedy = first == "greedy" or ("n > 1" not in features and rng.random() < 0.4)
    return features - {"greedy", "seeded"} | {"greedy" if greedy else "seeded"}


def _make_call(rng: random.Random, key: str, features: set[str], prefixes: list[list[int]]) -> Call:
    longest = 110 if "n > 1" in features else 330
    length = rng.randrange(70, longest) if "chunked prompt" in features else rng.randrange(3, 40)
    prompt = rng.choice(prefixes)[:length] if length >= 64 and rng.random() < 0.5 else []
    prompt = prompt + [rng.randrange(10, 990) for _ in range(max(length - len(prompt), 1))]
    params: dict[str, Any] = {
        "max_tokens": rng.randrange(12, 48),
        "temperature": 0.0,
        "extra_args": {"program_id": rng.choice("abcdefgh"), "call_id": key},
    }
    if "seeded" in features:
        params |= {"temperature": rng.choice([0.7, 1.0, 1.3]), "seed": rng.randrange(2**31)}
        params |= rng.choice([{}, {"min_p": 0.02}, *_TOP])
    if "logprobs" in features:
        params["logprobs"] = rng.choice([0, 1, 5])
    if "structured" in features:
        params["structured_outputs"] = rng.choice(_STRUCTURES)
    if "n > 1" in features:
        params["n"] = rng.choice([2, 3])
    if "penalties" in features:
        params |= rng.choice(_PENALTIES)
    if "min_tokens" in features:
        params |= {"min_tokens": 10, "stop_token_ids": rng.sample(range(1000), 100)}  # a GPU takes 128
    if "stop string" in features:
        params["include_stop_str_in_output"] = rng.random() < 0.5
    whole = [RequestOutputKind.FINAL_ONLY, RequestOutputKind.CUMULATIVE]
    kind = RequestOutputKind.DELTA if "streamed" in features else rng.choice(whole)
    return Call(key, prompt, params, frozenset(features), kind)


# Triton's interpreter cannot run the kernel for these.
_TOP = [{"top_p": 0.9}, {"top_k": 40}, {"top_p": 0.8, "top_k": 100}] if not SECOND_RUNNER else []
_PENALTIES = (
    {"presence_penalty": 1.5},
    {"frequency_penalty": 0.8},
    {"repetition_penalty": 1.3, "presence_penalty": 0.5},
)
_STRUCTURES: list[dict[str, Any]] = [
    {"regex": "[a-z ]{5,60}[.]"},
    {"choice": ["the lighthouse keeper counted ships", "the lighthouse keeper slept", "the lighthouse stayed dark"]},
    {
        "json": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 30},
                "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
                "days": {"type": "array", "items": {"type": "integer"}, "maxItems": 5},
            },
            "required": ["city", "unit", "days"],
            "additionalProperties": False,
        }
    },
]


def choose_stops(call: Call, samples: list[Sample], rng: random.Random) -> None:
    """Set a stop string or stop token that occurs in the output of the call."""
    sample = samples[0]
    if "stop string" in call.features:
        places = [
            (start, end)
            for start in range(len(sample.text) // 4, len(sample.text))
            for end in range(start + 1, min(start + 8, len(sample.text) + 1))
            if "\ufffd" not in sample.text[start:end]
        ]
        start, end = rng.choice(places) if places else (0, 1)
        call.params["stop"] = [sample.text[start:end] or "x", "a text that never occurs"]
    if "stop token" in call.features and sample.token_ids:
        chosen = rng.choice(sample.token_ids[len(sample.token_ids) // 4 :])
        call.params["stop_token_ids"] = [*call.params.get("stop_token_ids", []), chosen]


class UnreliableSwapper:
    """A swap kernel of which 30 % of the copies fail."""

    def __init__(self, swapper: Any) -> None:
        self._swapper = swapper
        self._rng = random.Random(0)
        self.failures = 0

    def swap_out(self, blocks: Any, slots: Any, *, beside_compute: bool) -> Any:
        return self._maybe(self._swapper.swap_out, blocks, slots, beside_compute)

    def swap_in(self, blocks: Any, slots: Any, *, beside_compute: bool) -> Any:
        return self._maybe(self._swapper.swap_in, blocks, slots, beside_compute)

    def _maybe(self, swap: Any, blocks: Any, slots: Any, beside_compute: bool) -> Any:
        if self._rng.random() < 0.3:
            self.failures += 1
            raise SwapDeviceError("this is a test")
        return swap(blocks, slots, beside_compute=beside_compute)


# -- one engine


class Bench:
    """An engine that runs calls with or without preemptions."""

    def __init__(self, model: Path, dtype: str, overlapping: bool, prefix_caching: bool, swaps: bool) -> None:
        # 4 layers, keys and values, 2 heads of 32 elements.
        block_bytes = 4 * 2 * _BLOCK_TOKENS * 2 * 32 * getattr(torch, dtype).itemsize
        swap = SwapConfig(_SWAP_BLOCKS * block_bytes / 2**30, min_tokens=0)
        config = EngineArgs(
            model=str(model),
            dtype=dtype,
            max_model_len=512,
            max_num_seqs=_SLOTS,
            max_num_batched_tokens=64,
            block_size=_BLOCK_TOKENS,
            num_gpu_blocks_override=_BLOCKS,
            kv_cache_memory_bytes=64 << 20,
            gpu_memory_utilization=0.05,
            enable_prefix_caching=prefix_caching,
            enforce_eager=True,
            use_tqdm_on_load=False,
            scheduler_cls=PreemptingScheduler,
            worker_cls="auto" if GPU else CPU_WORKER,
            additional_config={"weft": {"policy": {"name": "plas", "bounds_s": [0.05, 0.2], "beta": 2.0}}},
            kv_transfer_config=transfer_config(swap) if swaps else None,
        ).create_engine_config()
        config.scheduler_config.async_scheduling = overlapping  # vLLM turns this off on CPU
        self._engine = LLMEngine.from_vllm_config(config, disable_log_stats=True)
        self._core = self._engine.engine_core.engine_core
        assert (self._core.batch_queue is not None) == overlapping
        # If a thread compiled the grammars, the step at which one is ready would vary from run to run.
        self._core.structured_output_manager._use_async_grammar_compilation = False
        self.scheduler: PreemptingScheduler = self._core.scheduler
        self.runner: Any = self._core.model_executor.driver_worker.worker.model_runner

    def shutdown(self) -> None:
        self._engine.engine_core.shutdown()

    def undisturbed(self, calls: list[Call]) -> tuple[dict[str, list[Sample]], set[tuple[str, int, int]]]:
        """Run calls without preemptions: at most so many at once that neither the policy nor vLLM preempts one.

        Returns:
            The samples of each call, and the near ties as (call, sample, position): the choices of a token that
            rounding could have made differently.
        """
        self.runner.near_ties = set()
        before = self.scheduler.counts.total()
        samples = self._run([(call, RequestOutputKind.FINAL_ONLY) for call in calls], _SLOTS, _BLOCKS - 2)
        if self.scheduler.counts.total() != before:
            raise AssertionError("a call of the undisturbed run was preempted")
        ties, self.runner.near_ties = self.runner.near_ties, None
        return samples, {(*self._sample_of(request_id), position) for request_id, position in ties}

    def disturbed(self, calls: list[Call], rng: random.Random) -> dict[str, list[Sample]]:
        self.scheduler.rng = rng
        self.scheduler.chances = {"prefill": 0.35, "first token": 0.3, "decode": 0.05, "recompute": 0.2}
        try:
            return self._run([(call, call.output_kind) for call in calls], 2 * _SLOTS, 3 * _BLOCKS)
        finally:
            self.scheduler.chances = {}

    def _run(self, calls: list[tuple[Call, RequestOutputKind]], slots: int, blocks: int) -> dict[str, list[Sample]]:
        self._engine.reset_prefix_cache()
        samples = {call.key: [Sample() for _ in range(call.samples)] for call, _ in calls}
        kinds = {call.key: kind for call, kind in calls}
        under_way: dict[str, Call] = {}
        waiting = list(reversed(calls))
        for _ in range(_STEPS_PER_RUN):
            while (
                waiting
                and sum(call.samples for call in (waiting[-1][0], *under_way.values())) <= slots
                and sum(call.blocks for call in (waiting[-1][0], *under_way.values())) <= blocks
            ):
                call, kind = waiting.pop()
                under_way[call.key] = call
                prompt = {"prompt_token_ids": call.prompt}
                self._engine.add_request(call.key, prompt, call.sampling_params(kind))
            if not under_way and not self._core.scheduler.has_requests() and not self._core.batch_queue:
                return samples
            for output in self._engine.step():
                for sample in output.outputs:
                    samples[output.request_id][sample.index].receive(sample, kinds[output.request_id])
                if output.finished:
                    del under_way[output.request_id]
        raise AssertionError(f"calls still run after {_STEPS_PER_RUN} steps: {sorted(under_way)}")

    @staticmethod
    def _sample_of(request_id: str) -> tuple[str, int]:
        """The call and the sample that one of vLLM's request ids, `[INDEX_]KEY-RANDOM`, stands for."""
        key = request_id.rsplit("-", 1)[0]
        index, _, rest = key.partition("_")
        return (rest, int(index)) if rest else (key, 0)


# -- comparison


@dataclass
class Comparison:
    """The differences found in the disturbed runs of one engine so far."""

    calls: int = 0
    samples: int = 0
    tokens: int = 0
    near_ties: int = 0
    decided_by_rounding: list[str] = field(default_factory=list)
    largest_difference: float = 0.0
    largest_rank_difference: int = 0
    mismatches: list[str] = field(default_factory=list)

    def compare(
        self, call: Call, expected: list[Sample], actual: list[Sample], ties: set[tuple[str, int, int]]
    ) -> None:
        self.calls += 1
        for index, (reference, sample) in enumerate(zip(expected, actual, strict=True)):
            self.samples += 1
            self.tokens += len(reference.token_ids)
            positions = {position for key, number, position in ties if (key, number) == (call.key, index)}
            self.near_ties += len(positions)
            fork = _first_difference(reference.token_ids, sample.token_ids)
            where = f"{call.key} sample {index} ({', '.join(sorted(call.features))}; {call.output_kind.name})"
            if fork in positions and max(len(reference.token_ids), len(sample.token_ids)) > fork:
                self.decided_by_rounding.append(f"{where} at token {fork}")
                continue
            for what in self._differences(reference, sample):
                self.mismatches.append(f"{where}: {what}")

    def _differences(self, reference: Sample, sample: Sample) -> Iterator[str]:
        for name in ("token_ids", "text", "finish_reason", "stop_reason", "continued_after_its_end"):
            if getattr(reference, name) != getattr(sample, name):
                yield f"{name}: {getattr(sample, name)!r} instead of {getattr(reference, name)!r}"
        if (reference.logprobs is None) != (sample.logprobs is None):
            yield "only one of the two runs has logprobs"
        if reference.logprobs is None or sample.logprobs is None:
            return
        if len(sample.logprobs) != len(reference.logprobs):
            yield f"{len(sample.logprobs)} logprobs instead of {len(reference.logprobs)}"
        for position, (token, expected, found) in enumerate(
            zip(reference.token_ids, reference.logprobs, sample.logprobs, strict=False)
        ):
            for candidate in expected.keys() & found.keys():
                a, b = expected[candidate], found[candidate]
                self.largest_difference = max(self.largest_difference, abs(a.logprob - b.logprob))
                self.largest_rank_difference = max(self.largest_rank_difference, abs(a.rank - b.rank))
                if abs(a.logprob - b.logprob) > TOLERANCE or a.decoded_token != b.decoded_token:
                    yield f"logprob {position} of {candidate}: {b} instead of {a}"
            # If two tokens are equally likely, either of them may be the last of the top ones.
            missing = sorted(entry.logprob for key, entry in expected.items() if key not in found)
            added = sorted(entry.logprob for key, entry in found.items() if key not in expected)
            near = all(abs(x - y) <= TOLERANCE for x, y in zip(missing, added, strict=False))
            if token not in found or len(missing) != len(added) or not near:
                yield f"logprobs {position}: {found} instead of {expected}"


def _first_difference(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


# -- the script


def examine(model: Path, name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Disturb an engine of one kind until enough calls with each feature were preempted in each phase."""
    started = time.monotonic()
    bench, comparison = Bench(model, options.dtype, *ENGINES[name]), Comparison()
    scheduler = bench.scheduler
    features: dict[str, frozenset[str]] = {}
    done = 0
    while done < options.rounds:
        done += 1
        calls = make_calls(f"{options.seed}.{done}", options.calls, ENGINES[name][0])
        features |= {call.key: call.features for call in calls}
        disturb(bench, calls, f"{options.seed}.{done}.{name}", comparison)
        causes, touched = _causes(scheduler.counts), _touched(scheduler.counts, features)
        if (
            sum(causes["forced"].values()) >= options.preemptions
            and all(any(phases.values()) for phases in causes.values())
            and all(phases[phase] for phases in touched.values() for phase in PHASES if phase != "recompute")
            and (causes["forced"]["recompute"] or ENGINES[name][2])
        ):
            break
    swap = None if scheduler._swap is None else scheduler._swap.stats()._asdict()
    free_blocks = scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
    bench.shutdown()
    return {
        "runner": type(bench.runner).__module__,
        "rounds": done,
        "swap": swap,
        "leaked_blocks": _BLOCKS - 1 - free_blocks,  # vLLM keeps one block for itself
        "preemptions": causes,
        "touched": touched,
        "while_in_flight": scheduler.in_flight,
        "yielded": scheduler.yielded,
        **vars(comparison),
        "seconds": round(time.monotonic() - started, 1),
    }


def disturb(bench: Bench, calls: list[Call], seed: str, comparison: Comparison) -> None:
    """Run calls with and without preemptions, and compare their outputs."""
    stopping = [call for call in calls if call.features & {"stop string", "stop token"}]
    probed, _ = bench.undisturbed(stopping)
    for call in stopping:
        choose_stops(call, probed[call.key], random.Random(call.key))
    expected, ties = bench.undisturbed(calls)
    actual = bench.disturbed(calls, random.Random(seed))
    for call in calls:
        comparison.compare(call, expected[call.key], actual[call.key], ties)


def unreliable(model: Path, dtype: str) -> dict[str, Any]:
    """Compare the outputs of calls for which copies of KV fail."""
    bench, comparison = Bench(model, dtype, overlapping=False, prefix_caching=False, swaps=True), Comparison()
    worker = kv_transfer_state.get_kv_transfer_group()._worker
    worker._swapper = worker._beside = swapper = UnreliableSwapper(worker._swapper)
    disturb(bench, make_calls("unreliable", 3 * len(FEATURES), overlapping=False), "unreliable", comparison)
    swap = bench.scheduler._swap.stats()._asdict()
    bench.shutdown()
    return {"failures": swapper.failures, "swap": swap, **vars(comparison)}


def noticed(model: Path, dtype: str, fault: str) -> int:
    """The number of mismatches that a fault causes."""
    bench, comparison = Bench(model, dtype, overlapping=False, prefix_caching=False, swaps=False), Comparison()
    bench.scheduler.fault = fault
    disturb(bench, make_calls("fault", len(FEATURES), overlapping=False), fault, comparison)
    bench.shutdown()
    return len(comparison.mismatches)


def _causes(counts: Counter[tuple[str, str, str]]) -> dict[str, dict[str, int]]:
    table = {cause: dict.fromkeys(PHASES, 0) for cause in ("forced", "policy", "memory")}
    for (cause, phase, _), number in counts.items():
        table[cause][phase] += number
    return table


def _touched(counts: Counter[tuple[str, str, str]], features: dict[str, frozenset[str]]) -> dict[str, dict[str, int]]:
    """The number of forced preemptions, by feature of the call and phase."""
    table = {feature: dict.fromkeys(PHASES, 0) for feature in FEATURES}
    for (cause, phase, key), number in counts.items():
        for feature in features[key] if cause == "forced" else ():
            table[feature][phase] += number
    return table


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--preemptions", type=int, default=30, help="the least number on each engine")
    parser.add_argument("--rounds", type=int, default=20, help="the most rounds of calls on each engine")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--faults", action="store_true", help="also check that faults are noticed")
    parser.add_argument("--calls", type=int, default=3 * len(FEATURES), help="of each round")
    parser.add_argument("--second-runner", action="store_true", help="of vLLM, the default on GPUs")
    parser.add_argument("--engine", nargs="*", choices=list(ENGINES), default=list(ENGINES))
    parser.add_argument("--gpu", action="store_true", help="run where vLLM finds a GPU")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    options = parser.parse_args()
    if not GPU:
        patch_for_cpu()
    found: dict[str, Any] = {}
    for name in options.engine:
        found[name] = examine(options.model, name, options)
        options.out.write_text(json.dumps(found, indent=1))
    if options.faults:
        found["noticed"] = {fault: noticed(options.model, options.dtype, fault) for fault in FAULTS}
        found["unreliable"] = unreliable(options.model, options.dtype)
    options.out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
