"""The writer of a trace: no caller waits for the file, and the file is a valid trace whatever fails."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from weft.core.errors import TraceError
from weft.core.log import get_logger
from weft.core.sim import TraceCall, TraceProgram
from weft.core.trace import recorder as writer_module
from weft.core.trace.format import dump, read
from weft.core.trace.recorder import Recorder, TraceWriter


def program(name: str) -> TraceProgram:
    return TraceProgram(name, (TraceCall("c", (), 4, 20),))


def put(writer: TraceWriter, *names: str) -> None:
    for name in names:
        writer.put(lambda name=name: dump(program(name)), 1)  # type: ignore[misc]


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock of a file, as another process would."""
    path.touch()
    file = os.open(path, os.O_RDWR)
    fcntl.flock(file, fcntl.LOCK_EX)
    try:
        yield
    finally:
        os.close(file)


def names(path: Path) -> list[str]:
    return [each.program for each in read(path)] if path.exists() and path.stat().st_size else []


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "trace.jsonl"


def test_nobody_waits_while_another_process_holds_the_lock(path: Path) -> None:
    """A program's end returns at once, also on an event loop; the line is written when the lock is free."""
    writer = TraceWriter(path)
    with locked(path):
        put(writer, "A", "B")
        assert names(path) == []
    assert writer.flush()
    assert names(path) == ["A", "B"]


