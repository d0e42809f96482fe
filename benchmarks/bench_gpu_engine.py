"""Sessions of a trace on a real engine with a GPU: stock vLLM, vLLM's own host memory, and Weft, one after the other.

    weft trace import FILES --max-context 128000 --max-turns 16 --gap-cap 60 --programs 12 --rate 1 --out sessions.jsonl
    python benchmarks/bench_gpu_engine.py sessions.jsonl --out build/gpu-engine

The model has the shape of Llama 3.1 8B and random weights, which need no download. Each engine is a process of its own.
It runs without CUDA graphs. An engine that is in the folder already is not run again.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from statistics import mean
from typing import Annotated, Any, Final

import typer

BASELINES: Final = "stock-fcfs,default,stock-offload,fcfs-swap+next-use,auto"
SHAPES: Final[dict[str, dict[str, Any]]] = {
    "8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
           "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256, "max_position_embeddings": 131072},
    "tiny": {"max_position_embeddings": 131072},
}  # fmt: skip
KV_TOKEN_BYTES: Final = {"8b": 128 << 10, "tiny": 2 << 10}


def main(
    trace: Annotated[Path, typer.Argument(help="A program trace.")],
    out: Annotated[Path, typer.Option(help="Folder for a JSON file of each engine, and for table.md.")],
    baselines: Annotated[str, typer.Option(help="As for weft bench. The first is the base of all ratios.")] = BASELINES,
    scale: Annotated[float, typer.Option(help="A factor for all lengths and times.")] = 0.1,
    kv_tokens: Annotated[int, typer.Option(help="The tokens that the KV cache holds.")] = 30_000,
    host_gib: Annotated[float, typer.Option(help="Host memory for KV.")] = 16.0,
    batch_size: Annotated[int, typer.Option(help="The number of calls that run at once.")] = 8,
    chunk_tokens: Annotated[int, typer.Option(help="The most tokens of a step.")] = 2048,
    model: Annotated[str, typer.Option(help=f"{', '.join(SHAPES)}: the shape of the model.")] = "8b",
    budget_s: Annotated[float, typer.Option(help="After so many seconds no further engine starts.")] = 400.0,
    child: Annotated[bool, typer.Option("--child", hidden=True)] = False,
) -> None:
    """Replay a trace under each baseline."""
    out.mkdir(parents=True, exist_ok=True)
    sizes = {"kv_tokens": kv_tokens, "host_gib": host_gib, "batch_size": batch_size, "chunk_tokens": chunk_tokens}
    if child:
        (out / f"{baselines}.json").write_text(json.dumps(run(trace, baselines, scale, model, **sizes)))
        return
    given = sizes | {"out": out, "scale": scale, "model": model}
    options = [f"--{key.replace('_', '-')}={value}" for key, value in given.items()]
    began_s, has_failed = time.monotonic(), False
    for name in baselines.split(","):
        if (out / f"{name}.json").exists() or time.monotonic() - began_s > budget_s:
            continue
        typer.echo(name)
        command = [sys.executable, __file__, str(trace), *options, f"--baselines={name}", "--child"]
        has_failed |= subprocess.run(command, check=False).returncode != 0  # noqa: S603
    table = "\n".join(rows([out / f"{name}.json" for name in baselines.split(",")]))
    (out / "table.md").write_text(table + "\n")
    typer.echo(table)
    raise typer.Exit(has_failed)


def make_model(shape: str, folder: Path) -> Path:
    """A folder with the tiny Llama's tokenizer, a configuration of this shape, and no weights."""
    from weft.engine.models.tiny import make_tiny_llama

    made = make_tiny_llama(folder / shape)
    (made / "model.safetensors").unlink()
    config = json.loads((made / "config.json").read_text()) | SHAPES[shape]
    (made / "config.json").write_text(json.dumps(config | {"torch_dtype": "bfloat16", "dtype": "bfloat16"}))
    return made


