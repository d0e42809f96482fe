"""Which calls came before which, and the threads that calls form."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass

from weft.core.ids import CallId, ThreadId

Calls = tuple[CallId, ...]


@dataclass(slots=True)
class _CallRecord:
    number: int  # the calls that are known are numbered from 0 in the order in which they began
    past: int  # the set of its ancestors
    possible: int  # the set of its ancestors, those included that are ones by way of loose guesses only
    parents: int | None  # a set of calls; None: one of them is forgotten
    thread_id: ThreadId
    previous: CallId | None  # the call before this one in its thread


class Ancestry:
    """The ancestors and threads of one program's calls. A thread is a chain of calls, each a parent of the next.

    A set of calls is an integer with the bits of the calls' numbers, so that older calls have lower bits. Old calls
    that are not in use are forgotten, and the others get new numbers: see `forget`. Not thread-safe: the program holds
    its lock. `keep` says how many of the newest calls are never forgotten.
    """

    def __init__(self, new_thread: Callable[[], ThreadId], keep: int = 1000) -> None:
        self._new_thread = new_thread
        self._keep = keep
        self._limit = 2 * keep  # the number of calls at which to forget, so that forgetting is cheap on average
        self._calls: dict[CallId, _CallRecord] = {}
        self._order: list[CallId] = []  # by number
        self._tails = 0  # the set of the last calls of all threads
        self._released: dict[int, list[ThreadId]] = {}  # threads that failed calls had begun, by the calls' parents
        self.finished = 0  # the set of the known calls that have a result

    def add(
        self, call_id: CallId, parents: int, covered: int, possible: int, preferred: Collection[CallId] = ()
    ) -> ThreadId:
        """Add a call that begins, and return its thread.

        Args:
            parents: the set of its parents, without loose guesses.
            covered: the set of its parents and all their ancestors.
            possible: the same with loose guesses, and with all calls that loose guesses make ancestors.
            preferred: the parents whose threads the call should continue rather than those of other parents.
        """
        tails = parents & self._tails
        if tails and preferred:
            tails = self.set_of(call for call in preferred if call in self._calls) & tails or tails
        previous = None
        if tails:
            oldest = tails & -tails
            previous = self._order[oldest.bit_length() - 1]
            thread_id = self._calls[previous].thread_id
            self._tails ^= oldest
        elif parents in self._released:
            thread_id = self._released[parents].pop()
            if not self._released[parents]:
                del self._released[parents]
        else:
            thread_id = self._new_thread()
        number = len(self._order)
        self._calls[call_id] = _CallRecord(number, covered, possible, parents, thread_id, previous)
        self._order.append(call_id)
        self._tails |= 1 << number
        return thread_id

    def finish(self, call_id: CallId) -> None:
        """Note that a call has a result."""
        self.finished |= self.one(call_id)

    def release_thread(self, call_id: CallId) -> None:
        """Remove a failed call from its thread, so that the next attempt can continue the thread."""
        call = self._calls[call_id]
        self._tails &= ~(1 << call.number)
        if call.previous is None:
            if call.parents is not None:
                self._released.setdefault(call.parents, []).append(call.thread_id)
        elif call.previous in self._calls:
            self._tails |= 1 << self._calls[call.previous].number

    def knows(self, call_id: CallId) -> bool:
        """Whether a call was added and is not forgotten."""
        return call_id in self._calls

    def has_finished(self, call_id: CallId) -> bool:
        """Whether a call has a result and is not forgotten."""
        return self.contains(self.finished, call_id)

    # -- sets of calls

    def one(self, call_id: CallId) -> int:
        """Return the set of one call."""
        return 1 << self._calls[call_id].number

    def set_of(self, calls: Iterable[CallId]) -> int:
        """Return the set of some calls."""
        return functools.reduce(int.__or__, map(self.one, calls), 0)

    def past(self, call_id: CallId) -> int:
        """Return the set of a call's ancestors."""
        return self._calls[call_id].past

    def past_of(self, calls: int) -> int:
        """Return the set of all ancestors of some calls."""
        return functools.reduce(int.__or__, (self._calls[self._order[number]].past for number in _numbers(calls)), 0)

    def possible_past_of(self, calls: int) -> int:
        """Return the set of all ancestors of some calls, those by way of loose guesses included."""
        records = (self._calls[self._order[number]] for number in _numbers(calls))
        return functools.reduce(int.__or__, (record.possible for record in records), 0)

    def contains(self, calls: int, call_id: CallId) -> bool:
        """Whether a set contains a call. A forgotten call is in no set."""
        return call_id in self._calls and bool(calls >> self._calls[call_id].number & 1)

    def in_order(self, calls: int) -> Calls:
        """Return the calls of a set, the oldest first."""
        return tuple(self._order[number] for number in _numbers(calls))

    def forget(self, in_use: Callable[[], int]) -> Callable[[int], int] | None:
        """Forget old calls, once there are many of them. The other calls get new numbers.

        Args:
            in_use: returns the set of old calls to keep. It is called only if calls are forgotten.

        Returns:
            A function that returns a set, made before, with the new numbers and without the forgotten calls. None: no
            call was forgotten.
        """
        if len(self._order) <= self._limit:
            return None
        begin = max(0, len(self._order) - self._keep)  # the newest calls stay
        old = in_use() & ((1 << begin) - 1)
        numbers = {number: new for new, number in enumerate(_numbers(old))}

        @functools.cache  # so that calls share the set that they shared before
        def renumbered(calls: int) -> int:
            return calls >> begin << len(numbers) | set_of_numbers(numbers[each] for each in _numbers(calls & old))

        forgotten = (1 << begin) - 1 ^ old
        self._released = {renumbered(key): each for key, each in self._released.items() if not key & forgotten}
        self._order = [self._order[number] for number in numbers] + self._order[begin:]
        self._calls = {call_id: self._calls[call_id] for call_id in self._order}
        for number, call in enumerate(self._calls.values()):
            call.number, call.past, call.possible = number, renumbered(call.past), renumbered(call.possible)
            if call.parents is not None:
                call.parents = None if call.parents & forgotten else renumbered(call.parents)
        self._tails = renumbered(self._tails)
        self.finished = renumbered(self.finished)
        self._limit = 2 * max(self._keep, len(self._order))
        return renumbered


def newest(calls: int, count: int) -> int:
    """Return the set of the newest calls of a set, at most `count`."""
    found = 0
    for _ in range(min(count, calls.bit_count())):
        last = 1 << calls.bit_length() - 1
        calls ^= last
        found |= last
    return found


def set_of_numbers(numbers: Iterator[int]) -> int:
    """Return the set of the calls with some numbers."""
    data = bytearray()
    for number in numbers:  # ascending
        data.extend(bytes(number // 8 + 1 - len(data)))
        data[number // 8] |= 1 << number % 8
    return int.from_bytes(data, "little")


def _numbers(calls: int) -> Iterator[int]:
    """Yield the numbers of the calls of a set, in order."""
    if not calls & (calls - 1):  # at most one call
        if calls:
            yield calls.bit_length() - 1
        return
    digits = bin(calls)[:1:-1]  # the lowest first
    place = digits.find("1")
    while place >= 0:
        yield place
        place = digits.find("1", place + 1)