def test_a_lock_that_is_never_released_ends_the_recording(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The wait for the last lines is bounded, and one warning says how many programs are missing."""
    writer = TraceWriter(path)
    with locked(path):
        put(writer, "A", "B")
        assert not writer.flush(0.05)
        put(writer, "C")
        assert writer.flush()
    [message] = [record.getMessage() for record in caplog.records]
    assert "another process holds the lock" in message
    assert "missing=2" in message
    assert names(path) == []


@pytest.mark.parametrize("bound", ["MOST_WAITING", "MOST_WAITING_CALLS"])
def test_programs_beyond_a_full_queue_are_counted(
    bound: str, path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """They are not recorded, with one warning. Programs that end later are recorded again."""
    monkeypatch.setattr(writer_module, bound, 3)
    writer = TraceWriter(path)
    started = threading.Event()
    with locked(path):
        writer.put(lambda: started.set() or dump(program("first")), 1)  # type: ignore[func-returns-value]
        started.wait(30)  # the thread has taken it off the queue
        put(writer, *"ABCDE")
        assert writer.dropped == 2
    assert writer.flush()
    put(writer, "F")
    assert writer.flush()
    assert names(path) == ["first", *"ABC", "F"]
    assert len(caplog.records) == 1


def broken(operation: str, number: int) -> Callable[..., Any]:
    """Return an operation that fails the `number`-th time: with an error, or after it has written a part."""
    module = fcntl if operation == "flock" else os
    real, count = getattr(module, operation.removesuffix(" in part")), 0

    def call(*arguments: Any) -> Any:
        nonlocal count
        count += 1
        if operation == "write in part" and count in (number, number + 1):
            if count == number:
                return real(arguments[0], arguments[1][:7])
            raise OSError(errno.ENOSPC, "No space left on device")
        if count == number and operation != "write in part":
            raise OSError(errno.EIO, "Input/output error")
        return real(*arguments)

    return call


@pytest.mark.parametrize("number", [1, 2, 4])
@pytest.mark.parametrize("operation", ["open", "flock", "fstat", "write", "write in part"])
def test_the_file_stays_a_trace_when_any_operation_fails(
    operation: str, number: int, path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The n-th open, lock, look or write fails, or writes half a line: the programs before it are in the file, the
    recording stops with one warning, and nothing is raised."""
    writer = TraceWriter(path)
    name = operation.removesuffix(" in part")
    monkeypatch.setattr(writer_module.fcntl if name == "flock" else writer_module.os, name, broken(operation, number))
    put(writer, *"ABCDE")
    assert writer.flush()
    put(writer, "F")
    assert writer.flush()
    monkeypatch.undo()
    assert names(path) == list("ABCDE")[: number - 1]
    [message] = [record.getMessage() for record in caplog.records]
    assert "recording stopped" in message


def test_an_interrupted_write_is_continued(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A write that took only a part of a line is no failure while the rest can be written."""
    real = os.write
    monkeypatch.setattr(writer_module.os, "write", lambda file, data: real(file, data[:5]))
    writer = TraceWriter(path)
    put(writer, "A", "B")
    assert writer.flush()
    monkeypatch.undo()
    assert names(path) == ["A", "B"]


def test_a_line_that_cannot_be_made_stops_the_recording(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """An error in a record is a warning too, and a line of None is none."""
    writer = TraceWriter(path)
    put(writer, "A")
    writer.put(lambda: None, 1)
    writer.put(lambda: str(1 / 0), 1)
    assert writer.flush()
    put(writer, "B")
    assert writer.flush()
    assert names(path) == ["A"]
    assert "division by zero" in caplog.text


def test_a_removed_file_is_made_again(path: Path) -> None:
    """Programs that end after a user removed the file are in a new one."""
    writer = TraceWriter(path)
    put(writer, "A")
    assert writer.flush()
    path.unlink()
    put(writer, "B")
    assert writer.flush()
    assert names(path) == ["B"]


def test_a_removed_folder_stops_the_recording(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """There is one warning, and programs go on."""
    folder = tmp_path / "folder"
    folder.mkdir()
    writer = TraceWriter(folder / "trace.jsonl")
    shutil.rmtree(folder)
    put(writer, "A", "B")
    assert writer.flush()
    assert writer.stopped
    assert len(caplog.records) == 1


class BrokenHandler(logging.Handler):
    """A handler whose stream is on a full disk."""

    def emit(self, record: logging.LogRecord) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_log_that_cannot_be_written_fails_nothing(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A handler of the host that raises is reported on stderr, as the standard library does for its own handlers. The
    caller of the logger, and the writer that warns, go on."""
    handler = BrokenHandler()
    logger = logging.getLogger("weft")
    logger.addHandler(handler)
    try:
        get_logger().warning("hello")
        writer = TraceWriter(path.parent / "no" / "trace.jsonl")
        put(writer, "A")
        assert writer.flush()
        assert writer.stopped
    finally:
        logger.removeHandler(handler)
    assert "No space left on device" in capsys.readouterr().err


def test_a_file_that_stays_locked_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine does not wait for ever to start recording."""
    monkeypatch.setattr("weft.core.trace.recorder.FLUSH_S", 0.05)
    with locked(path), pytest.raises(TraceError, match="another process holds its lock"):
        Recorder(path)


SCRIPT = """
import sys
from weft.core.trace import recorder
recorder.FLUSH_S = float(sys.argv[2])
made = recorder.TraceWriter(__import__("pathlib").Path(sys.argv[1]))
made.put(lambda: sys.argv[3], 1)
"""


@pytest.mark.parametrize("is_locked", [False, True])
def test_the_end_of_the_interpreter_writes_what_waits(is_locked: bool, path: Path) -> None:
    """A script that ends at once has its programs in the file; if the file stays locked, the script ends anyway."""
    arguments = [str(path), "0.1" if is_locked else "60", dump(program("A"))]
    path.touch()

    def run() -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", SCRIPT, *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)

    if is_locked:
        with locked(path):
            assert "recording stopped" in run().stderr
        assert names(path) == []
    else:
        run()
        assert names(path) == ["A"]


def test_a_forked_process_does_not_wait_for_the_writer(path: Path) -> None:
    """The thread is in the parent, which writes what waits. The child writes nothing, and its end waits for nothing."""
    writer = TraceWriter(path)
    with locked(path):
        put(writer, "A")
        child = os.fork()
        if not child:
            put(writer, "in the child")
            os._exit(not writer.flush())
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert writer.flush()
    assert names(path) == ["A"]
