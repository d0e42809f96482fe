"""The threads of a program that its clients name, as runs of the program.

A thread forks from the thread that started it, its parent: its first call comes after the parent's calls so far. The
parent's next call comes after all that its threads have done, unless they are still busy. Calls that name no thread are
at the program's top, and so are threads whose parent is not known.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Final

from weft.core.ids import CallId, ThreadId
from weft.core.process_rows import CallIdentity
from weft.core.program.reports import Reports
from weft.core.program.structure.run_tree import ROOT
from weft.core.program.structure.runs import RunKind

MOST_OPEN: Final = 256  # threads of a program; beyond them the longest unused one without a call in flight ends


@dataclass(slots=True)
class _Thread:
    run: Hashable
    parent: ThreadId | None
    calls: set[CallId] = field(default_factory=set)  # in flight


class NamedThreads:
    """The threads that a program's clients name. A program has one, in `Reports.framework_state`, for one OS thread."""

    def __init__(self) -> None:
        self._threads: OrderedDict[ThreadId, _Thread] = OrderedDict()  # the longest unused first
        self._are_named = False  # some of the program's calls name a thread
        self._top: ThreadId | None = None  # of the first call that names none
        self._at_top: set[CallId] = set()  # calls in flight that name none

    def __len__(self) -> int:
        return len(self._threads)

    def start_call(
        self,
        reports: Reports,
        thread_id: ThreadId | None,
        parent_id: ThreadId | None = None,
        *,
        label: str | None = None,
        agent: int = 0,
    ) -> tuple[CallIdentity, list[ThreadId]]:
        """Name a call; `leave` follows. Returns also the threads that end, because the one that started them goes on.
        If others name threads, a call that names none goes on with the program's own. `parent_id` counts with the
        thread's first call. Raises ProgramEndedError if the program has ended."""
        ended = self._end_idle_children(reports, thread_id) if self._threads else []
        if thread_id is None:
            own = self._top if self._are_named and not self._at_top else None
            own = ThreadId(f"{own}.{agent}") if own is not None and agent else own
            identity = reports.start_call(object(), label=label, thread_id=own, agent=agent)
            self._top = self._top or identity.thread_id
            self._at_top.add(identity.call_id)
            return identity, ended
        thread = self._threads.get(thread_id) or self._open(reports, thread_id, parent_id)
        self._threads.move_to_end(thread_id)
        identity = reports.start_call(thread.run, label=label, thread_id=thread_id)
        thread.calls.add(identity.call_id)
        return identity, ended

    def leave(self, identity: CallIdentity) -> None:
        """A call has left, with or without an answer."""
        self._at_top.discard(identity.call_id)
        thread = self._threads.get(identity.thread_id)
        if thread is not None:
            thread.calls.discard(identity.call_id)

    def _open(self, reports: Reports, thread_id: ThreadId, parent_id: ThreadId | None) -> _Thread:
        if len(self._threads) >= MOST_OPEN:
            unused = next((each for each, thread in self._threads.items() if not thread.calls), None)
            if unused is not None:  # otherwise the calls in flight bound their number
                reports.end_run(self._threads.pop(unused).run)
        around = self._threads.get(parent_id) if parent_id is not None else None
        thread = _Thread(object(), parent_id if around is not None else None)
        reports.start_run(thread.run, around.run if around is not None else ROOT, RunKind.BRANCH, runs_code=False)
        self._threads[thread_id] = thread
        self._are_named = True
        return thread

    def _end_idle_children(self, reports: Reports, thread_id: ThreadId | None) -> list[ThreadId]:
        """End the threads that a thread has started, and theirs, because it goes on. Those that are busy stay."""
        children: dict[ThreadId | None, list[ThreadId]] = {}
        busy: set[ThreadId | None] = set()
        for each, thread in self._threads.items():
            known = thread.parent in self._threads  # otherwise the parent was forgotten, and the thread is at the top
            children.setdefault(thread.parent if known else None, []).append(each)
            around: ThreadId | None = each if thread.calls else None
            while around is not None and around in self._threads and around not in busy:
                busy.add(around)
                around = self._threads[around].parent
        ended = [each for each in children.get(thread_id, ()) if each not in busy]
        for each in ended:  # it grows meanwhile
            ended += children.get(each, ())
        for each in reversed(ended):
            reports.end_run(self._threads.pop(each).run)
        return ended
