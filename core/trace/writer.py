"""Appends lines to a trace file on a thread of its own, so that no caller waits for the disk or for the file's lock."""

from __future__ import annotations

import atexit
import errno
import fcntl
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from weft.core.errors import TraceError
from weft.core.locks import fork_safe
from weft.core.log import get_logger
from weft.core.trace.format import read

MOST_WAITING: Final = 1000  # programs that may wait to be written
MOST_WAITING_CALLS: Final = 50_000  # calls of these programs
FLUSH_S: Final = 5.0  # the longest wait at the end of an engine or of the interpreter
_POLL_S: Final = 0.02  # between attempts to lock a file that another process has locked


class TraceWriter:
    """Writes lines in the order in which they were given. Any thread may use a writer, and no method raises.

    After an error there is one warning, and nothing more is written. A line is written whole or not at all.

    Attributes:
        stopped: whether nothing more is written.
        dropped: how many programs were not written because too many waited.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._changed = threading.Condition(fork_safe(threading.RLock()))
        self._waiting: deque[tuple[Callable[[], str | None], int]] = deque()
        self._calls = 0  # calls of the programs that wait
        self._is_writing = False
        self._gives_up = threading.Event()
        self.stopped = False
        self.dropped = 0
        _writers.add(self)

    def put(self, line: Callable[[], str | None], calls: int) -> None:
        """Write a line soon, unless too many wait.

        Args:
            line: makes the line on the writer's thread. It returns None if there is nothing to write.
        """
        with self._changed:
            if self.stopped:
                return
            if len(self._waiting) >= MOST_WAITING or (self._waiting and self._calls + calls > MOST_WAITING_CALLS):
                self.dropped += 1
                if self.dropped == 1:
                    self._warn("programs end faster than their records can be written; some are not recorded")
                return
            self._waiting.append((line, calls))
            self._calls += calls
            if self._is_writing:
                return
            self._is_writing = True
        try:
            threading.Thread(target=self._write_all, name="weft-trace-writer", daemon=True).start()
        except RuntimeError:  # the interpreter is ending
            self._write_all()

    def flush(self, timeout_s: float = FLUSH_S) -> bool:
        """Wait until all lines are written.

        Args:
            timeout_s: the longest wait, in seconds. Lines that are not written by then are dropped with a warning.

        Returns whether nothing waits any more.
        """
        with self._changed:
            done = self._changed.wait_for(lambda: not self._is_writing, timeout_s)
            missing = len(self._waiting) + (not done)
            if done:
                return True
            self._waiting.clear()
            self._calls = 0
            self.stopped = True
        self._gives_up.set()
        self._warn(
            "recording stopped; another process holds the lock of the file, or the disk is slow", missing=missing
        )
        return False

    def abandon(self) -> None:
        """Write nothing more. For a forked child, because the writer's thread is in the parent process."""
        self.stopped, self._is_writing = True, False
        self._waiting.clear()

    def _write_all(self) -> None:
        while True:
            with self._changed:
                if not self._waiting:
                    self._is_writing = False
                    self._changed.notify_all()
                    return
                line, calls = self._waiting.popleft()
                self._calls -= calls
            try:
                text = line()
                if text is not None:
                    append(self._path, text, self._gives_up)
            except Exception as error:
                with self._changed:
                    is_first, self.stopped = not self.stopped, True
                    self._waiting.clear()
                    self._calls = 0
                if is_first:
                    self._warn(
                        "recording stopped; the programs recorded so far can be used, later ones are not recorded",
                        reason=str(error),
                    )

    def _warn(self, message: str, **values: object) -> None:
        with suppress(Exception):  # a log that cannot be written must not end the writer's thread
            get_logger().warning(message, path=str(self._path), **values)


_writers: weakref.WeakSet[TraceWriter] = weakref.WeakSet()


@atexit.register
def _flush_all() -> None:
    """Wait for all writers when the interpreter ends, `FLUSH_S` at most."""
    end_s = time.monotonic() + FLUSH_S
    for writer in list(_writers):
        writer.flush(max(0.0, end_s - time.monotonic()))


def _stop_all() -> None:
    """Stop all writers in a forked child, which has none of their threads."""
    for writer in list(_writers):
        writer.abandon()


os.register_at_fork(after_in_child=_stop_all)


def prepare(path: Path) -> int:
    """Create a trace file, or check that an existing one can be written and is empty or a trace. Returns how many
    programs it has. Raises TraceError if it is none of that, or locked by another process for longer than 5 s."""
    if path.exists() and not path.is_file():
        raise TraceError(f"{path} is not a file; name a trace file to record into, or a new file.")
    try:
        with _locked(path, threading.Event(), FLUSH_S) as file:
            size = os.fstat(file).st_size
            if not size:
                return 0
            programs = len(read(path))
            if os.pread(file, 1, size - 1) != b"\n":  # a file that was edited by hand may lack the last line break
                os.write(file, b"\n")
            return programs
    except OSError as error:
        raise TraceError(f"{path} cannot be recorded into: {error.strerror or error}. Choose another file.") from None


def append(path: Path, line: str, gives_up: threading.Event) -> None:
    """Append a line, without its end, to a file, whole or not at all. When `gives_up` is set, the wait for the
    file's lock ends. Raises OSError if the file cannot be written or locked."""
    data = f"{line}\n".encode()
    with _locked(path, gives_up) as file:
        size = os.fstat(file).st_size
        try:
            written = os.write(file, data)
            while written < len(data):  # the disk is full, or the write was interrupted
                more = os.write(file, data[written:])
                if not more:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                written += more
        except OSError:
            os.ftruncate(file, size)  # half a line would make the file unreadable
            raise


@contextmanager
def _locked(path: Path, gives_up: threading.Event, timeout_s: float | None = None) -> Iterator[int]:
    """Open a file to append to, and lock it against other recorders until it is closed."""
    file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
    end_s = None if timeout_s is None else time.monotonic() + timeout_s
    try:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if gives_up.wait(_POLL_S) or (end_s is not None and time.monotonic() > end_s):
                    raise OSError(errno.EAGAIN, "another process holds its lock") from None
        yield file
    finally:
        os.close(file)