def capacity(shape: str, batch_size: int, chunk_tokens: int, kv_tokens: int, host_gib: float) -> Any:
    """The capacity of an engine with random weights, which measures no memory and captures no graphs."""
    from weft.bench.settings import BLOCK_TOKENS
    from weft.bench.stepper import EngineCapacity

    kv_bytes = int((kv_tokens + 2 * BLOCK_TOKENS) * KV_TOKEN_BYTES[shape] * 1.05)
    more = {"load_format": "dummy", "enforce_eager": True, "kv_cache_memory_bytes": kv_bytes}
    return EngineCapacity(batch_size, kv_tokens // BLOCK_TOKENS, chunk_tokens, 1, host_gib=host_gib, more=more)


def run(trace: Path, name: str, scale: float, shape: str, **sizes: Any) -> dict[str, Any]:
    """Replay the trace on an engine in this process. Warms up with the first three programs and other prompts."""
    from common import machine

    from weft.bench.baselines import baseline_of
    from weft.bench.engines import run_in_this_process, token_ids
    from weft.bench.load import AS_RECORDED, Prompts, Scaling, make_round
    from weft.bench.replay import Replay

    run_in_this_process()
    from weft.bench.stepper import Stepper, model_limits

    with tempfile.TemporaryDirectory() as folder:
        began_s = time.monotonic()
        path = make_model(shape, Path(folder))
        room = capacity(shape, **sizes)
        most_tokens, vocabulary = model_limits(path, room)
        engine = Stepper(path, baseline_of(name), room, most_tokens, counts_steps=False)
        started_s = time.monotonic() - began_s
        made = make_round(str(trace), AS_RECORDED, 0, Scaling(scale, most_tokens, whole_steps=False),
                          programs=1 << 30, seed=0)  # fmt: skip
        for seed, programs in (("warm-up", made.programs[:3]), ("0", made.programs)):
            engine.reset()
            unloaded = {program.program: 1 for program in programs}
            replay = Replay(engine, programs, unloaded, Prompts(seed, token_ids(vocabulary)))
            for _ in replay.steps():
                pass
    return {
        "baseline": name, "machine": machine() | {"device": device()}, "started_s": started_s,
        "truncated_calls": made.truncated_calls, "steps": engine.clock.steps, "busy_steps": engine.clock.busy_steps,
        "seconds": engine.clock.seconds, "busy_s": engine.clock.busy_s, "counts": asdict(engine.meter.counts),
        "swapped_tokens": replay.swapped_tokens, "programs": [each._asdict() for each in replay.outcomes],
        "samples": [list(each) for each in engine.meter.samples],
    }  # fmt: skip


def device() -> str:
    """The name of the GPU, or of none."""
    import torch

    return str(torch.cuda.get_device_name()) if torch.cuda.is_available() else "CPU"


def rows(paths: list[Path]) -> list[str]:
    """The table of the engines that have run."""
    from weft.core.sim.result import percentile

    found = [json.loads(path.read_text()) for path in paths if path.exists()]
    lines = [
        "| engine | mean s | ÷ first | p95 | p99 | last end | busy s | steps | computed tokens | from host memory |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    seconds = [[program["seconds"] for program in each["programs"]] for each in found]
    for each, took_s in zip(found, seconds, strict=True):
        p95, p99 = (percentile(took_s, percent) for percent in (95, 99))
        counts = each["counts"]
        lines.append(
            f"| {each['baseline']} | {mean(took_s):.1f} | {mean(took_s) / mean(seconds[0]):.2f} | {p95:.1f} | "
            f"{p99:.1f} | {each['seconds']:.1f} | {each['busy_s']:.1f} | {each['busy_steps']:,} | "
            f"{counts['computed_tokens']:,} | {each['swapped_tokens']:,} |"
        )
    return lines


if __name__ == "__main__":
    typer.run(main)
