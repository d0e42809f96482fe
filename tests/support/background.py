"""Runs the commands that tests are about in the background, from the start of the session.

Most tests use one core only, so the commands run next to the other tests.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import psutil
from threads import ONE_THREAD

ROOT = Path(__file__).parents[2]
TINY = "TINY"  # as an argument: the folder of the tiny model
Argument = str | Path | Callable[[Path], Path]

PRIORITY = 19  # the lowest


def is_background(process: psutil.Process) -> bool:
    """Whether a process belongs to a background command, also to one of another run of the tests, such as the other
    process of `make test-slow`. A test that counts processes must leave it out."""
    try:
        return process.nice() == PRIORITY
    except psutil.NoSuchProcess:
        return False


def script(source: str) -> Callable[[Path], Path]:
    """An argument that stands for a file with this source in the command's folder."""

    def write(folder: Path) -> Path:
        path = folder / "script.py"
        path.write_text(source)
        return path

    return write


class CommandResult(NamedTuple):
    """The result of a command that has ended."""

    exit_code: int
    stdout: str
    stderr: str
    folder: Path  # the command's working directory

    def printed(self) -> str:
        """Return the standard output, and fail if the command failed or printed a traceback."""
        assert self.exit_code == 0, self.stderr[-4000:]
        assert "Traceback" not in self.stderr
        return self.stdout


class BackgroundCommands:
    """Runs `python *arguments` commands, two at a time and at the lowest priority.

    All commands have the environment variables of the session's start. A test that runs at the same time may change
    this process's variables for a moment.

    Args:
        make_folder: Makes an empty working directory.
        tiny_model: Gives the folder of the tiny model.
    """

    def __init__(self, make_folder: Callable[[], Path], tiny_model: Callable[[], Path]) -> None:
        self._make_folder = make_folder
        self._tiny_model = tiny_model
        # The first compilation takes a minute or more.
        self._environment = {**os.environ, **ONE_THREAD, "TORCH_COMPILE_DISABLE": "1"}
        self._pool = ThreadPoolExecutor(2)
        self._results: dict[tuple[Argument, ...], Future[CommandResult]] = {}
        self._processes: list[subprocess.Popen[str]] = []

    def start(self, arguments: tuple[Argument, ...]) -> None:
        """Queue a command. A command that several tests are about runs once."""
        if arguments not in self._results:
            folder = self._make_folder()
            command = [self._resolve(argument, folder) for argument in arguments]
            self._results[arguments] = self._pool.submit(self._run, command, folder)

    def wait(self, arguments: tuple[Argument, ...]) -> CommandResult:
        """Wait for the end of a command that was started."""
        return self._results[arguments].result()

    def stop(self) -> None:
        """Terminate the commands that still run."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        for process in self._processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
        self._pool.shutdown()

    def _resolve(self, argument: Argument, folder: Path) -> str:
        if callable(argument):
            return str(argument(folder))
        return str(self._tiny_model()) if argument == TINY else str(argument)

    def _run(self, command: Sequence[str], folder: Path) -> CommandResult:
        with subprocess.Popen(
            ["nice", "-n", str(PRIORITY), sys.executable, *command],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env=self._environment,
        ) as process:
            self._processes.append(process)
            stdout, stderr = process.communicate()
        return CommandResult(process.returncode, stdout, stderr, folder)
