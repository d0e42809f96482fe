"""Journals of schedulers, which `weft replay` plays again: those of simulated lives come out again to the letter."""

from __future__ import annotations

import gzip
import json
import logging
import os
import random
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from scheduler_harness import SchedulerHarness
from typer.testing import CliRunner

from weft.commands.cli import app
from weft.core.errors import JournalError
from weft.engine.scheduler import WeftScheduler, journal
from weft.testing.replay import Replayed, replay

# The modules under test import vLLM, but start no engine.
pytestmark = [pytest.mark.engine, pytest.mark.simulated]


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Replicas die all the time."""
    caplog.set_level("CRITICAL", "weft")
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)
    for each in opened:
        each.close()
    opened.clear()


def lived(seeds: range, folder: Path) -> list[Path]:
    """Live lives. Returns the journals of all replicas."""
    from simulated_life import Life

    for seed in seeds:
        life = Life(seed, journal=folder / str(seed))
        assert life.run() == [], f"seed {seed}"
        for process in life.launcher.processes:
            process.scheduler._journal.close()
    return sorted(folder.glob("*/*.journal.gz"))


def played(harness: SchedulerHarness, folder: Path) -> Path:
    """Three calls of two programs on a scheduler with a journal, which is returned."""
    for number in range(3):
        harness.add(f"c{number}", prompt=[*range(40)], max_tokens=20, program_id=f"p{number % 2}")
    harness.step()
    harness.add("late", prompt=[*range(10)], max_tokens=2, program_id="p2")
    harness.run()
    (path,) = folder.glob("*.journal.gz")
    return path


opened: list[journal.SchedulerJournal] = []


def text_of(path: Path) -> str:
    """The lines of a journal whose scheduler may go on."""
    return zlib.decompressobj(wbits=31).decompress(path.read_bytes()).decode()


def harness_of(folder: Path, journals: Path, policy: str = "atlas", **options: Any) -> SchedulerHarness:
    folder.mkdir(exist_ok=True)
    settings = {"name": policy, "journal": str(journals)}
    harness = SchedulerHarness(folder, settings, slots=1, prefix_caching=True, **options)
    opened.append(cast("journal.JournaledScheduler", harness.scheduler)._journal)
    return harness


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """A journal with preemptions."""
    return played(harness_of(tmp_path / "model", tmp_path / "journals"), tmp_path / "journals")


# -- what comes out again


def test_journals_of_a_few_lives_come_out_again(tmp_path: Path) -> None:
    """Replicas die, hang and are reset in them, share host memory and lose copies."""
    found = [replay(path) for path in lived(range(10), tmp_path)]
    assert len(found) > 15
    assert sum(each.steps for each in found) > 1_000
    assert sum(each.preemptions for each in found) > 0


@pytest.mark.slow
def test_journals_of_many_lives_come_out_again(tmp_path: Path) -> None:
    """The same, with all policies and host memory of every size."""
    assert sum(replay(path).preemptions for path in lived(range(100, 180), tmp_path)) > 10


def test_a_journal_counts_what_it_has(written: Path) -> None:
    """Its steps, its calls and how often one was preempted."""
    found = replay(written)
    assert found.calls == 4
    assert found.steps > 60
    assert found.preemptions > 0
    assert found.ends == "the process ended, or goes on"


def test_a_command_plays_journals(written: Path) -> None:
    """It says what they had, and fails for a file that is none."""
    shown = CliRunner().invoke(app, ["replay", str(written), str(written)])
    assert shown.exit_code == 0, shown.output
    assert shown.output.count("4 calls") == 2
    failed = CliRunner().invoke(app, ["replay", str(Path(__file__))])
    assert isinstance(failed.exception, JournalError)


def test_prompts_are_not_in_a_journal(tmp_path: Path) -> None:
    """Nor are answers; programs have their names."""
    harness = harness_of(tmp_path / "model", tmp_path / "journals")
    harness.add("c", prompt=[123456789] * 40, max_tokens=5, program_id="p", program_name="planner", weft_note="letter")
    harness.run()
    (path,) = (tmp_path / "journals").glob("*.journal.gz")
    text = text_of(path)
    assert "planner" in text
    assert [word for word in ("123456789", "letter", *map(str, harness.tokens["c"])) if f"{word}" in text] == []
    assert path.stat().st_mode & 0o77 == 0


# -- what does not come out again


def test_another_decision_is_found(written: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A scheduler that preempts nobody for a waiting call differs at the first preemption, and the error says where."""
    monkeypatch.setattr(WeftScheduler, "_can_start", lambda *_: False)
    with pytest.raises(JournalError, match=r"after \d+ steps: schedule differs first: then \["):
        replay(written)


