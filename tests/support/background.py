"""Commands that tests are about, run beside the other tests from the session's start: most leave one core idle."""

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

ROOT = Path(__file__).parents[2]
TINY = "TINY"  # as an argument: the folder of the tiny model
Argument = str | Path | Callable[[Path], Path]

_sessions: set[int] = set()  # of all commands, by the operating system's numbers


def is_background(process: psutil.Process) -> bool:
    """Whether it belongs to a command of this module, and not to the test that counts processes."""
    try:
        return os.getsid(process.pid) in _sessions
    except ProcessLookupError:
        return False


def script(source: str) -> Callable[[Path], Path]:
    """As an argument: a file with this source, in the command's folder."""

    def write(folder: Path) -> Path:
        path = folder / "script.py"
        path.write_text(source)
        return path

    return write


class Done(NamedTuple):
    """A command that has been run, and where."""

    exit_code: int
    stdout: str
    stderr: str
    folder: Path

    def printed(self) -> str:
        """What it printed, if all went well."""
        assert self.exit_code == 0, self.stderr[-4000:]
        assert "Traceback" not in self.stderr
        return self.stdout


class Background:
    """Runs `python *arguments`, two at a time, with what is left of the machine by the tests."""

    def __init__(self, make_folder: Callable[[], Path], tiny_model: Callable[[], Path]) -> None:
        self._make_folder = make_folder
        self._tiny_model = tiny_model
        self._pool = ThreadPoolExecutor(2)
        self._runs: dict[tuple[Argument, ...], Future[Done]] = {}
        self._processes: list[subprocess.Popen[str]] = []

    def begin(self, arguments: tuple[Argument, ...]) -> None:
        """Have it run, once, however many tests are about it."""
        if arguments not in self._runs:
            folder = self._make_folder()
            command = [self._word(argument, folder) for argument in arguments]
            self._runs[arguments] = self._pool.submit(self._run, command, folder)

    def done(self, arguments: tuple[Argument, ...]) -> Done:
        """Wait for it."""
        return self._runs[arguments].result()

    def end(self) -> None:
        """Whatever still runs is of no use any more."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        for process in self._processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
        self._pool.shutdown()

    def _word(self, argument: Argument, folder: Path) -> str:
        if callable(argument):
            return str(argument(folder))
        return str(self._tiny_model()) if argument == TINY else str(argument)

    def _run(self, command: Sequence[str], folder: Path) -> Done:
        with subprocess.Popen(
            ["nice", "-n", "19", sys.executable, *command],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, "TORCH_COMPILE_DISABLE": "1"},  # it takes a minute or more the first time
        ) as process:
            _sessions.add(process.pid)
            self._processes.append(process)
            stdout, stderr = process.communicate()
        return Done(process.returncode, stdout, stderr, folder)
