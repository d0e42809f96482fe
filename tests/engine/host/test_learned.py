"""What schedulers learn reaches the process table and the history; schedulers that the test answers for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from polling import until

from weft.core.class_rows import Branch, ClassRow
from weft.core.errors import EngineDiedError
from weft.core.policies.history import History, ProgramEnd
from weft.core.process_table import ProcessTable
from weft.engine.host import learning as learned
from weft.engine.host.learning import HistoryFile, LearnedReports
from weft.engine.processes.loop_thread import LoopThread
from weft.engine.wire.reports import LearnedReport, encode_answer

pytestmark = pytest.mark.anyio


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> Iterator[LoopThread]:
    monkeypatch.setattr(learned, "_ASK_EVERY_S", 0.0)
    monkeypatch.setattr(learned, "_SAVE_EVERY_S", 0.0)
    loop = LoopThread("test")
    yield loop
    loop.stop()


class Replicas:
    """Two replicas, and a third that does not run."""

    def __init__(self) -> None:
        self.ends: list[list[ProgramEnd]] = [[], []]
        self.history: list[str | None] = [None, None]  # that they were sent first
        self.has_died = False

    async def send(self, message: Mapping[str, Any]) -> list[Any]:
        if self.has_died:
            raise EngineDiedError
        if message["type"] == "use_history":
            self.history = [had or message["history"] for had in self.history]
            return [{}, {}, None]
        answers = [
            encode_answer(
                LearnedReport("m", (row(number + 1),), tuple(self.ends[number]), self.history[number] is not None)
            )
            for number in range(2)
        ]
        self.ends = [[], []]
        return [*answers, None]


def row(ended: int) -> ClassRow:
    return ClassRow(None, "chat", ended, 1, 10.0 * ended, 20.0, Branch.INDEX)


def end(work: int) -> ProgramEnd:
    return ProgramEnd(None, "chat", work, is_known=True)


def saved(path: Path) -> list[int]:
    return sorted(History.from_json(path.read_bytes())["m"].all.finished)


async def test_the_table_shows_the_classes_of_all_replicas(loop: LoopThread) -> None:
    """A call that arrives is enough to ask."""
    replicas, table = Replicas(), ProcessTable()
    reports = LearnedReports(loop, replicas.send, table, None)
    assert table.classes == ()
    reports._asks.add(None)
    await until(lambda: table.classes)
    assert table.classes == [ClassRow(None, "chat", 3, 2, 20.0, 20.0, Branch.INDEX)]


async def test_the_history_has_the_programs_of_all_replicas(loop: LoopThread, tmp_path: Path) -> None:
    """It is saved while the engine runs, so that a crash loses little, and again at its shutdown."""
    path = tmp_path / "history.json"
    replicas, file = Replicas(), HistoryFile(path)
    file.save_on(loop)
    reports = LearnedReports(loop, replicas.send, ProcessTable(), file)
    replicas.ends = [[end(5)], [end(7), end(9)]]
    reports._asks.add(None)
    await until(lambda: saved(path) == [5, 7, 9])
    replicas.ends = [[], [end(11)]]
    reports.close()
    assert saved(path) == [5, 7, 9, 11]


async def test_a_replica_that_starts_gets_what_all_have_seen(loop: LoopThread, tmp_path: Path) -> None:
    """At the start of the engine, and after the replica died; the others keep what they have."""
    first = HistoryFile(tmp_path / "history.json")
    first.add("m", [end(5)])
    replicas = Replicas()
    reports = LearnedReports(loop, replicas.send, ProcessTable(), first)
    reports.begin()
    await until(lambda: all(replicas.history))
    replicas.ends, replicas.history[0] = [[], [end(7)]], None
    reports._asks.add(None)
    await until(lambda: replicas.history[0])
    texts = [History.from_json(text or "")["m"].all.finished for text in replicas.history]
    assert list(map(list, texts)) == [[5, 7], [5]]


async def test_an_engine_that_has_died_leaves_what_is_known(loop: LoopThread, tmp_path: Path) -> None:
    """Its last answer is missing; the shutdown raises nothing."""
    path = tmp_path / "history.json"
    file, replicas = HistoryFile(path), Replicas()
    file.add("m", [end(5)])
    replicas.has_died = True
    reports = LearnedReports(loop, replicas.send, ProcessTable(), file)
    reports.begin()
    reports._asks.add(None)
    reports.close()
    assert saved(path) == [5]
