"""Programs of many calls in several shapes, for `bench_wide_programs.py` and for a test that counts operations.

They run through Weft's bookkeeping as in an engine, without a model: `weft.Program` with the tree of runs, the lineage
and the graph, and the process table. Each call takes a millisecond of a clock that does not run by itself.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

import weft
from weft.core.accounts import Account
from weft.core.ids import EngineId
from weft.core.process_rows import CallIdentity, CallRow
from weft.core.program.graph import CallState
from weft.core.program.structure.lineage import Content
from weft.core.program.structure.runs import RunKind
from weft.testing import RecordingBackend

_ENGINE: Final = EngineId("engine")
_ACCOUNT: Final = Account(service_s=0.001, prompt_tokens=100, output_tokens=10)

Call = tuple[Hashable, CallRow, CallIdentity]


class Bookkeeping:
    """A program, and an engine that has only a process table.

    Args:
        timer: is entered around the bookkeeping of each beginning and each end of a call, with the call's number.
    """

    def __init__(self, timer: Callable[[int], AbstractContextManager[object]] = lambda _number: nullcontext()) -> None:
        self.backend = RecordingBackend()
        self.program = weft.Program("wide")
        self._timer = timer
        self._numbers = itertools.count()

    def begin(self, parent: Hashable | None = None, *, handle: weft.Program | None = None, **run: Any) -> Call:
        """Begin a call in a run of its own inside `parent`, or at the top of a handle."""
        number = next(self._numbers)
        handle = handle or self.program
        inputs = run.pop("inputs", Content())
        with self._timer(number):
            handle.reports.start_run(number, parent, **run)
            identity = handle.reports.start_call(number, inputs)
            handle.reports.bind(self.backend)
            row, _ = self.backend.table.arrive(identity, _ENGINE, self.backend.clock())
            handle.reports.call_arrived(identity.call_id, self.backend.clock())
        return number, row, identity

    def finish(self, call: Call) -> None:
        """End a call with a result."""
        number, row, identity = call
        self.backend.clock.advance(0.001)  # type: ignore[attr-defined]
        with self._timer(number):  # type: ignore[arg-type]
            row.account = _ACCOUNT
            self.backend.table.leave(row, self.backend.clock())
            self.program.reports.call_left(identity.call_id, self.backend.clock(), _ACCOUNT, CallState.FINISHED)
            self.program.reports.end_call(number, identity, Content(ids=(identity.call_id,)))
            self.program.reports.end_run(number)

    def call(self, parent: Hashable | None = None, **run: Any) -> Call:
        """Make a whole call."""
        call = self.begin(parent, **run)
        self.finish(call)
        return call


def parallel(books: Bookkeeping, calls: int) -> None:
    """Calls that are all in flight at once, as branches of the program, and one that joins them."""
    handles = [books.program.branch() for _ in range(calls - 1)]
    begun = [books.begin(handle=handle) for handle in handles]
    for handle, call in zip(handles, begun, strict=True):
        books.finish(call)
        handle.end()
    books.call()


def chain(books: Bookkeeping, calls: int) -> None:
    """Calls one after another on one thread."""
    for _ in range(calls):
        books.call()


def own_threads(books: Bookkeeping, calls: int) -> None:
    """Calls one after another, each on a thread of its own: branches of which one runs at a time."""
    for _ in range(calls):
        books.call(kind=RunKind.STAGE, stage="branches")


def fan_out(books: Bookkeeping, calls: int, width: int = 10) -> None:
    """A call, ten branches at once that each do the same with a part of the calls, and a call that joins them."""

    def part(handle: weft.Program, size: int) -> None:
        books.call(handle=handle)
        if size == 1:
            return
        rest = size - 2
        sizes = [rest // width + (number < rest % width) for number in range(width)]
        branches = [(handle.branch(), each) for each in sizes if each]
        for branch, each in branches:
            part(branch, each)
        for branch, _ in branches:
            branch.end()
        books.call(handle=handle)

    part(books.program, calls)


def agents(books: Bookkeeping, calls: int) -> None:
    """The runs that LangChain reports of agents in a loop: a graph with a model node and a node of two tools, which
    begins again after 20 calls. Inputs name the earlier messages."""
    runs = itertools.count()
    made = 0
    while made < calls:
        agent, messages = ("agent", next(runs)), []
        books.program.reports.start_run(agent, None)
        for step in range(min(20, calls - made)):
            node = ("node", next(runs))
            books.program.reports.start_run(node, agent, RunKind.STAGE, stage=f"graph:step:{2 * step}")
            *_, identity = books.call(node, kind=RunKind.STEP, inputs=Content(ids=tuple(messages)))
            messages.append(identity.call_id)
            books.program.reports.end_run(node)
            books.program.reports.start_run((node, "tools"), agent, RunKind.STAGE, stage=f"graph:step:{2 * step + 1}")
            for tool in ("search", "calculator"):
                books.program.reports.start_run((node, tool), (node, "tools"))
                books.program.reports.note_tool((node, tool), tool)
                books.program.reports.end_run((node, tool))
            books.program.reports.end_run((node, "tools"))
            made += 1
        books.program.reports.end_run(agent)


def strands(books: Bookkeeping, calls: int) -> None:
    """Helpers under one `asyncio.gather`, all at once, of two calls each. Nothing tells which second call comes after
    which first call, so that each comes after all calls that have ended, as guesses."""
    begun = [books.begin() for _ in range(calls // 2)]
    for number, call in enumerate(begun):
        books.finish(call)
        begun[number] = books.begin()
    for call in begun:
        books.finish(call)


SHAPES: Final[dict[str, Callable[[Bookkeeping, int], None]]] = {
    "parallel branches, joined": parallel,
    "a chain on one thread": chain,
    "one after another, own threads": own_threads,
    "nested fan-out": fan_out,
    "LangChain agents": agents,
    "strands of two calls": strands,
}
