"""The `weft` command.

Every import of vLLM, torch or a framework happens inside a command, so that `weft --help` stays quick.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal

import typer

from weft import __version__
from weft.commands import bench as bench_cli
from weft.commands import record as record_cli
from weft.commands import sim as sim_cli
from weft.core.errors import WeftError
from weft.engine.models.embedded import (
    DOWNLOAD_BYTES,
    ProgressCallback,
    Stage,
    embedded_model,
    is_embedded_model_ready,
)

app = typer.Typer(
    name="weft",
    no_args_is_help=True,
    add_completion=False,
    help="Program-aware LLM serving for LangChain and AutoGen agents on stock vLLM.",
)
model_app = typer.Typer(no_args_is_help=True, help="The embedded model.")
app.add_typer(model_app, name="model")

_INTERRUPTED = 130  # what a shell reports for a command that Ctrl-C ended
_STAGE_LABELS: dict[Stage, str] = {
    "wait": "waiting for another process",
    "download": "downloading",
    "extract": "unpacking",
    "convert": "converting",
    "save": "saving",
}


def _print_version(requested: bool) -> None:
    if requested:
        typer.echo(f"weft {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@app.command()
def demo(
    model: Annotated[
        str | None,
        typer.Option(help="A folder in Hugging Face format, or a hub name (default: the embedded SmolLM2)."),
    ] = None,
    policy: Annotated[
        Literal["fcfs", "mlfq", "plas", "atlas", "rr"], typer.Option(help="The scheduling policy.")
    ] = "atlas",
    programs: Annotated[
        int | None, typer.Option(min=1, help="How many agents run at once (default: the demo's own).")
    ] = None,
) -> None:
    """Run the ReAct example: LangChain agents on a real engine in this process."""
    try:
        from weft.examples.react_langchain import run_demo
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] not in {"langchain", "langchain_core", "langgraph"}:
            raise
        raise WeftError("the demo needs LangChain: pip install 'weft[langchain]'") from error
    if model is None and not is_embedded_model_ready():
        with _progress_bars() as report:
            embedded_model(report)
    raise typer.Exit(run_demo(model, policy, programs))


@app.command()
def graph(
    trace: Annotated[Path, typer.Argument(help="A file that holds what program.graph.to_json() gives.")],
    out: Annotated[
        Path, typer.Option(help="What to write: .svg or .png (a picture), .mmd (Mermaid), .dot (Graphviz), .json.")
    ] = Path("graph.svg"),
    program: Annotated[
        str | None, typer.Option(help="Id or name of the program, if the file has several (default: the first).")
    ] = None,
) -> None:
    """Draw the graph of a program's calls."""
    from weft.views.graph import load, save

    save(load(trace, program), out)
    typer.echo(out)


app.command()(sim_cli.sim)
app.command()(sim_cli.trace)
app.command()(bench_cli.bench)
app.command()(record_cli.record)


@model_app.command()
def prepare() -> None:
    """Fetch and convert the embedded model, once, and print its folder."""
    if is_embedded_model_ready():
        typer.echo("already prepared", err=True)
        folder = embedded_model()
    else:
        with _progress_bars() as report:
            folder = embedded_model(report)
    typer.echo(folder)


@app.command()
def doctor(
    engine: Annotated[
        bool, typer.Option("--engine", help="Also start an engine, and measure from when on it swaps KV (a minute).")
    ] = False,
    model: Annotated[
        str | None, typer.Option(help="--engine with this one: a folder or hub name (default: embedded).")
    ] = None,
) -> None:
    """Check this installation and say what to do about what is wrong."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from weft.commands.doctor import check_swap, run_checks

    with Console(stderr=True).status("checking (this imports vLLM) ...") as status:
        checks = run_checks()
        if engine or model is not None:
            status.update("starting an engine ...")
            checks.append(check_swap(model))
    table = Table(box=None, pad_edge=False)
    for heading in ("", "", "found", "what to do"):
        table.add_column(heading, overflow="fold")
    for check in checks:
        mark = Text("ok", "green") if check.ok else Text("no", "bold red")
        table.add_row(mark, Text(check.name), Text(check.detail), Text(check.fix))
    Console().print(table)
    if not all(check.ok for check in checks):
        raise typer.Exit(1)


@contextmanager
def _progress_bars() -> Iterator[ProgressCallback]:
    """A callback that shows each stage as a bar on standard error."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description:28}"),
        BarColumn(),
        TextColumn("{task.fields[amount]:>12}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as bars:
        tasks: dict[Stage, TaskID] = {}

        def finish() -> None:
            for task in tasks.values():
                bars.update(task, total=1.0, completed=1.0)

        def report(stage: Stage, fraction: float | None, /) -> None:
            if stage not in tasks:
                finish()
                tasks[stage] = bars.add_task(_STAGE_LABELS[stage], total=None, amount="")
            if fraction is not None:
                amount = f"{fraction * DOWNLOAD_BYTES / 1e6:.0f} / {DOWNLOAD_BYTES / 1e6:.0f} MB"
                bars.update(tasks[stage], total=1.0, completed=fraction, amount=amount)

        yield report
        finish()


def main() -> int:
    """Run the command line and return its exit code; whatever goes wrong is told in one message on stderr."""
    try:
        app()
    except SystemExit as ended:  # how typer ends every command
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        if code == _INTERRUPTED:
            typer.echo("interrupted", err=True)
        return code
    except KeyboardInterrupt:
        typer.echo("interrupted", err=True)
        return _INTERRUPTED
    except Exception as error:  # a traceback is for those who ask for it
        if os.environ.get("WEFT_DEBUG"):
            traceback.print_exc()
        message = str(error)
        if not isinstance(error, WeftError):
            detail = " ".join(message.split())
            message = f"{type(error).__name__}: {detail} (set WEFT_DEBUG=1 for the traceback)"
        typer.echo(f"error: {message}", err=True)
        return 1
    return 0
