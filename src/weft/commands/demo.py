"""`weft demo` and `weft model`: the embedded model, and what it shows of Weft."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from weft.commands.progress import model_progress
from weft.commands.shared import Command, CommandGroup, one_of
from weft.core.errors import WeftError, pip_install
from weft.core.policies import DEFAULT_POLICY, POLICIES
from weft.engine.models.embedded import embedded_model, is_embedded_model_ready
from weft.engine.vllm_compat.versions.version import check_vllm


def demo(
    model: Annotated[
        str | None, typer.Option(help="A folder in Hugging Face format, or a hub name (default: the embedded SmolLM2).")
    ] = None,
    policy: Annotated[str, one_of(POLICIES, help="The policy to compare with fcfs, vLLM's own order.")] = (
        DEFAULT_POLICY
    ),
    programs: Annotated[
        int | None, typer.Option(min=1, help="How many agents run at once (default: one for each task of the demo).")
    ] = None,
) -> None:
    """Run the ReAct example on a real engine in this process: under fcfs, then under a policy."""
    try:
        from weft.examples.react_langchain import run_demo
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] not in {"langchain", "langchain_core", "langgraph"}:
            raise
        command = pip_install("langchain", "langchain-core", "langgraph")
        raise WeftError(f"the demo needs LangChain: {command}") from error
    check_vllm()
    if model is None and not is_embedded_model_ready():
        fetch_model()
    raise typer.Exit(run_demo(model, policy, programs))


model_app = typer.Typer(cls=CommandGroup, no_args_is_help=True, help="The embedded model.")


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
