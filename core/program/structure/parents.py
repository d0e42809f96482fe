"""Which calls came before which, the threads that calls form, and how the parents of a call are chosen."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

from weft.core.ids import CallId, ThreadId
from weft.core.program.structure.lineage import Inputs, TextLineage

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
        return 1 << self._calls[call_id].number

    def set_of(self, calls: Iterable[CallId]) -> int:
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


_MOST_TOOLS: Final = 100  # names of tools between two calls
_MOST_GROUPS: Final = 16


@dataclass(eq=False, slots=True)
class Front:
    """The calls of a frontier, as sets of an `Ancestry`. None of them is an ancestor of another.

    It is certain that the next call comes after a call of the frontier if a framework has stated so, or if no other
    call overlapped, or only calls of other branches. It is a guess if other calls overlapped.
    """

    calls: int = 0
    guesses: int = 0  # those of the calls that are guesses
    stated: int = 0  # those of the calls that a framework has stated
    branched: int = 0  # those of the calls that were made in branches, and with which only other branches overlapped
    past: int = 0  # all ancestors of the calls
    groups: tuple[int, ...] = ()  # sets of several of the calls, each the calls with which one run ended
    loose: int = 0  # guesses beside the calls, of the parents of one call: see `ParentChoice.choose`
    _covered: int | None = None
    possible_past: int | None = None  # all ancestors of the calls, those by way of loose guesses included; once known
    reduced: Front | None = None  # the same without guesses that loose guesses make ancestors of others; once known
    listed: tuple[Calls, Calls] | None = None  # the parents of a call that comes after all calls, and the guesses

    @property
    def covered(self) -> int:
        """The calls and all their ancestors. Kept, so that the calls after this frontier share one integer."""
        if self._covered is None:
            self._covered = self.calls | self.past
        return self._covered

    def renumber(self, renumbered: Callable[[int], int]) -> None:
        """Change all sets after the ancestry has forgotten calls."""
        self.calls, self.guesses = renumbered(self.calls), renumbered(self.guesses)
        self.stated, self.branched = renumbered(self.stated), renumbered(self.branched)
        self.past, self.groups = renumbered(self.past), tuple(map(renumbered, self.groups))
        self._covered = self.possible_past = self.reduced = None


@dataclass(frozen=True, slots=True)
class Frontier:
    """The calls that the next call inside a run comes after."""

    front: Front = field(default_factory=Front)
    tools: tuple[str, ...] = ()  # the tools that ran after these calls


def still(groups: tuple[int, ...], calls: int) -> tuple[int, ...]:
    """Return what remains of groups among some calls: sets of several calls, the newest sets."""
    left = (group & calls for group in groups[-_MOST_GROUPS:])
    return tuple(group for group in left if group & group - 1)


def merged(tools: tuple[str, ...], more: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names of some tools and then of more, each once."""
    return tuple(dict.fromkeys(tools + more))[:_MOST_TOOLS] if set(more) - set(tools) else tools


# Without a bound, calls of many strands that each come after all others would have edges by the square of their number.
# A call has all of its parents as long as the calls so far have this many on average. Otherwise it has the newest,
# certain ones rather than guesses. Calls with the same frontier share a tuple of parents, which counts once.
PARENTS_A_CALL: Final = 16
FEWEST_LISTED: Final = 64
_QUOTED_BESIDE: Final = 64  # calls of other strands, the newest, whose outputs are searched for in a call's texts


