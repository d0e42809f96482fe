"""`weft advise`: what Weft would do for a user's own programs, simulated from their logs."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from weft.commands.progress import Bars
from weft.commands.shared import FormatOption, GapCapOption, JsonOption, ProgramsOption, left_out, show
from weft.commands.simulate.leaderboard import simulate_all
from weft.core.errors import SimulationError
from weft.core.files import writing
from weft.core.sim.study.advice import Advice, Change, Way, WayOutcome, outcomes, ways
from weft.core.sim.study.engine_profile import ENGINES, EngineProfile, engine_named
from weft.core.sim.study.load import with_load
from weft.core.tables import Cell, Table
from weft.core.trace.format import TraceProgram, is_trace, read
from weft.core.trace.importers import ImportOptions, TraceImport

_HOST_GIB: Final = (16.0, 64.0)


def advise(  # noqa: PLR0917  typer reads options off the signature
    logs: Annotated[
        list[Path],
        typer.Argument(
            help="Traces of Weft, or files of other tools and folders of them, as `weft trace import` reads them.",
            metavar="LOGS...",
            show_default=False,
        ),
    ],
    engine: Annotated[
        str, typer.Option(help=f"{', '.join(ENGINES)}, or a file that `weft profile` wrote.", metavar="NAME|FILE")
    ] = next(iter(ENGINES)),
    kv_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens that the engine's KV cache holds (default: the engine's).")
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="Calls that it runs at once (default: the engine's).")
    ] = None,
    host_kv_gib: Annotated[
        list[float], typer.Option(min=0, help="GiB of host memory to try; may be given several times.")
    ] = list(_HOST_GIB),  # noqa: B006  typer makes a new list
    load: Annotated[
        float | None,
        typer.Option(help="Stretch the arrivals to this multiple of what the engine can serve (default: as recorded)."),
    ] = None,
    concurrency: Annotated[
        int | None, typer.Option(min=1, help="Run so many programs at once, and ignore when they arrived.")
    ] = None,
    format: FormatOption = None,  # noqa: A002  the option's name
    max_context: Annotated[
        int | None,
        typer.Option(min=1, help="Leave out calls with more tokens (default: those that the KV cache holds)."),
    ] = None,
    gap_cap: GapCapOption = None,
    programs: ProgramsOption = None,
    seed: Annotated[
        int, typer.Option(help="Of the draws for the intervals, and of arrivals where all logs begin at once.")
    ] = 0,
    plot: Annotated[Path | None, typer.Option(help="Draw the changes into this .svg file.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Say what Weft would change for your own programs: completion times, prefix hits, and what host memory gives.

    Stock vLLM, a plain gate, host memory and Weft's default are simulated on the same programs. The intervals hold 95 %
    of the draws of a block bootstrap over programs, each with an error such as the simulator had in live runs.
    """
    profile = engine_named(engine)
    settings = profile.settings(kv_tokens=kv_tokens, batch_size=batch_size)
    if load is not None and concurrency is not None:
        raise SimulationError("--load and --concurrency both say when programs arrive; give one of them.")
    if plot is not None:
        if plot.suffix != ".svg":
            raise SimulationError(f"{plot} cannot be drawn: name an .svg file.")
        from weft.bench.results.plots import pyplot

        plt = pyplot()  # A missing matplotlib is reported now and not after minutes.
    options = ImportOptions(
        max_context_tokens=settings.kv_tokens if max_context is None else max_context,
        gap_cap_s=math.inf if gap_cap is None else gap_cap,
    )
    found = _programs(logs, options, format, programs)
    if load is not None:
        found = with_load(found, load, settings, seed)
    if concurrency is not None:
        settings = replace(settings, concurrency=concurrency)
    choices = ways([gib for gib in host_kv_gib if gib])
    engines = [way.settings(settings, profile.host_tokens(way.host_gib)) for way in choices]
    results = dict(zip(choices, simulate_all("simulating", found, engines), strict=True))
    rows = list(outcomes(results, random.Random(seed)))  # noqa: S311
    advice = Advice.of(rows)
    if as_json:
        typer.echo(json.dumps(_to_json(rows, advice, found, profile)))
    else:
        _print(rows, advice, found, profile)
    if plot is not None:
        _draw(plt, rows, plot)
        if not as_json:
            typer.echo(plot)


def _programs(
    logs: Sequence[Path], options: ImportOptions, format_: str | None, most: int | None
) -> list[TraceProgram]:
    """The programs of the logs, in the order of their arrival."""
    if format_ is None and all(map(is_trace, logs)):
        found: Iterator[TraceProgram] = itertools.chain.from_iterable(map(read, logs))
        return sorted(itertools.islice(found, most), key=lambda program: program.arrival_s)
    imported = TraceImport(logs, options, format_)
    with Bars("reading", imported.bytes, "bytes") as bars:
        imported.advance = bars.advance
        kept = sorted(itertools.islice(imported, most), key=lambda program: program.arrival_s)
    for line in left_out(imported):
        typer.echo(line, err=True)
    return kept


