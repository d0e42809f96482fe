"""`weft bench`: replay a trace on real vLLM under several schedulers, and compare them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from weft.bench.baselines import BASELINES, DEFAULT_BASELINES
from weft.bench.settings import BenchSettings
from weft.commands.progress import Bars
from weft.commands.shared import setting
from weft.core.errors import BenchError
from weft.core.kv_cache.policies import KV_POLICIES


def bench(  # noqa: PLR0917  typer reads options off the signature
    source: Annotated[
        str,
        typer.Argument(
            help="chat, tools, search, mixed, swe, web, tenants, intercepted, or a program trace "
            "(docs/reference/trace-format.md)."
        ),
    ],
    out: Annotated[
        Path, typer.Option(help="Folder for results.json, report.md and plots; the same folder resumes a benchmark.")
    ],
    programs: Annotated[int, setting(BenchSettings, "programs", min=1)] = 40,
    seed: Annotated[int, setting(BenchSettings, "seed")] = 0,
    scale: Annotated[float, setting(BenchSettings, "scale")] = 0.1,
    rates: Annotated[
        str | None,
        typer.Option(help="Programs that arrive a second, such as 0.5,1,2 (default for a trace: as recorded)."),
    ] = None,
    loads: Annotated[
        str | None, typer.Option(help="Instead of rates: multiples of what the engine can serve, such as 0.5,0.8.")
    ] = None,
    baselines: Annotated[
        str,
        setting(
            BenchSettings,
            "baselines",
            f"There are also {', '.join(name for name in BASELINES if name not in DEFAULT_BASELINES)}. Weft's take "
            f"a KV policy ({', '.join(KV_POLICIES)}), and gate or no-gate: atlas+next-use, auto+no-gate.",
        ),
    ] = ",".join(DEFAULT_BASELINES),
    batch_size: Annotated[int, setting(BenchSettings, "batch_size", min=1)] = 8,
    kv_tokens: Annotated[int | None, setting(BenchSettings, "kv_tokens", min=1)] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Number of rounds; each draws new programs.")] = 3,
    clock: Annotated[Literal["steps", "seconds"], setting(BenchSettings, "clock")] = "steps",
    closed: Annotated[
        bool, typer.Option("--closed", help="Also replay all programs at once, for the makespan.")
    ] = False,
    model: Annotated[str, setting(BenchSettings, "model")] = "tiny",
) -> None:
    """Replay programs on real vLLM under baseline schedulers, and compare their latency."""
    from weft.bench.engines import replay_missing
    from weft.bench.results import page, plots
    from weft.bench.results.records import Journal
    from weft.bench.rounds import rates_of_loads
    from weft.bench.settings import names_of_loads
    from weft.core.trace.format import read
    from weft.engine.vllm_compat.versions.version import check_vllm

    settings = BenchSettings(
        source=source,
        programs=programs,
        seed=seed,
        scale=scale,
        baselines=tuple(name.strip() for name in baselines.split(",") if name.strip()),
        batch_size=batch_size,
        kv_tokens=kv_tokens,
        clock=clock,
        model=model,
    )
    per_s = [*_numbers(rates, "--rates"), *rates_of_loads(settings, _numbers(loads, "--loads"))]
    names = names_of_loads(settings, per_s, closed=closed)
    if settings.is_file:
        read(Path(source))  # A trace that cannot be read is reported before the folder belongs to it.
    version = check_vllm()
    plots.pyplot()  # A missing matplotlib is reported now and not after hours.
    journal = Journal(out, settings.to_json() | {"vllm": version})
    keys = [(name, number) for number in range(rounds) for name in names]
    with Bars(stays=True) as progress:
        replay_missing(settings, journal, keys, progress.begin, progress.advance)
        replayed = [journal.rounds[name, number] for name in names for number in range(rounds)]
        progress.begin("simulating", len(replayed) * (len(settings.baselines) + 1))
        path = page.write(settings, replayed, out, progress.advance)
    typer.echo(path)


def _numbers(text: str | None, option: str) -> list[float]:
    try:
        return [float(number) for number in (text or "").split(",") if number.strip()]
    except ValueError:
        raise BenchError(f"{option} is {text!r}; give numbers with commas, such as 0.5,1,2.") from None
