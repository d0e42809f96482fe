"""Time from a preemption to the call's next token: KV swapped out and in again, against computed again.

    python benchmarks/bench_resume.py --out bench_resume.json                  # the tiny random Llama
    python benchmarks/bench_resume.py --model embedded --tokens 256,1024,4096  # SmolLM2-135M

One real engine, stepped in this process. A call with a context of random tokens is preempted after its second token and
resumes in the next step; both copies count. Swap and recompute take turns (A B B A ...), with a new context each time.
"""

from __future__ import annotations

import json
import platform
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from weft.bench.in_process import run_in_this_process
from weft.core.kv_cache.choice import SwapChoice
from weft.core.kv_cache.config import SwapConfig
from weft.engine.models.tiny import make_tiny_llama

WAYS = {"swap": 0, "recompute": 1 << 30}  # from how many tokens on a call is swapped


class Bench:
    """An engine, and one call at a time on it."""

    def __init__(self, model: Path, most_tokens: int, **engine_args: Any) -> None:
        run_in_this_process()
        from vllm import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        from weft.engine.kv_cache.connector import transfer_config
        from weft.engine.scheduler import WeftScheduler

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

    def resume_s(self, prompt: list[int], way: str) -> float:
        """Seconds from the preemption to the next token."""
        from weft.engine.vllm_compat.names import SamplingParams

        self.scheduler._swap.choice = SwapChoice(WAYS[way], 1.0)  # noqa: SLF001
        self._number += 1
        name = f"call-{self._number}"
        params = SamplingParams(max_tokens=4, ignore_eos=True, temperature=0)
        self.engine.add_request(name, self.engine.renderer.render_cmpl([{"prompt_token_ids": prompt}])[0], params)
        while self._said() < 2:
            self.engine.step()
        (request,) = self.scheduler.running
        self.scheduler.force_out(request)
        start = time.perf_counter()
        while self._said() < 3:
            self.engine.step()
        taken_s = time.perf_counter() - start
        while self.engine.has_unfinished_requests():
            self.engine.step()
        return taken_s

    def _said(self) -> int:
        return next(iter(self.scheduler.requests.values())).num_output_tokens


def main(
    out: Annotated[Path | None, typer.Option(help="Write the results here as JSON, and a plot beside it.")] = None,
    model: Annotated[str, typer.Option(help="tiny, embedded, or a folder in Hugging Face format.")] = "tiny",
    tokens: Annotated[str, typer.Option(help="Contexts, comma-separated.")] = "256,512,1024,2048,4096,8192",
    rounds: Annotated[int, typer.Option(min=2, help="Rounds.")] = 7,
    seed: Annotated[int, typer.Option(help="Of the contexts.")] = 0,
) -> None:
    """Measure, print a table, and write JSON and a plot."""
    console = Console(width=120)
    lengths = [int(length) for length in tokens.split(",")]
    rng = random.Random(seed)
    found: dict[int, dict[str, list[float]]] = {length: {way: [] for way in WAYS} for length in lengths}
    with tempfile.TemporaryDirectory() as folder:
        path, arguments = _resolve(model, Path(folder))
        with console.status("starting an engine"):
            bench = Bench(path, max(lengths), **arguments)
        for way in WAYS:
            bench.resume_s([rng.randrange(300, 900) for _ in range(min(lengths))], way)  # to warm up
        for number in track(range(rounds), "measuring", console=console, transient=True):
            for length, by_way in found.items():
                for way in list(WAYS)[:: 1 if number % 2 else -1]:
                    prompt = [rng.randrange(300, 900) for _ in range(length)]
                    by_way[way].append(bench.resume_s(prompt, way))
    table = Table(title="milliseconds from preemption to the next token: median (lowest, highest)")
    for heading in ("tokens", *WAYS, "recompute ÷ swap"):
        table.add_column(heading, justify="right")
    for length, by_way in found.items():
        ratios = [again / swap for swap, again in zip(*by_way.values(), strict=True)]
        table.add_row(str(length), *(_spread(times, 1e3) for times in by_way.values()), _spread(ratios, 1))
    console.print(table)
    if out is not None:
        machine = {"python": platform.python_version(), "machine": platform.machine(), "system": platform.platform()}
        out.write_text(json.dumps({"machine": machine, "model": model, "seconds": found}, indent=1))
        plot(found, out.with_suffix(".svg"))


def _resolve(model: str, folder: Path) -> tuple[Path, dict[str, Any]]:
    if model == "tiny":
        longer = {"hf_overrides": {"max_position_embeddings": 16384}}  # what it says does not matter
        return make_tiny_llama(folder / "tiny"), {"kv_cache_memory_bytes": 256 << 20, **longer}
    from weft.engine.frontend.start import resolve_model

    return Path(resolve_model(None if model == "embedded" else model)), {"kv_cache_memory_bytes": 2 << 30}


def _spread(values: list[float], unit: float) -> str:
    return f"{statistics.median(values) * unit:.1f} ({min(values) * unit:.1f}, {max(values) * unit:.1f})"


def plot(found: dict[int, dict[str, list[float]]], path: Path) -> None:
    """Medians over context length."""
    import matplotlib as mpl

    mpl.use("svg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for way in WAYS:
        axes.plot(list(found), [statistics.median(by_way[way]) * 1e3 for by_way in found.values()], "o-", label=way)
    axes.set(xscale="log", yscale="log", xlabel="tokens of context", ylabel="ms from preemption to the next token")
    axes.legend()
    figure.savefig(path)


if __name__ == "__main__":
    typer.run(main)