def changed(path: Path, name: str, change: Callable[[list[Any]], object]) -> None:
    """Change the second line of a name."""
    lines = [json.loads(line) for line in text_of(path).splitlines()]
    change([line for line in lines if line[0] == name][1])
    path.write_bytes(gzip.compress("".join(json.dumps(line) + "\n" for line in lines).encode()))


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("schedule", lambda line: line[3].append("c9"), "schedule differs first"),
        ("schedule", lambda line: line[1].clear(), "more is read than then"),
        ("schedule", lambda line: line[1].append(1.0), "schedule differs first"),
        ("update_from_output", lambda line: line[3].extend(["c0", "c1", "c2"]), "differs first"),
        ("update_from_output", lambda line: line.__setitem__(2, 7), "cannot be played: IndexError"),
        ("add_request", lambda line: line[2].pop("max_tokens"), "cannot be played: KeyError"),
        ("add_request", lambda line: line.__setitem__(0, "surprise"), "nothing is called 'surprise'"),
    ],
)
def test_a_changed_line_is_found(written: Path, name: str, change: Callable[[list[Any]], object], message: str) -> None:
    """Whatever it says otherwise."""
    changed(written, name, change)
    with pytest.raises(JournalError, match=message):
        replay(written)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "file has no step to replay: it has no line. Give a file of weft serve --journal"),
        (b"a letter\n", "line 1, after 0 steps: this begins no journal; give a file of weft serve --journal"),
        (b"\xff\xfe\n", "is not UTF-8 text"),
        (b'["head",{"version":2}]\n', "no journal of version 1 begins with"),
        (b'["head",{"version":1}]\n', "no scheduler can be made of it: KeyError"),
        (b'{"program": "p"}\n', "this begins no journal"),
        (b'["end","this engine is of a kind"]\n', "has no step to replay: this engine is of a kind"),
    ],
)
def test_a_file_that_is_no_journal_is_refused(content: bytes, message: str, tmp_path: Path) -> None:
    """The message says which line, and what was expected."""
    path = tmp_path / "file"
    path.write_bytes(gzip.compress(content))
    with pytest.raises(JournalError, match=message):
        replay(path)


def test_a_file_that_is_not_compressed_is_refused(tmp_path: Path) -> None:
    """With what gzip says."""
    path = tmp_path / "file"
    path.write_bytes(b'["head",{"version":1}]\n')
    with pytest.raises(JournalError, match="cannot be read: Not a gzipped file"):
        replay(path)


def test_a_file_that_is_cut_before_its_first_line_is_refused(tmp_path: Path) -> None:
    """A process may die at once."""
    path = tmp_path / "file"
    for content in b"", gzip.compress(b"")[:10]:
        path.write_bytes(content)
        with pytest.raises(JournalError, match="file has no step to replay: it has no line"):
            replay(path)


def test_a_file_with_a_wrong_byte_is_refused(written: Path) -> None:
    """The error is ours, whatever the byte does to the stream or to the line that it is in."""
    content = written.read_bytes()
    rng = random.Random(5)
    for _ in range(20):
        place = rng.randrange(200, len(content) - 5)
        written.write_bytes(content[:place] + bytes([content[place] ^ 255]) + content[place + 1 :])
        with pytest.raises(JournalError):
            replay(written)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    """With what the system says."""
    with pytest.raises(JournalError, match="No such file"):
        replay(tmp_path / "none")


