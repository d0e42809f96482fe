"""`weft bench`: a trace on real vLLM, baseline schedulers side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from weft.bench.baselines import DEFAULT_BASELINES
from weft.core.errors import BenchError, VllmUnavailableError


def bench(  # noqa: PLR0917  typer reads options off the signature
    source: Annotated[str, typer.Argument(help="chat, tools, search, mixed, or a program trace (docs/simulator.md).")],
    out: Annotated[Path, typer.Option(help="Folder for results.json, report.md and pictures; run again to go on.")],
    programs: Annotated[int, typer.Option(help="Programs in a round (of a trace: at most).")] = 40,
    seed: Annotated[int, typer.Option(help="The same seed draws the same programs.")] = 0,
    scale: Annotated[float, typer.Option(help="Factor of all lengths and times.")] = 0.1,
    rates: Annotated[
        str | None,
        typer.Option(help="Programs that arrive a second, such as 0.5,1,2 (default of a trace: as recorded)."),
    ] = None,
    baselines: Annotated[
        str, typer.Option(help="What to compare; the first is the base. Also: stock-again, atlas-swap.")
    ] = ",".join(DEFAULT_BASELINES),
    batch_size: Annotated[int, typer.Option(help="Calls that an engine runs at once.")] = 8,
    kv_tokens: Annotated[
        int | None, typer.Option(help="Tokens that an engine's KV cache holds (default: 4096 a call, times --scale).")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; each draws new programs.")] = 3,
    clock: Annotated[
        Literal["steps", "seconds"], typer.Option(help="What arrivals go by; steps can be repeated to the digit.")
    ] = "steps",
    closed: Annotated[bool, typer.Option("--closed", help="Also play all programs at once, for the makespan.")] = False,
    model: Annotated[str, typer.Option(help="tiny (random), embedded, or a folder in Hugging Face format.")] = "tiny",
) -> None:
    """Replay programs on real vLLM under baseline schedulers, and compare their latency."""
    from weft.bench import plots, report
    from weft.bench.journal import Journal
    from weft.bench.session import play_missing
    from weft.bench.settings import BenchSettings, loads
    from weft.engine.vllm_compat.version import installed_vllm

    settings = BenchSettings(
        source=source,
        programs=programs,
        seed=seed,
        scale=scale,
        baselines=tuple(name.strip() for name in baselines.split(",")),
        batch_size=batch_size,
        kv_tokens=kv_tokens,
        clock=clock,
        model=model,
    )
    names = loads(settings, _numbers(rates), closed=closed)
    version = installed_vllm()
    if version is None:
        raise VllmUnavailableError("it is not installed")
    plots.pyplot()  # rather than after hours
    journal = Journal(out, settings.to_json() | {"vllm": version})
    units = [(name, number) for number in range(rounds) for name in names]
    with _Bars() as bars:
        play_missing(settings, journal, units, bars)
        played = [journal.rounds[name, number] for name in names for number in range(rounds)]
        bars.begin("simulating", len(played) * (len(settings.baselines) + 1))
        path = report.write(settings, played, out, bars.advance)
    typer.echo(path)


def _numbers(text: str | None) -> list[float]:
    try:
        return [float(number) for number in (text or "").split(",") if number.strip()]
    except ValueError:
        raise BenchError(f"--rates is {text!r}; give numbers with commas, such as 0.5,1,2.") from None


class _Bars:
    """What is under way, as a bar with an estimate on standard error; where that is no terminal, nothing."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

        console = Console(stderr=True)
        columns = (TextColumn("{task.description:18}"), BarColumn(), TextColumn("{task.percentage:3.0f} %"))
        times = (TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
        self._progress = Progress(*columns, *times, console=console, disable=not console.is_terminal)
        self._task = self._progress.add_task("", visible=False)

    def __enter__(self) -> _Bars:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def begin(self, what: str, total: int, done: int = 0) -> None:
        """Something begins, of which a part may be done already."""
        self._task = self._progress.add_task(what, total=total, completed=done)

    def advance(self) -> None:
        """Another part is done."""
        self._progress.advance(self._task)
