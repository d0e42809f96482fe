"""Where a call comes from: the calls whose outputs occur in what it is given, and all that came before those.

The tree of runs says what had ended before a call began; what the call is given says what it made use of. Ids of
messages and of tool calls are proof. Texts are evidence, unless several calls gave the same: then they are evidence for
none of them, and against none.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Final, Generic, NamedTuple, TypeVar

from weft.core.ids import CallId, ThreadId

Calls = tuple[CallId, ...]

QUOTABLE: Final = 16  # characters; a shorter text may occur in another by chance


@dataclass(frozen=True, slots=True)
class Content:
    """What messages say, as evidence of where they came from."""

    texts: tuple[str, ...] = ()
    ids: tuple[str, ...] = ()  # message ids, tool-call ids


NOTHING: Final = Content()

# Reading messages takes time, so an input may be given as a function, which is called only when there is a doubt.
Given = Content | Callable[[], Content]

_Key = TypeVar("_Key", str, int)


class _Owners(Generic[_Key]):
    """Which calls gave something."""

    def __init__(self) -> None:
        self._calls: dict[_Key, dict[CallId, None]] = {}

    def add(self, key: _Key, call_id: CallId) -> None:
        self._calls.setdefault(key, {})[call_id] = None

    def drop(self, key: _Key, call_id: CallId) -> None:
        calls = self._calls.get(key, {})
        calls.pop(call_id, None)
        if not calls:
            self._calls.pop(key, None)

    def only(self, key: _Key) -> CallId | None:
        """The call that gave it, if exactly one did."""
        calls = self._calls.get(key, {})
        return next(iter(calls)) if len(calls) == 1 else None

    def __contains__(self, key: _Key) -> bool:
        return key in self._calls


class _Output(NamedTuple):
    number: int  # outputs count up, so that calls can be put in order
    ids: tuple[str, ...]
    hashes: tuple[int, ...]
    quotable: list[str]  # emptied when too much text is kept


class Lineage:
    """The outputs of one program's calls. Not thread-safe: the program holds its lock.

    Args:
        keep: how many outputs are remembered, the newest.
        keep_chars: how much of their text is kept to be found inside other texts; whole texts are known by their hash.
    """

    def __init__(self, keep: int = 1000, keep_chars: int = 4_000_000) -> None:
        self._keep = keep
        self._keep_chars = keep_chars
        self._chars = 0
        self._count = 0
        self._outputs: dict[CallId, _Output] = {}  # the oldest first
        self._with_text: dict[CallId, None] = {}  # likewise
        self._ids: _Owners[str] = _Owners()
        self._whole: _Owners[int] = _Owners()

    def gave(self, call_id: CallId, content: Content) -> None:
        """A call gave its output, once. Blanks around a text are not part of it; an empty text is nothing."""
        texts = [text for text in map(str.strip, content.texts) if text]
        if call_id in self._outputs or not (texts or content.ids):
            return
        self._count += 1
        quotable = [text for text in texts if len(text) >= QUOTABLE]
        self._outputs[call_id] = output = _Output(self._count, content.ids, tuple(map(hash, texts)), quotable)
        for id_ in output.ids:
            self._ids.add(id_, call_id)
        for key in output.hashes:
            self._whole.add(key, call_id)
        if quotable:
            self._with_text[call_id] = None
            self._chars += sum(map(len, quotable))
        self._forget()

    def _forget(self) -> None:
        while len(self._outputs) > self._keep:
            oldest = next(iter(self._outputs))
            self._forget_text(oldest)
            output = self._outputs.pop(oldest)
            for id_ in output.ids:
                self._ids.drop(id_, oldest)
            for key in output.hashes:
                self._whole.drop(key, oldest)
        while self._chars > self._keep_chars:
            self._forget_text(next(iter(self._with_text)))

    def _forget_text(self, call_id: CallId) -> None:
        self._with_text.pop(call_id, None)
        quotable = self._outputs[call_id].quotable
        self._chars -= sum(map(len, quotable))
        quotable.clear()

    def certain(self, content: Content) -> Calls:
        """The calls whose outputs an input names by an id, or repeats as a whole text of 16 characters or more.

        Costs one look-up for each id and text.
        """
        found = {self._ids.only(id_) for id_ in content.ids}
        texts = (text.strip() for text in content.texts)
        found |= {self._whole.only(hash(text)) for text in texts if len(text) >= QUOTABLE}
        return self._in_order(found)

    def origins(self, content: Content, quoted_from: Collection[CallId] | None = None) -> Calls:
        """The calls whose outputs occur in an input, the oldest first: named by an id, repeated as a whole text of any
        length, or found inside a longer text (from 16 characters).

        Args:
            content: the input.
            quoted_from: the calls whose outputs are looked for inside longer texts; None: all. Each is a search.
        """
        found = {self._ids.only(id_) for id_ in content.ids}
        longer = []
        for text in map(str.strip, content.texts):
            key = hash(text)
            found.add(self._whole.only(key))
            if len(text) > QUOTABLE and key not in self._whole:  # what is an output itself quotes nobody
                longer.append(text)
        if longer:
            known = self._outputs if quoted_from is None else quoted_from
            found |= self._quoted("\0".join(longer), (call_id for call_id in known if call_id not in found))
        return self._in_order(found)

    def shared(self, content: Content, calls: Iterable[CallId]) -> set[CallId]:
        """Of `calls`, those whose output occurs in an input and was given by others too: it may be theirs or not."""
        texts = [text.strip() for text in content.texts]
        keys, everything = set(map(hash, texts)), "\0".join(texts)
        return {
            call_id
            for call_id in calls
            if (output := self._outputs.get(call_id)) is not None
            and (
                any(key in keys and self._whole.only(key) is None for key in output.hashes)
                or any(text in everything and self._whole.only(hash(text)) is None for text in output.quotable)
            )
        }

    def _quoted(self, text: str, calls: Iterable[CallId]) -> set[CallId | None]:
        """A text that occurs only as a part of another output that occurs is that other output's."""
        candidates = [
            (quotable, call_id)
            for call_id in calls
            if call_id in self._outputs
            for quotable in self._outputs[call_id].quotable
            if self._whole.only(hash(quotable)) == call_id
        ]
        found: dict[str, CallId | None] = {}
        for quotable, call_id in sorted(candidates, key=lambda each: len(each[0]), reverse=True):
            if quotable in text and not any(quotable in other for other in found):
                found[quotable] = call_id
        return set(found.values())

    def _in_order(self, found: Iterable[CallId | None]) -> Calls:
        known = [call_id for call_id in found if call_id is not None]
        return tuple(sorted(known, key=lambda call_id: self._outputs[call_id].number))


