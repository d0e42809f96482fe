"""Open runs that run code of the user's, so that a report without a place may come from inside one of them."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field


@dataclass(slots=True)
class _Open:
    thread: int  # that began the first of the runs
    runs: set[Hashable] = field(default_factory=set)


class CodeRuns:
    """Tells whether a run that names no enclosing run may nevertheless be inside an open one.

    A framework names the enclosing run to the code that it runs. Code that goes on in a thread of its own loses the
    name. A run that begins in another thread than the open runs of its handle may be inside each of them, or next to
    them.
    """

    def __init__(self) -> None:
        self._by_handle: dict[Hashable, _Open] = {}
        self._handles: dict[Hashable, Hashable] = {}  # by run

    def start(self, run: Hashable, handle: Hashable, thread: int) -> None:
        """A run begins that may run code of the user's.

        Args:
            run: its key.
            handle: the anchor of the handle that reports it.
            thread: the number of the thread in which it begins.
        """
        found = self._by_handle.setdefault(handle, _Open(thread))
        found.runs.add(run)
        self._handles[run] = handle

    def end(self, run: Hashable) -> None:
        """A run has ended. Unknown runs are ignored."""
        handle = self._handles.pop(run, None)
        if handle is not None:
            found = self._by_handle[handle]
            found.runs.discard(run)
            if not found.runs:
                del self._by_handle[handle]

    def may_enclose(self, handle: Hashable, thread: int) -> bool:
        """Whether a run that begins in this thread, and names no enclosing run, may be inside an open run."""
        found = self._by_handle.get(handle)
        return found is not None and found.thread != thread
