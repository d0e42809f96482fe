"""`weft trace`: make a program trace for `weft sim` and `weft bench`, import one of another tool, or export one.

`weft trace SOURCE` is the short form of `weft trace make SOURCE`, which was the only form once.
"""

from __future__ import annotations

import itertools
import json
import random
import shlex
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from weft.commands.progress import Bars
from weft.commands.shared import (
    Command,
    CommandGroup,
    FormatOption,
    GapCapOption,
    ProgramsOption,
    TraceOut,
    check_kept,
    counted,
    left_out,
    one_of,
)
from weft.core.errors import SimulationError, TraceError
from weft.core.files import writing
from weft.core.sim.settings import SimSettings
from weft.core.sim.study.load import ENOUGH, capacity, check_load
from weft.core.trace.exporters import EXPORTERS
from weft.core.trace.importers import ImportOptions, TraceImport

PERFETTO: Final = "perfetto"


class _MakeUnlessNamed(CommandGroup):
    """A group that runs its command `make` if the first argument is not the name of a command."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in (*self.commands, *self.get_help_option_names(ctx)):
            args = ["make", *args]
        return super().parse_args(ctx, args)


trace_app = typer.Typer(
    cls=_MakeUnlessNamed,
    no_args_is_help=True,
    help="Make a program trace, import one of another tool, or export one. `weft trace SOURCE` is short for `weft "
    "trace make SOURCE`.",
)


@trace_app.command(cls=Command)
def make(  # noqa: PLR0917  typer reads options off the signature
    source: Annotated[
        str,
        typer.Argument(
            help="chat, tools, search or mixed (Autellix §6.1); swe, web or tenants (SAGA §9.1); or intercepted "
            "(Astraea §5.1)."
        ),
    ],
    out: TraceOut = Path("trace.jsonl"),
    programs: Annotated[int, typer.Option(min=1, help="How many programs to make.")] = 100,
    rate: Annotated[float | None, typer.Option(help="Programs that arrive a second, on average (default: 1).")] = None,
    load: Annotated[
        float | None,
        typer.Option(
            help="Instead of a rate: a multiple of what an engine of `weft sim` can serve, which is measured first."
        ),
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(help="For --load: calls that this engine runs at once (default: 64).")
    ] = None,
    bursty: Annotated[bool, typer.Option("--bursty", help="Programs arrive in bursts (default: Poisson).")] = False,
    seed: Annotated[int, typer.Option(help="The same seed makes the same trace.")] = 0,
) -> None:
    """Make a program trace of a generated workload."""
    from weft.core.trace import workloads
    from weft.core.trace.format import TraceProgram, write

    def draw(count: int, per_s: float) -> list[TraceProgram]:
        arrivals = (workloads.bursty if bursty else workloads.poisson)(random.Random(f"arrivals {seed}"), per_s)  # noqa: S311
        return workloads.generate(source, count, arrivals, random.Random(f"programs {seed}"))  # noqa: S311

    if source not in workloads.WORKLOADS:
        raise TraceError(
            f"there is no workload {source!r:.80}; choose one of {', '.join(workloads.WORKLOADS)}, or import a file: "
            f"weft trace import {shlex.quote(source):.80}"
        )
    if load is None and batch_size is not None:
        raise SimulationError("--batch-size is of the engine whose load --load names; give --load too.")
    if load is not None:
        if rate is not None:
            raise SimulationError("--rate and --load both say how many programs arrive; give one of them.")
        check_load(load)
        calls = 64 if batch_size is None else batch_size
        engine = SimSettings(batch_size=calls, chunk_tokens=max(2048, calls))
        rate = load * capacity(draw(max(programs, ENOUGH), 1.0), engine, tools=False)
    write(draw(programs, 1.0 if rate is None else rate), out)
    typer.echo(out)


@trace_app.command("import", cls=Command)
def import_(  # noqa: PLR0917  typer reads options off the signature
    files: Annotated[list[Path], typer.Argument(help="Files of other tools, and folders of them.")],
    out: TraceOut = Path("trace.jsonl"),
    format: FormatOption = None,  # noqa: A002  the option's name
    max_context: Annotated[
        int | None,
        typer.Option(min=1, help="Leave out calls with more tokens than this, and the calls that follow them."),
    ] = None,
    max_turns: Annotated[
        int | None, typer.Option(min=1, help="Leave out calls of a program beyond this number.")
    ] = None,
    gap_cap: GapCapOption = None,
    programs: ProgramsOption = None,
    rate: Annotated[
        float | None, typer.Option(help="Programs that arrive a second, on average (default: they arrive as recorded).")
    ] = None,
    seed: Annotated[int, typer.Option(help="For --rate: the same seed makes the same arrivals.")] = 0,
    ends_unknown: Annotated[
        bool, typer.Option("--ends-unknown", help="Nobody tells when a program ends, as with most clients over HTTP.")
    ] = False,
) -> None:
    """Import traces of other tools: token counts, shared prefixes, times. Texts are left out."""
    from weft.core.trace.format import write
    from weft.core.trace.workloads import poisson

    caps = {"max_context_tokens": max_context, "max_turns": max_turns, "gap_cap_s": gap_cap}
    options = ImportOptions(ends_unknown=ends_unknown, **{name: cap for name, cap in caps.items() if cap is not None})
    arrivals = None if rate is None else poisson(random.Random(f"arrivals {seed}"), rate)  # noqa: S311
    found = TraceImport(files, options, format, arrivals)
    check_kept((path for path, _ in found.files), out)
    with Bars("importing", found.bytes, "bytes") as bars:
        found.advance = bars.advance
        write(itertools.islice(found, programs), out)
    counts = found.counts
    typer.echo(f"{out}: {counted(counts.programs, 'program')} with {counted(counts.calls, 'call')}")
    for line in left_out(found):
        typer.echo(line)


@trace_app.command(cls=Command)
def export(
    file: Annotated[
        Path,
        typer.Argument(
            help="A trace. For perfetto, one that `weft record` wrote, or graphs of program.graph.to_json()."
        ),
    ],
    format: Annotated[  # noqa: A002  the option's name
        str, one_of((PERFETTO, *EXPORTERS), help="What to write. perfetto: for ui.perfetto.dev; weka: a new folder.")
    ],
    out: Annotated[Path, typer.Option(help="The file or folder to write.")],
) -> None:
    """Export programs to look at in Perfetto, or to replay with AIPerf (weka) or Dynamo (agentic-mooncake)."""
    from weft.core.trace.format import read

    check_kept([file], out)
    if format == PERFETTO:
        from weft.core.show.perfetto import perfetto
        from weft.core.show.recorded import timelines_in

        timelines = list(timelines_in(file))
        with writing(out):
            out.write_text(json.dumps(perfetto(timelines)), encoding="utf-8")
        typer.echo(f"{out}: {counted(len(timelines), 'program')}; open it on https://ui.perfetto.dev")
        return
    programs = read(file)
    left = EXPORTERS[format](programs, out)
    typer.echo(f"{out}: {counted(len(programs) - len(left.programs), 'program')}")
    if lost := [f"{what} ({number:,})" for what, number in left.lost.items() if number]:
        typer.echo(f"lost, because {format} cannot say it: {', '.join(lost)}")
    if left.programs:
        typer.echo(f"left out: {counted(len(left.programs), 'program')}; the first one: {left.programs[0]}")
