"""Time from a preemption to the call's next token: KV that is swapped out and in again, compared with recomputation.

    python benchmarks/bench_resume.py --out bench_resume.json                  # the tiny random Llama
    python benchmarks/bench_resume.py --model embedded --tokens 256,1024,4096  # SmolLM2-135M

One real engine is stepped in this process. A call with a context of random tokens is preempted after its second token,
and resumes in the next step. The time includes the copies in both directions. Swap and recomputation alternate
(A B B A ...), with a new context each time.
"""

from __future__ import annotations

import json
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from common import machine, pyplot, spread
from rich.console import Console
from rich.progress import track
from rich.table import Table

from weft.bench.engines import run_in_this_process
from weft.core.kv_cache.config import SwapChoice, SwapConfig
from weft.engine.models.tiny import make_tiny_llama

MIN_TOKENS = {"swap": 0, "recompute": 1 << 30}  # calls with at least so many tokens are swapped


class Bench:
    """An engine that serves one call at a time."""

    def __init__(self, model: Path, most_tokens: int, **engine_args: Any) -> None:
        run_in_this_process()
        from weft.engine.kv_cache.connector import transfer_config
        from weft.engine.scheduler import WeftScheduler
        from weft.engine.vllm_compat.names import EngineArgs, LLMEngine

        self.engine = LLMEngine.from_engine_args(
            EngineArgs(
                model=str(model),
                dtype="float32",
                max_model_len=most_tokens + 16,
                max_num_seqs=1,
                enforce_eager=True,
                enable_prefix_caching=False,
                use_tqdm_on_load=False,
                scheduler_cls=WeftScheduler,
                kv_transfer_config=transfer_config(SwapConfig(space_gib=2, min_tokens=0)),
                **engine_args,
            )
        )
        self.scheduler: Any = self.engine.engine_core.engine_core.scheduler
        self._number = 0

    def resume_s(self, prompt: list[int], method: str) -> float:
        """Seconds from the preemption to the next token.

        Args:
            method: a key of `MIN_TOKENS`.
        """
        from weft.engine.vllm_compat.names import SamplingParams

        self.scheduler._swap.choice = SwapChoice(MIN_TOKENS[method], 1.0)  # noqa: SLF001
        self._number += 1
        name = f"call-{self._number}"
        params = SamplingParams(max_tokens=4, ignore_eos=True, temperature=0)
        self.engine.add_request(name, self.engine.renderer.render_cmpl([{"prompt_token_ids": prompt}])[0], params)
        while self._output_tokens() < 2:
            self.engine.step()
        (request,) = self.scheduler.running
        self.scheduler.force_out(request)
        start = time.perf_counter()
        while self._output_tokens() < 3:
            self.engine.step()
        resume_s = time.perf_counter() - start
        while self.engine.has_unfinished_requests():
            self.engine.step()
        return resume_s

    def _output_tokens(self) -> int:
        return next(iter(self.scheduler.requests.values())).num_output_tokens


def main(
    out: Annotated[Path | None, typer.Option(help="JSON file for the results; a plot is written next to it.")] = None,
    model: Annotated[str, typer.Option(help="tiny, embedded, or a folder in Hugging Face format.")] = "tiny",
    tokens: Annotated[
        str, typer.Option(help="Context lengths in tokens, separated by commas.")
    ] = "256,512,1024,2048,4096,8192",
    rounds: Annotated[int, typer.Option(min=2, help="Number of rounds.")] = 7,
    seed: Annotated[int, typer.Option(help="Seed of the contexts.")] = 0,
) -> None:
    """Measure, print a table, and write JSON and a plot."""
    console = Console(width=120)
    lengths = [int(length) for length in tokens.split(",")]
    rng = random.Random(seed)
    found: dict[int, dict[str, list[float]]] = {length: {method: [] for method in MIN_TOKENS} for length in lengths}
    with tempfile.TemporaryDirectory() as folder:
        path, arguments = _resolve(model, Path(folder))
        with console.status("starting an engine"):
            bench = Bench(path, max(lengths), **arguments)
        for method in MIN_TOKENS:
            bench.resume_s([rng.randrange(300, 900) for _ in range(min(lengths))], method)  # warm up
        for number in track(range(rounds), "measuring", console=console, transient=True):
            for length, by_method in found.items():
                for method in list(MIN_TOKENS)[:: 1 if number % 2 else -1]:
                    prompt = [rng.randrange(300, 900) for _ in range(length)]
                    by_method[method].append(bench.resume_s(prompt, method))
    table = Table(title="milliseconds from preemption to the next token: median (lowest, highest)")
    for heading in ("tokens", *MIN_TOKENS, "recompute ÷ swap"):
        table.add_column(heading, justify="right")
    for length, by_method in found.items():
        ratios = [recompute / swap for swap, recompute in zip(*by_method.values(), strict=True)]
        times_ms = [[time_s * 1e3 for time_s in times_s] for times_s in by_method.values()]
        table.add_row(str(length), *(spread(times, 1) for times in times_ms), spread(ratios, 1))
    console.print(table)
    if out is not None:
        out.write_text(json.dumps({"machine": machine(), "model": model, "seconds": found}, indent=1))
        plot(found, out.with_suffix(".svg"))


def _resolve(model: str, folder: Path) -> tuple[Path, dict[str, Any]]:
    if model == "tiny":
        longer = {"hf_overrides": {"max_position_embeddings": 16384}}  # The model's output does not matter.
        return make_tiny_llama(folder / "tiny"), {"kv_cache_memory_bytes": 256 << 20, **longer}
    from weft.engine.vllm.start import resolve_model

    return Path(resolve_model(None if model == "embedded" else model)), {"kv_cache_memory_bytes": 2 << 30}


def plot(found: dict[int, dict[str, list[float]]], path: Path) -> None:
    """Median times over the length of the context."""
    figure, axes = pyplot().subplots(figsize=(7, 4), layout="constrained")
    for method in MIN_TOKENS:
        axes.plot(
            list(found),
            [statistics.median(by_method[method]) * 1e3 for by_method in found.values()],
            "o-",
            label=method,
        )
    axes.set(xscale="log", yscale="log", xlabel="tokens of context", ylabel="ms from preemption to the next token")
    axes.legend()
    figure.savefig(path)


if __name__ == "__main__":
    typer.run(main)