def test_two_journals_in_one_file_are_refused(written: Path) -> None:
    """The second one's head is no line of the first."""
    written.write_bytes(gzip.compress(text_of(written).encode() * 2))
    with pytest.raises(JournalError, match="this is no line of a journal, or begins another one"):
        replay(written)


def test_a_cut_journal_is_played_up_to_there(written: Path) -> None:
    """A process that dies leaves a file without its end."""
    whole = replay(written)
    content = written.read_bytes()
    written.write_bytes(content[: len(content) // 2])
    found = replay(written)
    assert 0 < found.steps < whole.steps
    assert found.ends == "the process ended, or goes on"


# -- bounds


def test_a_full_journal_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls go on, and what is there comes out again."""
    monkeypatch.setattr(journal, "MOST_BYTES", 2_500)
    harness = harness_of(tmp_path / "model", tmp_path / "journals")
    path = played(harness, tmp_path / "journals")
    assert sorted(harness.finished) == ["c0", "c1", "c2", "late"]
    assert 2_500 < path.stat().st_size < 2_800
    found = replay(path)
    assert found.steps > 10
    assert found.ends == "the journal is full"


def test_a_folder_has_the_newest_journals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of processes that ended long ago make way, and other files stay."""
    monkeypatch.setattr(journal, "MOST_FILES", 3)
    for number in range(5):
        (tmp_path / f"2025010{number}T000000-00000000.journal.gz").touch()
    (tmp_path / "letter").touch()
    opened.append(journal.SchedulerJournal(tmp_path))
    assert sorted(each.name for each in tmp_path.iterdir()) == [
        "20250103T000000-00000000.journal.gz",
        "20250104T000000-00000000.journal.gz",
        opened[0].path.name,
        "letter",
    ]


def test_a_full_disk_ends_the_journal_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scheduler goes on without it."""
    stand_in = SimpleNamespace(**vars(os))
    stand_in.fdopen = lambda number, *_, **__: os.fdopen(os.dup2(os.open("/dev/full", os.O_WRONLY), number), "wb")
    monkeypatch.setattr(journal, "os", stand_in)
    harness = harness_of(tmp_path / "model", tmp_path / "journals")
    assert played(harness, tmp_path / "journals").stat().st_size == 0
    assert sorted(harness.finished) == ["c0", "c1", "c2", "late"]


def test_old_numbers_of_blocks_are_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that were used last have theirs still, and no number is given twice."""
    monkeypatch.setattr(journal, "_MOST_BLOCKS", 8)
    opened.append(journal.SchedulerJournal(tmp_path))
    blocks = opened[0].blocks
    keys = [bytes([number]) for number in range(20)]
    assert blocks(keys[:6]) == [[1, 6]]
    assert blocks([keys[0], keys[6], keys[7], keys[8]]) == [[1, 1], [7, 3]]  # the two that come next are forgotten
    assert blocks([keys[0], keys[1], keys[3]]) == [[1, 1], [10, 1], [4, 1]]


def test_a_call_that_a_journal_does_not_hold_ends_it(tmp_path: Path) -> None:
    """Here with an adapter. It runs like others, and what came before it comes out again."""
    harness = harness_of(tmp_path / "model", tmp_path / "journals", enable_lora=True)
    harness.add("plain", max_tokens=3)
    harness.run()
    harness.add("adapted", max_tokens=3, adapter="a")
    harness.run()
    assert harness.finished == ["plain", "adapted"]
    (path,) = (tmp_path / "journals").glob("*.journal.gz")
    found = replay(path)
    assert found == Replayed(found.steps, 1, 0, "request adapted is of a kind that journals do not hold")
