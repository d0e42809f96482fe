"""Which calls came before which, and the threads that calls form."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import NamedTuple

from weft.core.ids import CallId, ThreadId

Calls = tuple[CallId, ...]


class _CallRecord(NamedTuple):
    number: int  # calls are numbered from 0 in the order in which they begin
    ancestors: int  # a set of calls
    parents: Calls
    thread_id: ThreadId
    previous: CallId | None  # the call before this one in its thread


class Ancestry:
    """The ancestors and threads of one program's calls. A thread is a chain of calls, each a parent of the next.

    A set of calls is an integer with the bits of the calls' numbers. Old calls that are not in use are forgotten. Not
    thread-safe: the program holds its lock.

    Args:
        new_thread: makes a thread id.
        keep: how many of the newest calls are never forgotten.
    """

    def __init__(self, new_thread: Callable[[], ThreadId], keep: int = 1000) -> None:
        self._new_thread = new_thread
        self._keep = keep
        self._limit = 2 * keep  # the number of calls at which to forget, so that forgetting is cheap on average
        self._count = 0
        self._calls: dict[CallId, _CallRecord] = {}  # the oldest first
        self._last_calls: dict[ThreadId, CallId] = {}
        self._released: dict[Calls, list[ThreadId]] = {}  # threads that failed calls had begun, by the calls' parents
        self.finished = 0  # the set of calls that have a result

    def add(self, call_id: CallId, parents: Calls, preferred: Collection[CallId] = ()) -> ThreadId:
        """Add a call that begins, and return its thread.

        Args:
            call_id: the call.
            parents: its parents, the oldest first.
            preferred: the parents whose threads the call should continue rather than those of other parents.
        """
        thread_id, previous = self._choose_thread(sorted(parents, key=lambda call: call not in preferred), parents)
        self._calls[call_id] = _CallRecord(self._count, self.with_ancestors(parents), parents, thread_id, previous)
        self._last_calls[thread_id] = call_id
        self._count += 1
        return thread_id

    def _choose_thread(self, candidates: Iterable[CallId], parents: Calls) -> tuple[ThreadId, CallId | None]:
        for call_id in candidates:
            thread_id = self._calls[call_id].thread_id
            if self._last_calls.get(thread_id) == call_id:
                return thread_id, call_id
        released = self._released.get(parents)
        return (released.pop() if released else self._new_thread()), None

    def finish(self, call_id: CallId) -> None:
        """Note that a call has a result."""
        self.finished |= 1 << self._calls[call_id].number

    def release_thread(self, call_id: CallId) -> None:
        """Remove a failed call from its thread, so that the next attempt can continue the thread."""
        call = self._calls[call_id]
        if call.previous is not None:
            self._last_calls[call.thread_id] = call.previous
        else:
            del self._last_calls[call.thread_id]
            self._released.setdefault(call.parents, []).append(call.thread_id)

    def has_finished(self, call_id: CallId) -> bool:
        """Whether a call has a result and is not forgotten."""
        return call_id in self._calls and self.contains(self.finished, call_id)

    def ancestors(self, calls: Iterable[CallId]) -> int:
        """Return the set of all ancestors of some calls."""
        found = 0
        for call_id in calls:
            found |= self._calls[call_id].ancestors
        return found

    def with_ancestors(self, calls: Iterable[CallId]) -> int:
        """Return the set of some calls and all their ancestors."""
        found = 0
        for call_id in calls:
            call = self._calls[call_id]
            found |= call.ancestors | 1 << call.number
        return found

    def contains(self, calls: int, call_id: CallId) -> bool:
        """Whether a set of calls contains a call."""
        return bool(calls >> self._calls[call_id].number & 1)

    def in_order(self, calls: Iterable[CallId]) -> Calls:
        """Return some calls, the oldest first."""
        return tuple(sorted(calls, key=lambda call_id: self._calls[call_id].number))

    def forget(self, in_use: Callable[[], Collection[CallId]]) -> None:
        """Forget old calls, once there are many of them.

        Args:
            in_use: returns the old calls to keep. It is called only if calls are forgotten.
        """
        if len(self._calls) > self._limit:
            kept = {*list(self._calls)[-self._keep :], *in_use()}
            self._calls = {call_id: call for call_id, call in self._calls.items() if call_id in kept}
            self._limit = 2 * max(self._keep, len(self._calls))
