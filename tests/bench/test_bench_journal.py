"""The journal of a session: it resumes, and refuses files that it must not write to."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from bench_data import rounds

from weft.bench.results.records import Journal
from weft.bench.settings import BenchSettings
from weft.core.errors import BenchError


def test_the_journal_resumes(tmp_path: Path) -> None:
    """Rounds are read as they were written. An incomplete last line is dropped. Other settings are refused."""
    (replayed,) = rounds(base=[40])
    Journal(tmp_path, {"seed": 0}).add(replayed)
    with (tmp_path / "rounds.jsonl").open("a") as file:
        file.write('{"load": "1", "num')
    journal = Journal(tmp_path, {"seed": 0})
    assert journal.rounds == {("1", 0): replayed}
    journal.add(replace(replayed, number=1))
    assert set(Journal(tmp_path, {"seed": 0}).rounds) == {("1", 0), ("1", 1)}
    with pytest.raises(BenchError, match=r"other settings \(seed: 0 there, 1 now\)\. Choose another --out"):
        Journal(tmp_path, {"seed": 1})


def test_a_long_setting_is_shortened_in_the_error(tmp_path: Path) -> None:
    """Its start is enough to tell a checksum from another, and the cut is shown."""
    Journal(tmp_path, {"source_sha256": "a" * 64})
    with pytest.raises(BenchError, match=r"\(source_sha256: 'a{58}… there, 'b{58}… now\)"):
        Journal(tmp_path, {"source_sha256": "b" * 64})


def test_a_journal_of_an_older_version_is_refused(tmp_path: Path) -> None:
    """Its settings have no format, and its rounds have other keys. The error shows the difference."""
    settings = BenchSettings("chat").to_json()
    older = {key: value for key, value in settings.items() if key != "format"}
    round_ = {"load": "1", "number": 0, "longest_tokens": 100, "cut_calls": 0, "runs": {}}
    path = tmp_path / "rounds.jsonl"
    path.write_text(json.dumps({"settings": older}) + "\n" + json.dumps(round_) + "\n")
    text = path.read_text()
    with pytest.raises(BenchError, match=r"other settings \(format: None there, 4 now\)\. Choose another --out"):
        Journal(tmp_path, settings)
    assert path.read_text() == text


@pytest.mark.parametrize("text", ["no json\n", '{"settings": {}}\n{"load": 1}\n', "[]\n", '{"x": 1}\n'])
def test_a_file_that_is_not_a_journal_is_refused(tmp_path: Path, text: str) -> None:
    """The journal does not write to another file of its name."""
    (tmp_path / "rounds.jsonl").write_text(text)
    with pytest.raises(BenchError, match="is not a journal"):
        Journal(tmp_path, {})
    assert (tmp_path / "rounds.jsonl").read_text() == text


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    """The error names the file, and says to choose another folder."""
    (tmp_path / "file").write_text("")
    with pytest.raises(BenchError, match="Choose another --out"):
        Journal(tmp_path / "file", {})
