"""Shared by the examples: their options, a quick and quiet start, and the table and the picture at the end."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Coroutine
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.console import Console

import weft
from weft.core.program.graph import ProgramGraph
from weft.views.graph import FORMATS, save

# Arguments of the engine: eager mode, which starts faster and has slower steps; no progress bars; JSON without white
# space.
QUICK: Final[dict[str, Any]] = {
    "max_model_len": 2048,
    "enforce_eager": True,
    "use_tqdm_on_load": False,
    "structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True},
}

console: Final = Console()


def _check_picture(picture: Path) -> Path:
    if picture.suffix not in FORMATS:  # The picture is drawn last, but a wrong name should be reported first.
        raise typer.BadParameter(f"{picture}: end the name in one of {', '.join(FORMATS)}.")
    return picture


Model = Annotated[str | None, typer.Option(help="A folder in Hugging Face format, or a hub name.")]
Picture = Annotated[
    Path, typer.Option(help=f"The file to draw the graph into: {', '.join(FORMATS)}.", callback=_check_picture)
]


def tell(line: str, style: str = "") -> None:
    """Print a line. Markup is off, since a model's output may look like markup."""
    console.print(line, style=style, markup=False, highlight=False, soft_wrap=True)


def finish(engine: weft.Engine, graph: ProgramGraph, picture: Path) -> None:
    """Print the process table, and draw the calls of one program."""
    console.print()
    console.print(engine.table)
    save(graph, picture)
    tell(f"the calls of {graph.name}: {picture}")


def play(example: Coroutine[Any, Any, object]) -> None:
    """Run an example to its end, without the log output of the libraries.

    Raises:
        typer.Exit: The example raised one of Weft's errors. The error has been printed in one line.
    """
    # An example is a program of its own, so it may silence the libraries.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    os.environ.setdefault("TORCH_LOGS", "-torch._library")
    os.environ.setdefault("PYTHONWARNINGS", "ignore")
    try:
        asyncio.run(example)
    except weft.WeftError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from None
