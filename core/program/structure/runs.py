"""The runs of a program: of frameworks, and of its own code."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple

from weft.core.ids import CallId
from weft.core.program.structure.parents import Frontier

if TYPE_CHECKING:
    from weft.core.program.reports import Reports


class RunKind(Enum):
    """How a run was started. This decides which calls the run comes after, and which calls come after the run."""

    # User code started the run. The code may run other things at the same time and need not wait for them.
    CODE = "code"
    # The run is a step of a sequence. It comes after the steps before it, even if it was opened before they ended: a
    # sequence that streams opens all its steps at once.
    STEP = "step"
    # A framework started the run. It comes after all stages before it, and later stages wait for it.
    STAGE = "stage"
    # User code opened the run as a branch. What begins after its end comes after it, as far as the code uses branches
    # only: runs that overlap with it may be strands that do not wait for it.
    BRANCH = "branch"


@dataclass(eq=False, slots=True)
class Run:
    """A run, as the tree of runs keeps it."""

    key: Hashable
    parent: Run | None
    kind: RunKind
    entry: Frontier | None = None  # None until the first call inside determines it
    frontier: Frontier | None = None  # None: the same as the entry
    is_open: bool = True
    is_calling: bool = False  # a call has begun inside
    calling_children: int = 0  # open runs directly inside in which a call has begun
    calling_branches: int = 0  # those of them that are branches
    follows_guesses: bool = False  # a call inside comes after guesses of the enclosing runs
    tool: str | None = None
    tools: dict[Hashable, None] = field(default_factory=dict)  # the open runs directly inside that are tools
    is_implicit: bool = False  # the framework did not report it; it ends with its last call
    stage: Hashable = None  # the latest stage among the runs inside
    stage_entry: Frontier | None = None  # the entry of all runs of that stage
    task: Hashable = None  # what the run does, if a framework may do it again
    task_around: RunningTask | None = None  # the task of the event loop in which it began, if it runs code
    attempts: dict[Hashable, Frontier] = field(default_factory=dict)  # by task of the stage: the last attempt's end
    doubt: Run | None = None  # the run may be anywhere inside that one
    calls: set[CallId] = field(default_factory=set)  # the calls in flight that the run itself has made


@dataclass(slots=True)
class _Open:
    thread: Hashable  # that began the first of the runs
    runs: set[Hashable] = field(default_factory=set)


class CodeRuns:
    """Tells whether a run that names no enclosing run may nevertheless be inside an open one.

    A framework names the enclosing run to the code that it runs. Code that goes on in a thread of its own loses the
    name. A run that begins in another thread than the open runs of its handle, and of the branches inside, may be
    inside each of them, or next to them.
    """

    def __init__(self) -> None:
        self._by_handle: dict[Hashable, _Open] = {}
        self._handles: dict[Hashable, tuple[Hashable, ...]] = {}  # by run

    def __iter__(self) -> Iterator[Hashable]:
        return iter(self._handles)

    def start(self, run: Hashable, handles: tuple[Hashable, ...], thread: Hashable) -> None:
        """A run begins that may run code of the user's.

        `handles` are the anchors of the handle that reports it and of the handles around that one.
        """
        handles = tuple(dict.fromkeys(self._handles.get(run, ()) + handles))  # several handles may report it
        for handle in handles:
            self._by_handle.setdefault(handle, _Open(thread)).runs.add(run)
        self._handles[run] = handles

    def end(self, run: Hashable) -> None:
        """A run has ended. Unknown runs are ignored."""
        for handle in self._handles.pop(run, ()):
            found = self._by_handle[handle]
            found.runs.discard(run)
            if not found.runs:
                del self._by_handle[handle]

    def may_enclose(self, handle: Hashable, thread: Hashable) -> bool:
        """Whether a run that begins in this thread, and names no enclosing run, may be inside an open run."""
        found = self._by_handle.get(handle)
        return found is not None and found.thread != thread


# -- where code runs: the task, and the runs of frameworks around it


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
