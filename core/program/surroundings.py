"""Where the caller's code runs: in which run of which program, as frameworks tell.

A program is always passed by the user. A framework tells only the place in it, for handles that are used inside a run:
it knows which run encloses the code that it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from weft.core.program.reports import Reports


class Position(NamedTuple):
    """A run of a program."""

    program: Reports
    run: Hashable


_surroundings: dict[str, Callable[[], Iterable[Position]]] = {}  # by framework


def register_surroundings(framework: str, surroundings: Callable[[], Iterable[Position]]) -> None:
    """Register how a framework tells the run in which the caller's code runs.

    Args:
        framework: the framework's name, e.g. "langchain".
        surroundings: returns the run, once for each program that the framework carries there.
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
