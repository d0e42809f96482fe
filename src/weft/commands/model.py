"""`weft model`: the embedded model."""

from __future__ import annotations

from pathlib import Path

import typer

from weft.commands.flags import Command, Group
from weft.commands.progress import model_progress
from weft.engine.models.embedded import embedded_model, is_embedded_model_ready

model_app = typer.Typer(cls=Group, no_args_is_help=True, help="The embedded model.")


@model_app.command(cls=Command)
def prepare() -> None:
    """Fetch and convert the embedded model, once, and print its folder."""
    if is_embedded_model_ready():
        typer.echo("already prepared", err=True)
        folder = embedded_model()
    else:
        folder = fetch_model()
    typer.echo(folder)


def fetch_model() -> Path:
    """Fetch and convert the embedded model, with progress bars on standard error, and return its folder."""
    with model_progress() as report:
        return embedded_model(report)
