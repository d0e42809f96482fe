"""The folder of an engine's sockets: who can read it, how long its path is, and when it is removed."""

from __future__ import annotations

import fcntl
import os
import socket
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from weft.engine.processes.launch import Launch
from weft.engine.processes.run_folder import VARIABLE, RunFolder

OTHER = """
import sys
from weft.engine.processes.run_folder import RunFolder
folder = RunFolder()
print(folder.path, flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The temporary folder of this process, and of those that it starts. The path of pytest's own is too long."""
    monkeypatch.delenv(VARIABLE, raising=False)
    with TemporaryDirectory(prefix="weft-test-", dir="/tmp") as folder:
        monkeypatch.setenv("TMPDIR", folder)
        monkeypatch.setattr("tempfile.tempdir", folder)
        yield Path(folder)


def other() -> tuple[subprocess.Popen[str], Path]:
    """Another process, and its folder."""
    process = subprocess.Popen([sys.executable, "-c", OTHER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


def test_the_folder_is_private_and_removed_with_what_is_in_it(temporary: Path) -> None:
    """vLLM leaves the files of its sockets. A second call changes nothing."""
    folder = RunFolder()
    assert folder.path.parent == temporary
    assert folder.path.stat().st_mode & 0o777 == 0o700
    (folder.path / "left").touch()
    folder.remove()
    folder.remove()
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize("length", [30, 52, 53, 100])
def test_a_socket_fits_however_long_the_path_of_the_temporary_folder_is(
    length: int, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A path of more than 107 bytes is refused by the system, and vLLM would not start."""
    parent = temporary / ("x" * (length - len(str(temporary)) - 1))
    parent.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(parent))
    folder = RunFolder()
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(folder.path / str(uuid.uuid4())))
    assert (folder.path.parent == parent) is (length <= 52)
    folder.remove()


def test_a_folder_that_the_user_has_named_is_used(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM has a variable for it. A process that was started during another's launch inherits that of the launch,
    which will be gone."""
    named = temporary / "named"
    named.mkdir()
    monkeypatch.setenv(VARIABLE, str(named))
    folder = RunFolder()
    monkeypatch.setenv(VARIABLE, str(folder.path))
    next_to_it = RunFolder()
    assert folder.path.parent == next_to_it.path.parent == named
    folder.remove()
    next_to_it.remove()


def test_the_folder_of_a_process_that_was_killed_is_removed_by_the_next_engine(temporary: Path) -> None:
    """Nobody else would. That of a process that runs stays, also that of an engine of this process."""
    own = RunFolder()
    killed, left = other()
    running, used = other()
    try:
        (left / "socket").touch()
        end(killed)
        assert left.exists()
        RunFolder().remove()
        assert set(temporary.iterdir()) == {own.path, used}
    finally:
        end(running)
        own.remove()
    RunFolder().remove()
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize("moment", ["before it is open", "before it is locked"])
def test_another_engine_that_starts_at_the_same_time_may_remove_a_new_folder(
    temporary: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """It takes the folder for one that was left, because it is not locked yet. Then there is a second one."""
    made, locked = [], []
    make, lock = tempfile.mkdtemp, fcntl.flock

    def make_folder(*args: Any, **kwargs: Any) -> str:
        made.append(make(*args, **kwargs))
        if moment == "before it is open" and len(made) == 1:
            Path(made[0]).rmdir()
        return made[-1]

    def lock_folder(file: int, how: int) -> None:
        locked.append(how)
        if moment == "before it is locked" and len(locked) == 1:
            Path(made[0]).rmdir()
        lock(file, how)

    monkeypatch.setattr("tempfile.mkdtemp", make_folder)
    monkeypatch.setattr("fcntl.flock", lock_folder)
    folder = RunFolder()
    assert (len(made), folder.path) == (2, Path(made[1]))
    assert list(temporary.iterdir()) == [folder.path]
    folder.remove()
    assert list(temporary.iterdir()) == []


def test_what_is_no_folder_of_this_user_stays(temporary: Path) -> None:
    """Anybody may put a file, or a link to somebody's folder, into the temporary folder under such a name."""
    elsewhere = temporary / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "kept").touch()
    (temporary / "weft-run-link").symlink_to(elsewhere)
    (temporary / "weft-run-file").touch()
    RunFolder().remove()
    assert sorted(each.name for each in temporary.iterdir()) == ["elsewhere", "weft-run-file", "weft-run-link"]
    assert (elsewhere / "kept").exists()


@pytest.mark.parametrize("how", ["fails", "is abandoned", "ends"])
def test_a_launch_leaves_nothing_in_the_temporary_folder(how: str, temporary: Path) -> None:
    """Its processes get the folder by vLLM's variable, and only they: the host's other children do not."""
    launch, before = Launch(), os.environ.get(VARIABLE)

    def construct(_config: object) -> str:
        folder = Path(os.environ[VARIABLE])
        assert folder.parent == temporary
        (folder / "socket").touch()
        if how == "fails":
            raise RuntimeError("the engine core ended")
        return "engine"

    if how == "fails":
        with pytest.raises(RuntimeError, match="the engine core ended"):
            launch.run(lambda: None, construct)
    else:
        assert launch.run(lambda: None, construct) == "engine"
        assert os.environ.get(VARIABLE) == before
        assert len(list(temporary.iterdir())) == 1
        launch.abandon() if how == "is abandoned" else launch.tree().end()
    assert list(temporary.iterdir()) == []
