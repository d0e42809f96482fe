"""Where code runs: the task, and the runs of frameworks around it."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from weft.core.program.reports import Reports


class RunningTask(NamedTuple):
    """A task, which this does not keep."""

    reference: weakref.ref[asyncio.Task[Any]]  # of one task there is one, also after the task is gone

    @property
    def is_over(self) -> bool:
        """Whether the task has ended."""
        task = self.reference()
        return task is None or task.done()


def running_task() -> RunningTask | None:
    """Return the task that runs the caller's code, or None outside of an event loop."""
    try:
        task = asyncio.current_task()
    except RuntimeError:
        return None
    return RunningTask(weakref.ref(task)) if task is not None else None


class Position(NamedTuple):
    """A run of a program."""

    program: Reports
    run: Hashable


_surroundings: dict[str, Callable[[], Iterable[Position]]] = {}  # by framework


def register_surroundings(framework: str, surroundings: Callable[[], Iterable[Position]]) -> None:
    """Register how a framework tells the run in which the caller's code runs.

    `surroundings` returns the run, once for each program that the framework carries there.
    """
    _surroundings[framework] = surroundings


def positions() -> Iterator[Position]:
    """Yield the runs in which the caller's code runs, and then those in which the programs of these runs were opened.

    Runs that have ended are left out. They enclose nothing, though a task that outlives a run still names it.
    """
    found = [position for surroundings in tuple(_surroundings.values()) for position in surroundings()]
    while found:
        found = [position for position in found if position.program.has_open(position.run)]
        yield from found
        found = [each.program.opened_in for each in found if each.program.opened_in is not None]


def innermost(found: Iterable[Position]) -> Position | None:
    """Return the position whose program is inside those of the others; None if there is no position."""
    inner = None
    for position in found:
        if inner is None or position.program.is_inside(inner.program):
            inner = position
    return inner
