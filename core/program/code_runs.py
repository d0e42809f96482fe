"""Open runs that run code of the user's, so that a report without a place may come from inside one of them."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field


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

        Args:
            run: its key.
            handles: the anchors of the handle that reports it and of the handles around that one.
            thread: the thread in which it begins.
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
