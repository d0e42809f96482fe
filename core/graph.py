"""Which calls a call had to wait for, and which thread it belongs to, inferred from the tree of runs.

Agent frameworks report a tree: a run starts inside a parent run and ends. Weft keeps a *frontier* per run: the calls
that everything started next inside it comes after. A run enters with its parent's frontier; when it ends and contained
a call, its own frontier replaces the entry in the parent's. Siblings that overlap enter with the same frontier, so they
come out as branches; siblings one after another come out as a chain; what follows branches joins them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Final

from weft.core.ids import CallId, ThreadId

Calls = tuple[CallId, ...]

ROOT: Final[Hashable] = "root"


@dataclass(slots=True)
class _Run:
    parent: Hashable
    entry: Calls
    frontier: Calls
    contains_call: bool = False


class RunTree:
    """The tree of runs of one program. Not thread-safe: the program holds its lock.

    Args:
        new_thread: makes a thread id.
    """

    def __init__(self, new_thread: Callable[[], ThreadId]) -> None:
        self._new_thread = new_thread
        self._runs: dict[Hashable, _Run] = {ROOT: _Run(parent=None, entry=(), frontier=())}
        self._tails: dict[CallId, ThreadId] = {}  # the last call of each thread, the oldest call first

    def start(self, run: Hashable, parent: Hashable | None, anchor: Hashable = ROOT) -> None:
        """A run starts inside `parent`; if that was never reported, inside `anchor` (the top, or a branch)."""
        if parent is None or parent not in self._runs:
            parent = anchor if anchor in self._runs else ROOT
        entry = self._runs[parent].frontier
        self._runs[run] = _Run(parent, entry, entry)

    def start_call(self, run: Hashable, call_id: CallId, anchor: Hashable = ROOT) -> tuple[ThreadId, Calls]:
        """The run turns out to be a call.

        Returns:
            Its thread and its parents. It continues the thread of its oldest parent that is still the last call of its
            thread; if there is none, it begins a new thread.
        """
        if run not in self._runs:
            self.start(run, None, anchor)
        parents = self._runs[run].frontier  # its entry, but for a run that makes several calls
        continued = next((tail for tail in self._tails if tail in parents), None)
        thread_id = self._new_thread() if continued is None else self._tails.pop(continued)
        self._tails[call_id] = thread_id
        return thread_id, parents

    def end_call(self, run: Hashable, call_id: CallId) -> None:
        """The call gave its result: what follows comes after it. A call that never does, as before a retry, leaves
        what follows where it stood."""
        node = self._runs.get(run)
        if node is not None:
            node.frontier = (call_id,)
            node.contains_call = True

    def end(self, run: Hashable) -> None:
        """A run ends, well or not. Unknown runs are ignored."""
        node = self._runs.pop(run, None)
        if node is None or not node.contains_call:
            return
        parent = self._runs.get(node.parent) or self._runs[ROOT]
        kept = tuple(call for call in parent.frontier if call not in node.entry)
        parent.frontier = kept + tuple(call for call in node.frontier if call not in kept)
        parent.contains_call = True
