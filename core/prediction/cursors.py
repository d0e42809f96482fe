"""Where a running program is in the execution graph of its name: a cursor for each thread."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from weft.core.ids import CallId, CallIdentity, ThreadId
from weft.core.prediction.execution_graph import Cost, ExecutionGraph, Node

MOST_CALLS: Final = 512  # calls of a program that are in flight, or may still become parents
_MOST_PARENTS: Final = 64  # parents of a call that are counted: the newest


@dataclass(slots=True, eq=False)
class Cursor:
    """A call that no other call follows yet: it runs, or its thread is between two calls."""

    call_id: CallId
    thread_id: ThreadId
    node: Node
    calls_before: int  # on the longest chain that leads to it
    parents: tuple[Cursor, ...]  # empty once it has finished
    pause_s: float  # from the end of its last parent to its arrival
    is_running: bool = True
    is_followed: bool = False  # a call that follows it has finished
    following: int = 0  # calls in flight that follow it
    left_s: float = 0.0  # when it finished


class ProgramCursors:
    """The cursors of one program, and the counts of what it did.

    If a call fails, or is cancelled, its parents get their cursors back. If a program has more than 512 calls, the
    oldest can no longer be parents, and threads that stopped at them count as ended.
    """

    def __init__(self) -> None:
        self._calls: OrderedDict[CallId, Cursor] = OrderedDict()  # the oldest first
        self._open: dict[CallId, Cursor] = {}
        self._counts = ExecutionGraph()

    def arrive(self, identity: CallIdentity, label: str, tools: Iterable[str], now_s: float) -> None:
        """A call begins. The cursors of its parents move to it. A call that began before changes nothing.

        Args:
            identity: The call. Parents that are not known are left out.
            tools: The tools that ran between its parents and the call.
        """
        call_id, parents = identity.call_id, identity.parents[-_MOST_PARENTS:]
        if call_id in self._calls:
            return
        before, depth, left_s = [], 0, -math.inf
        for parent in parents:
            each = self._calls.get(parent)
            if each is not None and not each.is_running:
                before.append(each)
                each.following += 1
                depth, left_s = max(depth, each.calls_before + 1), max(left_s, each.left_s)
        pause_s = max(0.0, now_s - left_s) if before else 0.0
        cursor = Cursor(call_id, identity.thread_id, Node.of(label, tools, depth), depth, tuple(before), pause_s)
        self._calls[call_id] = cursor
        self._open[call_id] = cursor
        for each in before:
            self._place(each)
        if len(self._calls) > MOST_CALLS:
            self._forget(next(iter(self._calls)))

    def leave(self, call_id: CallId, cost: Cost | None, now_s: float) -> None:
        """A call ends. An unknown call changes nothing.

        Args:
            cost: What it cost, without its pause. None: it has no result, so nothing follows it.
        """
        cursor = self._calls.get(call_id)
        if cursor is None or not cursor.is_running:
            return
        parents, cursor.parents = cursor.parents, ()
        for each in parents:
            each.following -= 1
        if cost is None:
            del self._calls[call_id], self._open[call_id]
            for each in parents:
                self._place(each)
            return
        cursor.is_running, cursor.left_s = False, now_s
        last = [each for each in parents if each.calls_before == cursor.calls_before - 1]  # on its longest chains
        before = [(each.node, not each.is_followed, (each in last) / len(last)) for each in parents]
        cursor.node = self._counts.visit(cursor.node, before, cost._replace(pause_s=cursor.pause_s))
        for each in parents:
            each.is_followed = True

    def finish(self) -> ExecutionGraph:
        """End the program, and return its counts. Calls in flight do not count."""
        for call_id in [call_id for call_id, each in self._calls.items() if each.is_running]:
            self.leave(call_id, None, 0.0)
        while self._calls:
            self._forget(next(iter(self._calls)))
        return self._counts

    @property
    def cursors(self) -> tuple[Cursor, ...]:
        """The calls that no call follows yet, the oldest first."""
        return tuple(self._open.values())

    def _place(self, cursor: Cursor) -> None:
        """Keep the cursor of a call while no call follows it."""
        if cursor.is_followed or cursor.following:
            self._open.pop(cursor.call_id, None)
        elif self._calls.get(cursor.call_id) is cursor:
            self._open[cursor.call_id] = cursor

    def _forget(self, call_id: CallId) -> None:
        cursor = self._calls[call_id]
        if cursor.is_running:
            self.leave(call_id, None, 0.0)
            return
        del self._calls[call_id]
        self._open.pop(call_id, None)
        if not cursor.is_followed:
            self._counts.end(cursor.node)
            cursor.is_followed = True  # so that its end is counted once

    def check_integrity(self) -> None:
        """Assert that the calls that no call follows have cursors, and that the bounds hold. For tests."""
        calls = self._calls
        is_open = {call_id for call_id, each in calls.items() if not each.is_followed and not each.following}
        if is_open != set(self._open) or len(calls) > MOST_CALLS:
            raise AssertionError(f"{len(self._open)} cursors of {len(calls)} calls, and {len(is_open)} should be")
        following = [parent for each in calls.values() for parent in each.parents]
        if any(each.following != sum(parent is each for parent in following) for each in calls.values()):
            raise AssertionError("the calls in flight that follow a call are miscounted")