def _to_json(
    rows: Sequence[WayOutcome], advice: Advice, programs: Sequence[TraceProgram], profile: EngineProfile
) -> dict[str, Any]:
    def row(each: WayOutcome) -> dict[str, Any]:
        values = {**asdict(each), "mean_change": each.mean_change._asdict()}
        return {**values, "way": {"name": each.way.name, **each.way.rival._asdict(), "host_gib": each.way.host_gib}}

    return {
        "engine": profile.source,
        "programs": len(programs),
        "calls": sum(len(program.calls) for program in programs),
        "ways": [row(each) for each in rows],
        "best": advice.best.way.name,
        "advice": list(_sentences(advice)),
    }


def _print(
    rows: Sequence[WayOutcome], advice: Advice, programs: Sequence[TraceProgram], profile: EngineProfile
) -> None:
    calls = sum(len(program.calls) for program in programs)
    cells = []
    for each in rows:
        texts = (
            each.way.name,
            _seconds(each.mean_s),
            "" if each is advice.stock else _interval(each.mean_change),
            _seconds(each.p99_s),
            f"{each.prefix_hits:.0%}",
            f"{each.recomputed_tokens / 1e6:.1f} M",
        )
        cells.append([Cell(text, "bold" if each is advice.best else "") for text in texts])
    headings = ("served by", "mean s", "change", "p99 s", "hits", "again")
    show(Table(f"{len(programs):,} programs, {calls:,} calls", headings, cells, frozenset(range(1, 6)), widest=60))
    for sentence in _sentences(advice):
        typer.echo(sentence)
    typer.echo(f"All of this is simulated. The step times are {profile.source}.")


def _sentences(advice: Advice) -> Iterator[str]:
    """The advice in words: losses first, then what Weft changes, what plain means give, and what to do."""
    weft, gate, best = advice.default, advice.gate, advice.best
    memory = f"with {weft.way.host_gib:g} GiB of host memory" if weft.way.host_gib else "without host memory"
    subject = f"With this traffic on an engine of this size, Weft's default {memory}"
    hits = f"prefix hits from {100 * advice.stock.prefix_hits:.0f} to {100 * weft.prefix_hits:.0f} %"
    figures = f"mean completion by {_interval(weft.mean_change)}, p99 by {_percent(weft.p99_change)} %, {hits}"
    if weft.mean_change.is_loss:
        yield f"{subject} would lose: it would change {figures}."
    elif weft.mean_change.is_gain:
        yield f"{subject} would change {figures}."
    else:
        yield f"{subject} would bring no gain: it would change {figures}."
    if weft.way.host_gib:
        yield f"Without host memory, Weft's default would change the mean by {_interval(advice.weft.mean_change)}."
    if gate.mean_s < weft.mean_s * 0.99:
        yield f"A plain gate in the order of arrival would do better: {_interval(gate.mean_change)}."
    if advice.stock_host is not None and advice.weft_host is not None:
        yield from _about_host(advice.stock, advice.stock_host, advice.weft_host)
    yield f"Advice: {what_to_do(best.way)}"


def _about_host(stock: WayOutcome, plain: WayOutcome, weft: WayOutcome) -> Iterator[str]:
    """What host memory gives alone, and what Weft adds to it."""
    if not plain.mean_change.is_gain:
        yield f"Host memory alone is no sure gain here: {_interval(plain.mean_change)}."
        return
    ours = stock.mean_s - weft.mean_s
    part = (stock.mean_s - plain.mean_s) / ours if ours > 0 else 1.0
    share = "all of it" if part >= 1 else "most of it" if part > 0.5 else "a part of it"
    yield (
        f"Host memory alone gives {share}: stock vLLM with {plain.way.host_gib:g} GiB changes the mean by "
        f"{_interval(plain.mean_change)}, and Weft with {weft.way.host_gib:g} GiB by {_interval(weft.mean_change)}."
    )


def what_to_do(way: Way) -> str:
    """The command that serves in this way, or that nothing has to be done."""
    if way.is_weft:
        return f"weft serve MODEL --host-kv-gib {way.host_gib:g}"
    if way.host_gib:
        return f"vllm serve MODEL --kv-offloading-size {way.host_gib:g}; Weft would add nothing to it."
    if way.rival.gate:
        return "weft serve MODEL --policy priority --gate --host-kv-gib 0"
    return "stay with vLLM as it is; nothing that was tried is a gain."


def _interval(change: Change) -> str:
    return f"{_percent(change.value)} % ({_percent(change.low)} … {_percent(change.high)})"


def _percent(value: float) -> str:
    """A change in percent, with a real minus sign."""
    rounded = round(100 * value)
    return f"{rounded:+d}".replace("-", "\u2212") if rounded else "0"


def _seconds(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.2f}"


def _draw(plt: Any, rows: Sequence[WayOutcome], path: Path) -> None:
    """A bar for each way to serve, with a line for its interval."""
    others = [each for each in rows if each.mean_change.value or each.way.is_weft][::-1]
    figure, axes = plt.subplots(figsize=(7, 0.6 * len(others) + 1.2), layout="constrained")
    values = [100 * each.mean_change.value for each in others]
    errors = [
        [100 * (each.mean_change.value - each.mean_change.low) for each in others],
        [100 * (each.mean_change.high - each.mean_change.value) for each in others],
    ]
    colors = ["C0" if each.way.is_weft else "0.65" for each in others]
    axes.barh([each.way.name for each in others], values, xerr=errors, capsize=3, color=colors)
    axes.axvline(0, color="black", linewidth=0.8)
    axes.set_xlabel("mean completion time against stock vLLM, % (simulated)")
    with writing(path, "--plot"):
        figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
