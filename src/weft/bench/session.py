"""A session of `weft bench`: all rounds of all loads, of which the journal may have some already."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from weft.bench.engines import BaselineEngines
from weft.bench.results.records import Journal
from weft.bench.settings import BenchSettings
from weft.core.trace.format import read


class Progress(Protocol):
    """Shows how far a session is."""

    def begin(self, what: str, total: int, done: int = 0) -> None: ...

    def advance(self) -> None: ...


def replay_missing(
    settings: BenchSettings, journal: Journal, rounds: Sequence[tuple[str, int]], progress: Progress
) -> None:
    """Replay the rounds that the journal does not have yet, and add each of them to it.

    Args:
        rounds: load and number of all rounds, in their order.

    Raises:
        VllmUnavailableError, UnsupportedVllmError, ModelNotFoundError, EngineStartError: the engines cannot start.
    """
    missing = [key for key in rounds if key not in journal.rounds]
    if not missing:
        return
    with tempfile.TemporaryDirectory() as folder:
        progress.begin("starting engines", len(settings.baselines))
        engines = BaselineEngines(settings, Path(folder), progress.advance)
        programs = min(settings.programs, len(read(Path(settings.source)))) if settings.is_file else settings.programs
        ends_per_round = programs * len(settings.baselines)
        progress.begin("replaying", len(rounds) * ends_per_round, (len(rounds) - len(missing)) * ends_per_round)
        for load, number in missing:
            journal.add(engines.replay(load, number, progress.advance))
