"""`weft trace`: make a program trace for `weft sim` and `weft bench`."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Annotated

import typer


def trace(  # noqa: PLR0917  typer reads options off the signature
    source: Annotated[
        str,
        typer.Argument(
            help="chat, tools, search or mixed (Autellix §6.1); swe, web or tenants (SAGA §9.1); intercepted (Astraea "
            "§5.1); or a file of tau-bench or BFCL."
        ),
    ],
    out: Annotated[Path, typer.Option(help="The trace file to write.")] = Path("trace.jsonl"),
    programs: Annotated[int, typer.Option(min=1, help="How many programs (of a file: at most).")] = 100,
    rate: Annotated[float, typer.Option(help="Programs that arrive a second, on average.")] = 1.0,
    bursty: Annotated[bool, typer.Option("--bursty", help="Programs arrive in bursts (default: Poisson).")] = False,
    seed: Annotated[int, typer.Option(help="The same seed makes the same trace.")] = 0,
) -> None:
    """Make a program trace: a generated workload, or a public trace in Weft's format."""
    from weft.core.trace import workloads
    from weft.core.trace.converters import convert
    from weft.core.trace.format import write

    arrivals = (workloads.bursty if bursty else workloads.poisson)(random.Random(f"arrivals {seed}"), rate)  # noqa: S311
    if source in workloads.WORKLOADS:
        made = workloads.generate(source, programs, arrivals, random.Random(f"programs {seed}"))  # noqa: S311
    else:
        made = convert(Path(source), arrivals)[:programs]
    write(made, out)
    typer.echo(out)
