"""What the examples share: their options, a quick and quiet start, and the table and the picture at the end."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Coroutine
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.console import Console
from rich.status import Status

import weft
from weft.core.program.graph import ProgramGraph
from weft.views.graph import FORMS, save
from weft.views.process_table import process_table

# Arguments of the engine: slower steps for a quicker start, no progress bars, and JSON without white space.
QUICK: Final[dict[str, Any]] = {
    "max_model_len": 2048,
    "enforce_eager": True,
    "use_tqdm_on_load": False,
    "structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True},
}

console: Final = Console()


def _drawable(picture: Path) -> Path:
    if picture.suffix not in FORMS:  # told now, since the picture is drawn last
        raise typer.BadParameter(f"{picture}: end the name in one of {', '.join(FORMS)}.")
    return picture


Model = Annotated[str | None, typer.Option(help="A folder in Hugging Face format, or a hub name.")]
Picture = Annotated[Path, typer.Option(help=f"Where to draw the graph: {', '.join(FORMS)}.", callback=_drawable)]


def starting() -> Status:
    """A sign of life while the engine starts, for a `with` statement."""
    return console.status("starting vLLM (half a minute to a minute) ...")


def tell(line: str, style: str = "") -> None:
    """Print a line as it is: what a model says may look like markup."""
    console.print(line, style=style, markup=False, highlight=False, soft_wrap=True)


def finish(engine: weft.Engine, graph: ProgramGraph, picture: Path) -> None:
    """Print the process table, and draw the calls of one program."""
    console.print()
    console.print(process_table(engine.table))
    save(graph, picture)
    tell(f"the calls of {graph.name}: {picture}")


def play(example: Coroutine[Any, Any, object]) -> None:
    """Run an example to its end, with the libraries quiet.

    Raises:
        typer.Exit: one of our errors came up; it has been printed, as one line.
    """
    # This is a program of its own, so it may quiet the libraries; `VLLM_LOGGING_LEVEL=INFO` brings vLLM's log back.
    os.environ.setdefault("VLLM_CONFIGURE_LOGGING", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "CRITICAL")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    os.environ.setdefault("TORCH_LOGS", "-torch._library")
    os.environ.setdefault("PYTHONWARNINGS", "ignore")
    try:
        asyncio.run(example)
    except weft.WeftError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from None