class ParentChoice:
    """Chooses parents, and lists them."""

    def __init__(self, ancestry: Ancestry, lineage: TextLineage) -> None:
        self._ancestry = ancestry
        self._lineage = lineage
        self._started = 0  # calls
        self._has_loose = False  # whether there was a loose guess
        self._listed = 0  # parents, those that several calls share counted once

    def choose(self, frontier: Front, inputs: Inputs) -> tuple[Front, Calls]:
        """Choose the parents of a call with their certainty, and return the calls that lineage proves as well.

        Lineage is asked if the frontier has guesses or several calls, or if calls of other strands, which are outside
        its past, have finished. Calls of the frontier that lineage names are certain. The other guesses stay guesses:
        that a call uses one result does not prove that the code did not wait for the others. Calls of other strands
        that lineage names are added.

        A guess beside a named call is *loose*: the code may also have been a strand, which goes on with its own result
        alone. A loose guess is a parent of this call, but it does not count as its past, so that a later call can still
        come after it for certain. The exceptions are guesses that lineage could not recognize, and those that ended
        together with a named call: a framework may have waited for calls whose output the next call does not get.
        """
        ancestry = self._ancestry
        is_single = not frontier.calls & (frontier.calls - 1)
        beside = ancestry.finished & ~frontier.covered
        if not frontier.guesses and is_single and not beside:
            return frontier, ()
        content = inputs() if callable(inputs) else inputs
        if not content.texts and not content.ids:
            return self._reduced(frontier), ()
        quoted_from = newest(beside, _QUOTED_BESIDE) if frontier.calls else 0
        proven = certain = self._lineage.certain(content, _Members(ancestry, quoted_from))
        if frontier.guesses or not frontier.calls:  # only then is a search inside longer texts worth its time
            proven = self._lineage.origins(content, _Members(ancestry, frontier.calls) if frontier.calls else None)
        named = ancestry.set_of(call for call in proven if ancestry.contains(frontier.calls, call))
        calls, guesses, covered = frontier.calls, frontier.guesses & ~named, frontier.covered
        if named and guesses:
            unnamed = _Members(ancestry, guesses)
            undecided = ancestry.set_of(iter(self._lineage.undecided(content, unnamed)))
            undecided |= functools.reduce(int.__or__, (each & guesses for each in frontier.groups if each & named), 0)
            calls &= ~(guesses & ~undecided)
            guesses &= undecided
        outside = [call for call in (certain if frontier.calls else proven) if ancestry.has_finished(call)]
        added = [call for call in outside if not ancestry.contains(covered, call)]
        if calls == frontier.calls and guesses == frontier.guesses and not added:
            return self._reduced(frontier), proven
        past = frontier.past if calls == frontier.calls else ancestry.past_of(calls)
        implied = ancestry.past_of(ancestry.set_of(added))
        calls = (calls | ancestry.set_of(added)) & ~implied
        loose = frontier.calls & ~calls & ~implied
        self._has_loose |= bool(loose)
        return self._reduced(Front(calls, guesses & calls, past=past | implied, loose=loose)), proven

    def _reduced(self, front: Front) -> Front:
        """Return a frontier, less the guesses that loose guesses make ancestors of other calls in it."""
        if not self._has_loose or not front.guesses:
            return front
        if front.reduced is None:
            implied = front.guesses & self._ancestry.possible_past_of(front.calls)
            front.reduced = front
            if implied:
                calls, guesses = front.calls & ~implied, front.guesses & ~implied
                front.reduced = Front(calls, guesses, past=front.past | implied, loose=front.loose)
        return front.reduced

    def possible(self, parents: Front, frontier: Front) -> int:
        """Return the parents of a call and all that may have come before them, loose guesses included."""
        if not self._has_loose:
            return parents.covered
        if parents.possible_past is None:
            parents.possible_past = self._ancestry.possible_past_of(parents.calls)
        return parents.covered | parents.possible_past | (frontier.covered if parents.loose else 0)

    def listed(self, parents: Front) -> tuple[Calls, Calls]:
        """Return the parents of a call, the oldest first, and those of them that are guesses, within the bounds."""
        self._started += 1
        if parents.listed is None:
            parents.listed = self._list(parents)
        return parents.listed

    def _list(self, parents: Front) -> tuple[Calls, Calls]:
        guesses, most = (
            parents.guesses | parents.loose,
            max(FEWEST_LISTED, PARENTS_A_CALL * self._started - self._listed),
        )
        certain = parents.calls & ~guesses
        if (certain | guesses).bit_count() > most:
            certain = newest(certain, most)
            guesses = newest(guesses, most - certain.bit_count())
        if parents.loose:  # one that is an ancestor of another parent is listed there
            guesses &= ~(parents.loose & self._ancestry.possible_past_of(certain | guesses))
        ordered = self._ancestry.in_order(certain | guesses)
        self._listed += len(ordered)
        return ordered, self._ancestry.in_order(guesses) if certain else ordered


class _Members(Collection[CallId]):
    """A set of calls as a collection."""

    def __init__(self, ancestry: Ancestry, calls: int) -> None:
        self._ancestry, self._calls = ancestry, calls

    def __len__(self) -> int:
        return self._calls.bit_count()

    def __iter__(self) -> Iterator[CallId]:
        return iter(self._ancestry.in_order(self._calls))

    def __contains__(self, call_id: object) -> bool:
        return isinstance(call_id, str) and self._ancestry.contains(self._calls, CallId(call_id))
