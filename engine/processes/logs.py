"""The files that engines' processes write their output to, and what is read from them after a failed start."""

from __future__ import annotations

import logging
import os
import re
import stat
import tempfile
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final

import platformdirs

from weft.core.errors import EngineStartError

START_MARK: Final = "--- "  # begins the line that each start of a replica writes into its log
KEPT: Final = 20
_LOGS: Final = "*-*-*-*.log"
_OWN: Final = "weft-log-"  # begins the name of a temporary folder for one log
_TAIL_BYTES: Final = 1 << 18
_CAUSE_LINES: Final = 4
# What vLLM writes in front of each line: the process, and perhaps level, time and place.
_PREFIX: Final = re.compile(r"^\(\S+ pid=\d+\) (?:[A-Z]+ \d\d-\d\d \d\d:\d\d:\d\d \[[^\]]*\] ?)?")
_ERROR: Final = re.compile(r"^(?:\w+\.)*\w*(?:Error|Exception)\b: \S")
# vLLM's errors about the error of another process, which is in the log, too.
_FOLLOWS: Final = re.compile(
    "Engine core initialization failed|Worker failed with error|initialization failed due to an exception in a backg"
)


class EngineLog:
    """The file that an engine's processes write to, and that gets this process's records of vLLM until it is closed.

    It is in the user's folder for logs, where old files are removed. The newest 20 are kept, and those of processes
    that still run. The records also reach the host's own handlers, if it has any.

    Attributes:
        path: The file. Its name has the time, the number of this process, and the engine's name.
    """

    def __init__(self, engine_id: str) -> None:
        self.path = new_log(engine_id)
        self._handler = logging.FileHandler(self.path)
        line = "(%(processName)s pid=%(process)d) %(levelname)s %(asctime)s [%(name)s:%(lineno)d] %(message)s"
        self._handler.setFormatter(logging.Formatter(line, "%m-%d %H:%M:%S"))
        logging.getLogger("vllm").addHandler(self._handler)

    def close(self, *, is_named: bool = False) -> None:
        """Leave vLLM's logger and close the file. It is removed if it is empty, or has a temporary folder of its own.

        Args:
            is_named: Whether an error names the file, which then stays unless it is empty.
        """
        logging.getLogger("vllm").removeHandler(self._handler)
        self._handler.close()
        with suppress(OSError):  # another process has removed it
            if not self.path.stat().st_size or (self.path.parent.name.startswith(_OWN) and not is_named):
                remove_log(self.path)


def new_log(engine_id: str) -> Path:
    """A new, empty file for the output of an engine's processes. Old ones are removed. Raises EngineStartError if
    there is no folder that it can be in."""
    folder = platformdirs.user_log_path("weft")
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}-{engine_id}.log"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).touch(mode=0o600)
    except OSError:  # the home folder is missing or read-only
        try:
            folder = _temporary_folder()
            (folder / name).touch(mode=0o600)
        except OSError as error:
            raise EngineStartError(
                f"no log can be written, neither in {platformdirs.user_log_path('weft')} nor in "
                f"{tempfile.gettempdir()}: {error.strerror or error}. Make room there, or name folders that this user "
                "may write to in XDG_STATE_HOME or TMPDIR."
            ) from error
    _remove_old(folder.glob(_LOGS))
    return folder / name


def _temporary_folder() -> Path:
    """A folder that only this user can write to. Everybody can guess the usual one's name, and may have made it."""
    parent = Path(tempfile.gettempdir())
    folder = parent / f"weft-{os.getuid()}"
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    if _is_private(folder):
        return folder
    _remove_old(log for own in parent.glob(f"{_OWN}*") if _is_private(own) for log in own.glob(_LOGS))
    return Path(tempfile.mkdtemp(prefix=_OWN))


def _is_private(folder: Path) -> bool:
    found = folder.lstat()  # not of what a link leads to
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077


def _remove_old(logs: Iterable[Path]) -> None:
    for log in sorted(logs, key=lambda log: log.name)[:-KEPT]:
        if not _is_running(log.name.split("-")[2]):
            remove_log(log)


def remove_log(log: Path) -> None:
    """Remove a log, and its folder if that was made for this log alone."""
    with suppress(OSError):  # another process has removed it
        log.unlink()
        if log.parent.name.startswith(_OWN):
            log.parent.rmdir()


def _is_running(pid: str) -> bool:
    try:
        os.kill(int(pid), 0)
    except PermissionError:
        return True
    except (OSError, ValueError, OverflowError):
        return False
    return True


def last_line(log: Path) -> str:
    """The last line of a log without vLLM's prefix; empty if there is none."""
    lines = [line for line in _lines(log) if line]
    return lines[-1] if lines else ""


def cause(log: Path) -> str:
    """The error in a log that made a start fail, in a few lines; empty if there is none.

    Each process of an engine logs its own error, and the processes above it log that this one has failed.
    """
    lines = _lines(log)
    begin = max((at for at, line in enumerate(lines) if line.startswith(START_MARK)), default=0)
    lines = lines[begin:]
    found = [at for at, line in enumerate(lines) if _ERROR.match(line)]
    first = [at for at in found if not _FOLLOWS.search(lines[at])]
    if not found:
        return ""
    at = (first or found)[-1]
    end = next((end for end in range(at + 1, len(lines)) if not lines[end].strip() or _starts(lines[end])), len(lines))
    return "\n".join(lines[at : min(end, at + _CAUSE_LINES)])


def _starts(line: str) -> bool:
    """Whether a line, without its prefix, is not a further line of the error above it."""
    return line.startswith(("Traceback (", "[", "Process ", "File "))


def _lines(log: Path) -> list[str]:
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    return [_PREFIX.sub("", line) for line in re.split(r"[\r\n]+", text)]
