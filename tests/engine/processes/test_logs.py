"""The files of engines' output: how many there are, what gets into them, and the cause of a failed start."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from weft.core.errors import EngineStartError
from weft.core.ids import EngineId
from weft.engine.processes.logs import EngineLog, cause, last_line
from weft.engine.replicas.launcher import LocalLauncher

# What vLLM wrote when the KV cache did not fit, shortened.
FAILED = """\
(EngineCore pid=12) INFO 11-22 16:04:09 [core.py:133] Initializing a V1 LLM engine (v0.32.0)
(Worker pid=13) ERROR 11-22 16:05:01 [multiproc_executor.py:1060] WorkerProc hit an exception.
(Worker pid=13) ERROR 11-22 16:05:01 [multiproc_executor.py:1060] Traceback (most recent call last):
(Worker pid=13) ERROR 11-22 16:05:01 [multiproc_executor.py:1060]   File "cpu_worker.py", line 240, in determine
(Worker pid=13) ERROR 11-22 16:05:01 [multiproc_executor.py:1060] ValueError: Available memory on node 0 is 8.82 GiB.
(Worker pid=13) ERROR 11-22 16:05:01 [multiproc_executor.py:1060] Decrease --kv-cache-memory-bytes.
(Worker pid=13) ERROR 11-22 16:05:01 [multiproc_executor.py:1060]
(EngineCore pid=12) ERROR 11-22 16:05:02 [core.py:1510] EngineCore failed to start.
(EngineCore pid=12) ERROR 11-22 16:05:02 [core.py:1510] RuntimeError: Worker failed with error 'Available memory'
Process EngineCore:
Traceback (most recent call last):
RuntimeError: Worker failed with error 'Available memory on node 0'
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for logs, in place of the user's."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path / "weft" / "log"


def test_the_cause_of_a_failed_start_is_the_error_of_the_first_process(tmp_path: Path) -> None:
    """The processes above it only log that it has failed."""
    log = tmp_path / "log"
    log.write_text(FAILED)
    assert cause(log) == "ValueError: Available memory on node 0 is 8.82 GiB.\nDecrease --kv-cache-memory-bytes."
    assert last_line(log) == "RuntimeError: Worker failed with error 'Available memory on node 0'"


def test_the_cause_is_that_of_the_latest_start(tmp_path: Path) -> None:
    """A replica appends to its log whenever it starts."""
    log = tmp_path / "log"
    log.write_text(
        f"{FAILED}--- engine-0/1 of tiny starts\n(EngineCore pid=12) INFO 11-22 16:04:09 [core.py:1] Hello\n"
    )
    assert cause(log) == ""
    assert cause(tmp_path / "none") == ""


def test_old_logs_are_removed_but_not_those_of_running_processes(folder: Path) -> None:
    """The newest 20 stay, so that the number of files is bounded."""
    folder.mkdir(parents=True)
    ended = [folder / f"20200101-0000{number:02}-99999999-engine-0.log" for number in range(30)]
    running = folder / f"20190101-000000-{os.getppid()}-engine-0.log"
    for file in (*ended, running):
        file.write_text("said")
    log = EngineLog("engine-7")
    assert set(folder.iterdir()) == {*ended[-19:], running, log.path}
    log.close()


