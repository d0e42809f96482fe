"""What a call finds after its program's tool: host memory between calls, and fetching ahead, compared with neither.

    python benchmarks/bench_kv_host.py --out bench_kv_host.json

One real engine with the tiny model is stepped in this process, with a KV cache that is too small for all programs. The
methods alternate, with new contexts each time.

1. Agents call, wait for a tool, and call again, together. Of each call after a tool: did it compute at most its new
   tokens and one block?
2. One agent on an engine without other calls: time from the arrival of the call after its tool to the first token. An
   engine that is "warm" still has the context on the device.
"""

from __future__ import annotations

import itertools
import json
import random
import statistics
import tempfile
import time
from collections import deque
from pathlib import Path
from typing import Annotated, Any, Final
from unittest.mock import patch

import typer
from common import machine, pyplot, spread
from rich.console import Console
from rich.progress import track
from rich.table import Table

from weft.bench.engines import run_in_this_process
from weft.core.kv_cache.config import SwapConfig
from weft.core.kv_cache.policies import KvPolicyConfig
from weft.engine.models.tiny import make_tiny_llama

BLOCK_TOKENS: Final = 32
PAUSE_S: Final = 0.2  # of a tool without other calls, so that the processor's caches are as cold with every method
# By name: the KV policy, whether host memory keeps what programs leave, and whether contexts come back ahead.
METHODS: Final = {
    "stock": ("lru", False, False),
    "soft hold": ("next-use", False, False),
    "host memory": ("next-use", True, False),
    "fetch ahead": ("next-use", True, True),
}


def fetch_nothing(fetches: Any) -> None:
    """No context is due before its call, which loads it itself. `patch` refuses a name that fetches do not have."""
    patch.object(fetches, "_due", return_value=[]).start()


class Bench:
    """An engine, and the methods on it one after the other."""

    def __init__(self, folder: Path, kv_tokens: int) -> None:
        run_in_this_process(one_thread=True)
        from weft.engine.kv_cache.connector import transfer_config
        from weft.engine.scheduler import WeftScheduler
        from weft.engine.vllm_compat.names import EngineArgs, LLMEngine

        self.kv_tokens = kv_tokens
        self.engine = LLMEngine.from_engine_args(
            EngineArgs(
                model=str(make_tiny_llama(folder)),
                dtype="float32",
                max_model_len=kv_tokens,
                max_num_seqs=8,
                max_num_batched_tokens=2048,
                block_size=BLOCK_TOKENS,
                kv_cache_memory_bytes=256 << 20,
                num_gpu_blocks_override=kv_tokens // BLOCK_TOKENS + 1,
                enforce_eager=True,
                enable_prefix_caching=True,
                use_tqdm_on_load=False,
                hf_overrides={"max_position_embeddings": 16384},
                scheduler_cls=WeftScheduler,
                additional_config={"weft": {"policy": "fcfs", "trust_clients": True}},
                kv_transfer_config=transfer_config(SwapConfig(space_gib=2, min_tokens=0)),
            )
        )
        self.scheduler: Any = self.engine.engine_core.engine_core.scheduler
        self._store = self.scheduler._swap  # noqa: SLF001
        self._numbers = itertools.count()
        self.call_s: dict[str, float] = {}  # by call: when it arrived
        self.first_s: dict[str, float] = {}  # and when its first token was there
        self.tokens: dict[str, list[int]] = {}
        self.computed: dict[str, int] = {}  # prompt tokens

    def use(self, method: str) -> None:
        """Forget everything, and go on with another method."""
        policy, keeps, fetches = METHODS[method]
        scheduler = self.scheduler
        self.finish()
        self.engine.reset_prefix_cache()
        scheduler._kv_policy = KvPolicyConfig(policy)  # noqa: SLF001
        scheduler._swap = self._store if keeps else None  # noqa: SLF001
        scheduler.use_policy(scheduler._policy.make())  # noqa: SLF001
        order = scheduler._kv_order  # noqa: SLF001
        if keeps and not fetches:
            fetch_nothing(order._fetches)  # noqa: SLF001

    def add(self, program: str, prompt: list[int], max_tokens: int) -> str:
        """A program calls. Returns the call's name."""
        from weft.engine.vllm_compat.names import SamplingParams

        name = f"call-{next(self._numbers)}"
        extra = {"program_id": program, "program_name": "agent"}
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=0, extra_args=extra)
        self.call_s[name] = time.perf_counter()
        self.engine.add_request(name, self.engine.renderer.render_cmpl([{"prompt_token_ids": prompt}])[0], params)
        return name

    def tool_started(self, program: str) -> None:
        """A program waits for its tool from now on."""
        self.scheduler({"type": "program_events", "events": [["tool_started", program, "search", 1, 0.0]]})

    def end(self, *programs: str) -> None:
        """Programs end."""
        self.scheduler({"type": "programs_ended", "program_ids": list(programs)})

    def step(self) -> list[str]:
        """Step the engine. Returns the calls that have ended."""
        ended = []
        for output in self.engine.step():
            now_s = time.perf_counter()
            self.first_s.setdefault(output.request_id, now_s)
            if output.finished:
                self.tokens[output.request_id] = list(output.outputs[0].token_ids)
                self.computed[output.request_id] = len(output.prompt_token_ids or ()) - (output.num_cached_tokens or 0)
                ended.append(output.request_id)
        return ended

    def finish(self) -> None:
        """Step until every call has ended."""
        while self.engine.has_unfinished_requests():
            self.step()

    def settle(self) -> None:
        """Step as vLLM's loop does without calls: until nothing is being copied."""
        while self.scheduler.has_requests():
            self.step()


