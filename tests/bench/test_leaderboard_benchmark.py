"""`benchmarks/bench_leaderboard.py`, which is `make results`: what is known is not simulated again, and the page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import bench_leaderboard
import pytest
from bench_leaderboard import FEW, WAVES, Cell, main
from leaderboard_page import BEGIN, END
from leaderboard_settings import SETTINGS, Data

from weft.core.sim.study.leaderboard import rivals

COMMIT = "1234567"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a page. The measured code has no changes that are not committed."""
    monkeypatch.setattr(bench_leaderboard, "measured_commit", lambda: COMMIT)
    (tmp_path / "page.md").write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    return tmp_path


def run(folder: Path) -> None:
    """Simulate one setting."""
    setting = str(next(each for each in SETTINGS if each.source == "tools"))
    main(folder / "data", folder / "out", folder / "page.md", programs=4, seeds=1, few=True, only=setting)


def test_what_is_known_is_not_simulated_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second run at the same commit adds nothing. Of a line that was cut off, the cell is simulated again."""
    run(folder)
    path = folder / "out" / COMMIT / "cells.jsonl"
    lines = path.read_text().splitlines()
    assert len([line for line in lines if line]) == len(FEW)
    played: list[Cell] = []
    simulated = bench_leaderboard._figures

    def counting(cells: Sequence[Cell], jobs: int) -> Iterator[dict[str, float]]:
        played.extend(cells)
        return simulated(cells, jobs)

    monkeypatch.setattr(bench_leaderboard, "_figures", counting)
    run(folder)
    assert not played
    path.write_text("\n".join([*lines[:-1], lines[-1][:20]]))
    run(folder)
    assert [each.rival for each in played] == [FEW[-1]]
    assert path.read_text().splitlines()[-1] == lines[-1]


def test_the_page_keeps_what_was_written_by_hand(folder: Path) -> None:
    """The tables stand between two marks, with losses first. Each section names the commit. A picture lies beside."""
    run(folder)
    text = (folder / "page.md").read_text()
    assert text.startswith(f"before\n{BEGIN}\n\n## Where the default loses\n")
    assert text.endswith(f"{END}\nafter\n")
    assert text.count(f"Made at {COMMIT}.") == text.count("\n## ")
    assert "old" not in text
    assert "all 10 cells" in text
    assert (folder / "page.svg").exists()


def test_every_rival_is_in_the_whole_run() -> None:
    """The waves have each rival once."""
    assert sorted((rival for wave in WAVES for rival in wave), key=str) == sorted(rivals(host=True), key=str)


def test_programs_for_tuning_and_for_reporting_are_apart(tmp_path: Path) -> None:
    """Generated programs have other seeds, and recorded ones are halves: here four rows of Mooncake."""
    (tmp_path / "mooncake").mkdir()
    rows = [f'{{"timestamp": {n}, "input_length": {n + 5}, "output_length": 2, "hash_ids": [{n}]}}' for n in range(4)]
    (tmp_path / "mooncake" / "conversation_trace.jsonl").write_text("\n".join(rows))
    tuning, reporting = (Data(tmp_path, tmp_path / "traces", part) for part in ("tuning", "reporting"))
    assert tuning.programs("tools", 3, 0) != reporting.programs("tools", 3, 0)
    found = [[each.calls[0].prompt_tokens for each in data.programs("mooncake", 9, 0)] for data in (tuning, reporting)]
    assert found == [[5, 6], [7, 8]]
    assert not tuning.has("bfcl")
