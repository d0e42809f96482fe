"""The `weft` command: its subcommands, and the form in which it reports errors.

Commands import vLLM, torch and frameworks inside their functions, so that `weft --help` stays quick.
"""

from __future__ import annotations

import os
import traceback
from typing import Annotated

import typer

from weft import __version__
from weft.commands.bench import bench
from weft.commands.demo import demo, model_app
from weft.commands.doctor import doctor
from weft.commands.graph import graph
from weft.commands.record import record, replay
from weft.commands.serve import CONTEXT, serve
from weft.commands.shared import HELP_NAMES, Command, CommandGroup
from weft.commands.simulate.advise import advise
from weft.commands.simulate.profile import profile
from weft.commands.simulate.sim import sim
from weft.commands.top import top
from weft.commands.trace import trace_app
from weft.core.errors import UnknownOptionError, WeftError

app = typer.Typer(
    name="weft",
    cls=CommandGroup,
    context_settings=HELP_NAMES,
    no_args_is_help=True,
    add_completion=False,
    help="Program-aware LLM serving for LangChain and AutoGen agents on stock vLLM.",
)

_USAGE = 2  # the exit code that typer gives for other mistakes in a command line
_INTERRUPTED = 130  # the exit code that a shell reports for a command ended by Ctrl-C


def _print_version(requested: bool) -> None:
    if requested:
        typer.echo(f"weft {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", "-V", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


for _command in (demo, graph, sim, advise, profile, bench, record, replay, doctor):  # in the order of `weft --help`
    app.command(cls=Command)(_command)
app.command(cls=Command, context_settings=CONTEXT, options_metavar="[MODEL] [OPTIONS] [OPTIONS OF vllm serve]")(serve)
app.command(cls=Command)(top)
app.add_typer(trace_app, name="trace")
app.add_typer(model_app, name="model")


def main() -> int:
    """Run the command line and return its exit code. Every error is reported in one message on standard error."""
    try:
        app()
    except SystemExit as ended:  # typer ends every command with SystemExit
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        if code == _INTERRUPTED:
            typer.echo("interrupted", err=True)
        return code
    except KeyboardInterrupt:
        typer.echo("interrupted", err=True)
        return _INTERRUPTED
    except Exception as error:
        if os.environ.get("WEFT_DEBUG"):
            traceback.print_exc()
        message = str(error)
        if not isinstance(error, WeftError):
            detail = " ".join(message.split())
            message = f"{type(error).__name__}: {detail} (set WEFT_DEBUG=1 for the traceback)"
        typer.echo(f"error: {message}", err=True)
        return _USAGE if isinstance(error, UnknownOptionError) else 1
    return 0