def loop(bench: Bench, method: str, rng: random.Random, *, agents: int, calls: int, tool_s: float) -> list[int]:
    """How many tokens more than its new ones each call after a tool computed."""
    bench.use(method)
    contexts = {f"{method}-{rng.random()}": [rng.randrange(300, 900) for _ in range(800)] for _ in range(agents)}
    left = dict.fromkeys(contexts, calls)
    new_tokens: dict[str, int] = {}
    running: dict[str, str] = {}
    due: deque[tuple[float, str]] = deque((0.0, program) for program in contexts)
    excess = []
    while running or due:
        while due and due[0][0] <= time.perf_counter():
            _, program = due.popleft()
            if left[program] < calls:
                contexts[program] += [rng.randrange(300, 900) for _ in range(40)]
            name = bench.add(program, contexts[program], 16)
            new_tokens[name], running[name] = 40, program
        if not bench.scheduler.has_requests():
            time.sleep(0.001)
            continue
        for name in bench.step():
            program = running.pop(name)
            if left[program] < calls:
                excess.append(bench.computed[name] - new_tokens[name])
            contexts[program] += bench.tokens[name]
            left[program] -= 1
            if left[program]:
                bench.tool_started(program)
                due.append((time.perf_counter() + tool_s, program))
    bench.end(*contexts)
    return excess


def resume(bench: Bench, method: str, rng: random.Random, tokens: int) -> float:
    """Seconds to the first token of a call after its tool. "warm": the others' call leaves the context where it is."""
    bench.use("stock" if method == "warm" else method)
    program = f"{method}-{rng.random()}"
    prompt = [rng.randrange(300, 900) for _ in range(tokens)]
    first = bench.add(program, prompt, 8)
    bench.finish()
    bench.tool_started(program)
    half = bench.kv_tokens // 2 - 64
    for _ in range(1 if method == "warm" else 2):  # two need every block
        bench.add("others", [rng.randrange(300, 900) for _ in range(half)], 8)
    bench.finish()
    bench.end("others")
    bench.settle()
    time.sleep(PAUSE_S)
    second = bench.add(program, [*prompt, *bench.tokens[first], *(rng.randrange(300, 900) for _ in range(40))], 4)
    bench.finish()
    bench.end(program)
    return bench.first_s[second] - bench.call_s[second]


