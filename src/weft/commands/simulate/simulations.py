"""Simulations of the same programs on several engines, at once on all processor cores."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from weft.commands.progress import Bars
from weft.core.sim.result import SimResult
from weft.core.sim.settings import SimSettings
from weft.core.sim.simulator import simulate
from weft.core.trace.format import TraceProgram

_programs: list[TraceProgram] = []  # of a worker process


def simulate_all(what: str, programs: Sequence[TraceProgram], engines: Sequence[SimSettings]) -> Iterator[SimResult]:
    """Simulate the engines, and yield their results in order, with a bar."""
    workers = min(len(engines), os.cpu_count() or 1)
    with (
        Bars(what, len(engines), "count") as bars,
        ProcessPoolExecutor(workers, mp_context=get_context("spawn"), initializer=_begin, initargs=(programs,)) as pool,
    ):
        for each in pool.map(_simulate, engines):
            bars.advance()
            yield each


def _begin(programs: Sequence[TraceProgram]) -> None:
    _programs.extend(programs)


def _simulate(engine: SimSettings) -> SimResult:
    return simulate(_programs, engine)
