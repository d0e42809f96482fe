"""`weft record`: run a command and record the programs of its engines. `weft replay`: play journals again."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer
from rich.console import Console

from weft.core.errors import WeftError
from weft.core.trace.recorder import VARIABLE, prepare
from weft.engine.vllm_compat.versions.version import check_vllm


def record(
    out: Annotated[Path, typer.Argument(help="The trace file to write. An existing trace is appended to.")],
    command: Annotated[list[str], typer.Argument(metavar="-- COMMAND", help="The command to run.")],
) -> None:
    """Run a command, such as `-- python my_agent.py`, and record the programs on its engines as a trace."""
    out = out.absolute()
    before = prepare(out)
    code = _run(command, {**os.environ, VARIABLE: str(out)})
    programs = prepare(out) - before
    if programs:
        typer.echo(f"recorded {programs} program{'s'[: programs > 1]}; see: weft sim {shlex.quote(str(out))}", err=True)
    else:
        typer.echo("recorded no program: none got a token from a weft.Engine that this command started", err=True)
    raise typer.Exit(code)


def replay(
    journal: Annotated[list[Path], typer.Argument(help="A journal, or several, of `weft serve --journal`.")],
) -> None:
    """Play journals of schedulers again, without a model, and compare what is decided with what was decided then."""
    check_vllm()
    with Console(stderr=True).status("starting vLLM's scheduler, which takes some seconds"):
        from weft.testing.replay import replay as play
    for path in journal:
        found = play(path)
        counts = f"{found.steps} steps, {found.calls} calls, {found.preemptions} preemptions"
        typer.echo(f"{path}: {counts}, decided as then; it ends there: {found.ends}")


def _run(command: list[str], environment: dict[str, str]) -> int:
    """Run a command and wait for its end. Returns its exit code, or 128 and the signal's number if a signal ended
    it, as in a shell. Raises WeftError if the command cannot be started."""
    child: subprocess.Popen[bytes] | None = None

    def pass_on(number: int, _frame: FrameType | None) -> None:
        # A terminal sends Ctrl-C to the child as well, which needs it once. Other signals reach this process alone.
        if child is not None and number != signal.SIGINT:
            child.send_signal(number)

    # The handlers are functions because a child would inherit SIG_IGN.
    handlers = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        child = subprocess.Popen(command, env=environment)  # noqa: S603  the user's own command
        code = child.wait()
    except OSError as error:
        raise WeftError(f"{command[0]} cannot be started: {error.strerror or error}. Name a command to run.") from None
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return code if code >= 0 else 128 - code