class _Known(NamedTuple):
    number: int  # calls count up from 0
    before: int  # its ancestors, as the set bits of their numbers
    parents: Calls
    thread_id: ThreadId
    previous: CallId | None  # the call before it in its thread


class Ancestry:
    """Which calls came before which, and the threads that they form: chains of calls, each a parent of the next.

    Sets of calls are integers with the bits of the calls' numbers. Calls that are old and out of use are forgotten.
    """

    def __init__(self, new_thread: Callable[[], ThreadId], keep: int = 1000) -> None:
        self._new_thread = new_thread
        self._keep = keep
        self._limit = 2 * keep  # where it is time to forget, so that this takes no time on average
        self._count = 0
        self._calls: dict[CallId, _Known] = {}  # the oldest first
        self._tails: dict[ThreadId, CallId] = {}
        self._free: dict[Calls, list[ThreadId]] = {}  # begun by calls that failed, by the parents of those
        self.finished = 0  # the calls that gave a result, as a set

    def add(self, call_id: CallId, parents: Calls, preferred: Collection[CallId] = ()) -> ThreadId:
        """A call begins; gives its thread.

        Args:
            call_id: the call.
            parents: the calls it comes after, in order.
            preferred: those of them whose threads it should rather continue.
        """
        thread_id, previous = self._thread(sorted(parents, key=lambda call: call not in preferred), parents)
        self._calls[call_id] = _Known(self._count, self.up_to(parents), parents, thread_id, previous)
        self._tails[thread_id] = call_id
        self._count += 1
        return thread_id

    def _thread(self, candidates: Iterable[CallId], parents: Calls) -> tuple[ThreadId, CallId | None]:
        for call_id in candidates:
            thread_id = self._calls[call_id].thread_id
            if self._tails.get(thread_id) == call_id:
                return thread_id, call_id
        free = self._free.get(parents)
        return (free.pop() if free else self._new_thread()), None

    def finish(self, call_id: CallId) -> None:
        """A call gave its result."""
        self.finished |= 1 << self._calls[call_id].number

    def give_back(self, call_id: CallId) -> None:
        """A call failed: its thread ends where it ended before, so that another try can take it."""
        call = self._calls[call_id]
        if call.previous is not None:
            self._tails[call.thread_id] = call.previous
        else:
            del self._tails[call.thread_id]
            self._free.setdefault(call.parents, []).append(call.thread_id)

    def has_finished(self, call_id: CallId) -> bool:
        """Whether a call gave its result, and is not forgotten."""
        return call_id in self._calls and self.contains(self.finished, call_id)

    def before(self, calls: Iterable[CallId]) -> int:
        """The set of all ancestors of some calls."""
        found = 0
        for call_id in calls:
            found |= self._calls[call_id].before
        return found

    def up_to(self, calls: Iterable[CallId]) -> int:
        """The set of some calls and all their ancestors."""
        found = 0
        for call_id in calls:
            call = self._calls[call_id]
            found |= call.before | 1 << call.number
        return found

    def contains(self, found: int, call_id: CallId) -> bool:
        """Whether a call is in a set."""
        return bool(found >> self._calls[call_id].number & 1)

    def in_order(self, calls: Iterable[CallId]) -> Calls:
        """Some calls, the oldest first."""
        return tuple(sorted(calls, key=lambda call_id: self._calls[call_id].number))

    def forget(self, in_use: Callable[[], Collection[CallId]]) -> None:
        """Drop old calls, now and then, but those in use."""
        if len(self._calls) > self._limit:
            kept = {*list(self._calls)[-self._keep :], *in_use()}
            self._calls = {call_id: call for call_id, call in self._calls.items() if call_id in kept}
            self._limit = 2 * max(self._keep, len(self._calls))