def test_the_records_of_vllm_in_this_process_get_into_the_log(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Without a handler of the host they would be on the terminal. The host's own handlers get them all the same."""
    log = EngineLog("engine-7")
    logging.getLogger("vllm.config").warning("said by vLLM")
    logging.getLogger("weft").warning("said by Weft")
    log.close()
    logging.getLogger("vllm.config").warning("said later")
    assert "said by vLLM" in log.path.read_text()
    assert "said by Weft" not in log.path.read_text()
    assert "said later" not in log.path.read_text()
    assert "said by vLLM" in caplog.text
    assert list(folder.iterdir()) == [log.path]


def test_an_empty_log_is_removed(folder: Path) -> None:
    """A start that was refused before vLLM said anything leaves no file."""
    EngineLog("engine-7").close()
    assert list(folder.iterdir()) == []


def _occupy(kind: str, usual: Path, elsewhere: Path) -> None:
    elsewhere.mkdir()
    if kind == "a link":
        usual.symlink_to(elsewhere)
    elif kind == "a link to nothing":
        usual.symlink_to(elsewhere / "missing")
    elif kind == "a file":
        usual.touch()
    elif kind == "a folder of all":
        usual.mkdir()
        usual.chmod(0o777)


@pytest.mark.parametrize("kind", ["a link", "a link to nothing", "a file", "a folder of all", "nothing"])
def test_a_temporary_folder_that_others_could_write_to_gets_no_log(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a home folder, logs are in the temporary folder. Anybody may have put something in the usual place."""
    (tmp_path / "no-home").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "no-home"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    usual, elsewhere = tmp_path / f"weft-{os.getuid()}", tmp_path / "elsewhere"
    _occupy(kind, usual, elsewhere)
    log = EngineLog("engine-7")
    assert (log.path.parent == usual) is (kind == "nothing")
    assert log.path.parent.lstat().st_mode & 0o777 == 0o700
    assert list(elsewhere.iterdir()) == []
    log.close()
    assert not log.path.exists()
    assert log.path.parent.exists() is (kind == "nothing")


def test_without_any_folder_for_logs_the_error_names_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk, for example. The user does not get Python's error."""
    (tmp_path / "no-home").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "no-home"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "missing"))
    with pytest.raises(EngineStartError, match=r"no log can be written, neither in .+ nor in .+missing: No such file"):
        EngineLog("engine-7")


def test_a_temporary_folder_of_one_log_goes_with_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is kept if an error names the log. The newest 20 that were kept stay, and those of running processes."""
    (tmp_path / "no-home").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "no-home"))
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    (temporary / f"weft-{os.getuid()}").touch()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    kept = []
    for number in range(30):
        folder = temporary / f"weft-log-{number:02}"
        folder.mkdir(mode=0o700)
        kept.append(folder / f"20200101-0000{number:02}-{os.getppid() if not number else 99999999}-engine-0.log")
        kept[-1].write_text("said")
    for is_named in (False, True):
        log = EngineLog("engine-7")
        log.path.write_text("said")
        log.close(is_named=is_named)
        assert log.path.parent.exists() is is_named
    assert [each.exists() for each in kept] == [True, *[False] * 9, *[True] * 20]
    assert [each.parent.exists() for each in kept] == [each.exists() for each in kept]


@pytest.mark.parametrize("has_died", [False, True])
def test_the_logs_of_replicas_are_where_those_of_engines_are(has_died: bool, folder: Path) -> None:
    """They are removed at the end, unless a warning about a dead replica names one. They have no folder elsewhere."""
    launcher = LocalLauncher(EngineId("engine-7"), (), (), lambda *_: None, hang_timeout_s=None)
    logs = [launcher._new_log(EngineId(f"engine-7/{number}")) for number in range(2)]
    assert [log.parent for log in logs] == [folder, folder]
    assert [log.name.split("-", 3)[3] for log in logs] == ["engine-7-0.log", "engine-7-1.log"]
    logs[0].write_text("said")
    launcher.keep_logs = has_died
    launcher.close()
    assert [log.exists() for log in logs] == [has_died, has_died]


def test_of_replicas_that_are_gone_the_last_20_logs_stay(folder: Path) -> None:
    """An engine that runs for days adds and removes many. The logs of those that it has stay, however old they are."""
    launcher = LocalLauncher(EngineId("engine-7"), (), (), lambda *_: None, hang_timeout_s=None)
    logs = [launcher._new_log(EngineId(f"engine-7/{number}")) for number in range(25)]
    for number in range(1, 25):
        launcher.release(EngineId(f"engine-7/{number}"))
    assert [log.exists() for log in logs] == [True, *[False] * 4, *[True] * 20]
    launcher.close()
    assert list(folder.iterdir()) == []
