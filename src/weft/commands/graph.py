"""`weft graph`: draw the graph of a program's calls."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from weft.commands.shared import check_kept


def graph(
    trace: Annotated[Path, typer.Argument(help="A file that was written with program.graph.to_json().")],
    out: Annotated[
        Path, typer.Option(help="The file to write: .svg or .png (a picture), .mmd (Mermaid), .dot (Graphviz), .json.")
    ] = Path("graph.svg"),
    program: Annotated[
        str | None, typer.Option(help="Id or name of the program, if the file has several (default: the first).")
    ] = None,
) -> None:
    """Draw the graph of a program's calls."""
    from weft.views.graph import load, save

    check_kept([trace], out)
    save(load(trace, program), out)
    typer.echo(out)
