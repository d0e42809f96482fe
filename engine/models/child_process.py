"""Commands in child processes whose output goes to a log file."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

_POLL_S: Final = 0.1


def run_command(command: list[str], *, log: Path, environment: Mapping[str, str], poll: Callable[[], None]) -> int:
    """Run a command and wait for its end. The command is killed if an exception, such as Ctrl-C, ends the wait. Returns
    the exit code, or -n if signal n ended the command.

    Args:
        environment: variables in addition to those of this process.
        poll: called several times a second while the command runs.
    """
    with (
        log.open("wb") as output,
        subprocess.Popen(  # noqa: S603  there is no shell, and Weft makes every argument
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment},
        ) as process,
    ):
        try:
            while True:
                poll()
                try:
                    return process.wait(_POLL_S)
                except subprocess.TimeoutExpired:
                    continue
        except BaseException:  # the user's Ctrl-C, or an error in `poll`
            process.kill()
            raise


def last_lines(log: Path, count: int) -> str:
    """The last `count` lines of a log that are not empty, indented."""
    text = log.read_text(encoding="utf-8", errors="replace")
    lines = [line.strip() for line in text.splitlines() if line.strip()] or ["(it printed nothing)"]
    return "\n".join(f"  {line}" for line in lines[-count:])
