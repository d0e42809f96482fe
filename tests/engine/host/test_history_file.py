"""The history file: it survives restarts and crashes, and what cannot be used is set aside."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import fuzz_history
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from weft.core.errors import HistoryError
from weft.core.ids import CallId, ProgramId, ThreadId
from weft.core.policies.history import History, ProgramEnd
from weft.core.prediction import Cost
from weft.core.process_rows import CallIdentity
from weft.engine.host.learning import HistoryFile

ENDS = [ProgramEnd(None, "chat", 100 + number, is_known=True) for number in range(5)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "weft-history.json"


def test_the_next_start_begins_with_what_was_saved(path: Path) -> None:
    """The programs of two engines, one after the other, are in one file, and nothing else is left in the folder."""
    for number in range(2):
        file = HistoryFile(path)
        file.add("model", ENDS)
        file.save()
        assert History.from_json(path.read_bytes())["model"].all.ended == 5 * (number + 1)
    assert list(path.parent.iterdir()) == [path]


def test_links_in_the_folder_of_a_history_are_not_followed(path: Path) -> None:
    """Others may write into that folder, and must not make an engine write into a file of its user."""
    victim = path.parent / "victim"
    victim.write_text("precious")
    for name in (f"{path.name}.{os.getpid()}.new", f"{path.name}.new"):
        (path.parent / name).symlink_to(victim)
    names = set(path.parent.iterdir())
    file = HistoryFile(path)
    file.add("model", ENDS)
    file.save()
    assert victim.read_text() == "precious"
    assert set(path.parent.iterdir()) - names == {path}
    assert path.stat().st_mode & 0o077 == 0


def test_the_new_file_has_a_name_that_nobody_can_guess(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It differs from one save to the next."""
    names = list[str]()
    replace = Path.replace
    monkeypatch.setattr(Path, "replace", lambda self, target: names.append(self.name) or replace(self, target))
    for number in range(3):
        file = HistoryFile(path)
        file.add("model", ENDS[number:])
        file.save()
    assert len(set(names)) == len(names) >= 4
    assert all(re.fullmatch(r"weft-history\.json\.\w{8}\.new", name) for name in names)


@pytest.mark.parametrize(
    ("content", "reason"),
    [(b"\xff\x00", "it is not JSON"), (b'{"format": "weft-history", "version": 2}', "its version is 2, and this Weft")],
    ids=["damaged", "newer"],
)
def test_a_file_that_cannot_be_used_is_set_aside_with_one_warning(
    path: Path, content: bytes, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The engine starts without a history. The old file keeps its content under another name."""
    path.write_bytes(content)
    HistoryFile(path)
    HistoryFile(path)
    (warning,) = caplog.records
    assert warning.levelname == "WARNING"
    assert reason in warning.getMessage()
    (aside,) = (each for each in path.parent.iterdir() if each != path)
    assert str(aside) in warning.getMessage()
    assert aside.read_bytes() == content
    assert History.from_json(path.read_bytes()).models == []


def test_a_huge_file_is_not_read(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A file of more than 64 MiB is no history of this version, whatever it holds."""
    with path.open("wb") as file:
        file.truncate((1 << 26) + 1)
    HistoryFile(path)
    assert "more than 67108864 bytes" in caplog.text


def test_a_folder_that_cannot_be_used_is_an_error_before_the_engine_starts(tmp_path: Path) -> None:
    """A folder that does not exist, and one in the place of the file: the error says what to name instead."""
    for path in (tmp_path / "missing" / "h.json", tmp_path):
        with pytest.raises(HistoryError, match=r"cannot be kept: .+\. Name a file in a folder that this user may read"):
            HistoryFile(path)


def test_a_save_that_fails_is_made_up_for_by_the_next(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A full disk does not end an engine: one warning, the old file stays, and the programs are saved later."""
    file = HistoryFile(path)
    file.add("model", ENDS)
    moved = path.parent.rename(path.parent.with_name("elsewhere"))
    file.save()
    file.save()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert History.from_json((moved / path.name).read_bytes()).models == []
    moved.rename(path.parent)
    file.save()
    assert History.from_json(path.read_bytes())["model"].all.ended == 5


def test_execution_graphs_are_in_the_file_after_the_next_save(path: Path) -> None:
    """A program that has ended is saved without any report of work, and the next start begins with its graph."""
    file = HistoryFile(path)
    identity = CallIdentity(ProgramId("p"), ThreadId("t"), CallId("c"))
    file.graphs.arrive("chat", identity, now_s=0.0)
    file.graphs.leave(identity.program_id, identity.call_id, Cost(1.0, 9, 3), 1.0)
    file.graphs.end(identity.program_id)
    file.save()
    saved = path.stat().st_mtime_ns
    file.save()
    assert path.stat().st_mtime_ns == saved, "nothing has changed"
    (row,) = HistoryFile(path).graphs.rows()
    assert (row.name, row.ended, row.calls) == ("chat", 1, 1.0)


@given(changes=st.binary(max_size=40))
@example(changes=b"")
@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_damaged_file_is_set_aside_and_the_engine_starts(tmp_path: Path, changes: bytes) -> None:
    """Odd values at any place of a good file. The next start finds a file that can be used."""
    path = tmp_path / "h.json"
    path.write_bytes(fuzz_history.changed(changes))
    HistoryFile(path).save()
    History.from_json(path.read_bytes())


@pytest.mark.parametrize("number", [f"1{'0' * 400}", "1e400", "NaN", f"1{'0' * 5000}"])
def test_a_number_that_no_float_holds_is_set_aside(path: Path, number: str, caplog: pytest.LogCaptureFixture) -> None:
    """One warning, and the engine starts."""
    good = json.dumps(fuzz_history.good())
    path.write_text(re.sub(r'"weight": [^,]+', f'"weight": {number}', good))
    HistoryFile(path)
    HistoryFile(path)
    (warning,) = caplog.records
    assert "a history of programs cannot be used" in warning.getMessage()