def main(
    out: Annotated[Path | None, typer.Option(help="JSON file for the results.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of agents.")] = 5,
    resumes: Annotated[int, typer.Option(min=1, help="Single calls with each method in a round.")] = 10,
    agents: Annotated[int, typer.Option(min=1, help="Agents at once.")] = 8,
    calls: Annotated[int, typer.Option(min=2, help="Calls of each agent.")] = 3,
    tool_s: Annotated[float, typer.Option(help="Seconds of a tool.")] = 2.0,
    kv_tokens: Annotated[int, typer.Option(help="Tokens that the KV cache holds.")] = 4096,
    context: Annotated[int, typer.Option(help="Tokens of context in the second part.")] = 2048,
    seed: Annotated[int, typer.Option(help="Seed of the contexts.")] = 0,
) -> None:
    """Measure, print two tables, and write JSON."""
    console = Console(width=120)
    rng = random.Random(seed)
    excess: dict[str, list[list[int]]] = {method: [] for method in METHODS}
    first_s: dict[str, list[float]] = {method: [] for method in ("warm", *METHODS)}
    with tempfile.TemporaryDirectory() as folder:
        with console.status("starting an engine"):
            bench = Bench(Path(folder), kv_tokens)
        loop(bench, "fetch ahead", rng, agents=2, calls=2, tool_s=0.1)  # warm up
        for method in first_s:
            resume(bench, method, rng, context)
        for number in track(range(rounds), "measuring", console=console, transient=True):
            for method in list(METHODS)[:: 1 if number % 2 else -1]:
                excess[method].append(loop(bench, method, rng, agents=agents, calls=calls, tool_s=tool_s))
            for each in range(resumes):
                for method in list(first_s)[:: 1 if each % 2 else -1]:
                    first_s[method].append(resume(bench, method, rng, context))
    found = Table(title=f"calls after a tool of {tool_s:g} s that computed at most their new tokens and a block")
    for heading in ("method", "calls", "share", "tokens more than the new ones: median (lowest, highest)"):
        found.add_column(heading, justify="right")
    for method, of_rounds in excess.items():
        values = [value for each in of_rounds for value in each]
        share = sum(value <= BLOCK_TOKENS for value in values) / len(values)
        found.add_row(method, str(len(values)), f"{share:.1%}", spread(values, 0))
    console.print(found)
    times = Table(title="time to first token after a tool, without other calls: median (lowest, highest)")
    for heading in ("method", "ms", "÷ warm"):
        times.add_column(heading, justify="right")
    for method, values_s in first_s.items():
        ratio = statistics.median(values_s) / statistics.median(first_s["warm"])
        times.add_row(method, spread([value * 1e3 for value in values_s], 1), f"{ratio:.2f}")
    console.print(times)
    if out is not None:
        settings = {"agents": agents, "calls": calls, "tool_s": tool_s, "kv_tokens": kv_tokens, "context": context}
        result = {"machine": machine(), "settings": settings, "excess_tokens": excess, "first_token_s": first_s}
        out.write_text(json.dumps(result, indent=1))
        plot(excess, first_s, out.with_suffix(".svg"))


def plot(excess: dict[str, list[list[int]]], first_s: dict[str, list[float]], path: Path) -> None:
    """What was computed again, of all calls, and the times to the first token."""
    plt = pyplot()
    plt.rcParams["svg.fonttype"] = "none"  # text that is not drawn as curves makes a smaller file
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    for number, (method, of_rounds) in enumerate(excess.items()):
        values = sorted(value for each in of_rounds for value in each)
        shares = [100 * (index + 1) / len(values) for index in range(len(values))]
        left.step([0, *values], [0, *shares], where="post", label=method, linewidth=5 - number)
    left.axvline(BLOCK_TOKENS, color="grey", linestyle=":")
    left.set(xlim=(-10, None), xlabel="tokens computed more than the new ones", ylabel="% of the calls after a tool")
    left.legend()
    labels = [method.replace(" ", "\n") for method in first_s]
    right.boxplot([[value * 1e3 for value in values] for values in first_s.values()], tick_labels=labels)
    right.set(yscale="log", ylabel="ms to the first token after a tool")
    right.grid(axis="y", which="both", alpha=0.3)
    figure.savefig(path)


if __name__ == "__main__":
    typer.run(main)
