"""Evidence that a call depends on earlier calls: their outputs occur in the call's input.

The tree of runs says which calls had ended before a call began. The input of the call says which of their outputs it
used. Ids of messages and of tool calls are proof. Texts are evidence. A text that several calls have given is evidence
neither for nor against any of them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Final, Generic, NamedTuple, TypeVar

from weft.core.ids import CallId

MIN_QUOTED_CHARS: Final = 16  # a shorter text may occur in another text by chance


@dataclass(frozen=True, slots=True)
class Content:
    """The texts and ids of messages, as evidence of their origin."""

    texts: tuple[str, ...] = ()
    ids: tuple[str, ...] = ()  # of messages and tool calls


NOTHING: Final = Content()

# Reading messages takes time. A function is called only if the parents of the call are in doubt.
Inputs = Content | Callable[[], Content]

_Key = TypeVar("_Key", str, int)


class _Producers(Generic[_Key]):
    """The calls that have given each id, or each text."""

    def __init__(self) -> None:
        self._calls: dict[_Key, dict[CallId, None]] = {}

    def add(self, key: _Key, call_id: CallId) -> None:
        self._calls.setdefault(key, {})[call_id] = None

    def remove(self, key: _Key, call_id: CallId) -> None:
        calls = self._calls.get(key, {})
        calls.pop(call_id, None)
        if not calls:
            self._calls.pop(key, None)

    def only(self, key: _Key) -> CallId | None:
        """Return the call that has given the key, if exactly one call has."""
        calls = self._calls.get(key, {})
        return next(iter(calls)) if len(calls) == 1 else None

    def __contains__(self, key: _Key) -> bool:
        return key in self._calls


class _Output(NamedTuple):
    number: int  # outputs are numbered in the order in which they were added
    ids: tuple[str, ...]
    hashes: tuple[int, ...]  # of the whole texts
    quotable: list[str]  # texts that may be found inside other texts; emptied when too much text is kept


class TextLineage:
    """The outputs of one program's calls. Not thread-safe: the program holds its lock.

    Args:
        keep: how many outputs are kept, the newest.
        keep_chars: how many characters of text are kept to be found inside other texts. Whole texts are found by their
            hash.
    """

    def __init__(self, keep: int = 1000, keep_chars: int = 4_000_000) -> None:
        self._keep = keep
        self._keep_chars = keep_chars
        self._chars = 0
        self._count = 0
        self._outputs: dict[CallId, _Output] = {}  # the oldest first
        self._with_text: dict[CallId, None] = {}  # the calls whose quotable texts are kept, the oldest first
        self._ids: _Producers[str] = _Producers()
        self._whole: _Producers[int] = _Producers()  # by hash of a whole text

    def add_output(self, call_id: CallId, content: Content) -> None:
        """Add the output of a call. A second output of the same call is ignored.

        Whitespace around a text is stripped, and empty texts are ignored.
        """
        texts = [text for text in map(str.strip, content.texts) if text]
        if call_id in self._outputs:
            return
        self._count += 1
        quotable = [text for text in texts if len(text) >= MIN_QUOTED_CHARS]
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
                self._ids.remove(id_, oldest)
            for key in output.hashes:
                self._whole.remove(key, oldest)
        while self._chars > self._keep_chars:
            self._forget_text(next(iter(self._with_text)))

    def _forget_text(self, call_id: CallId) -> None:
        self._with_text.pop(call_id, None)
        quotable = self._outputs[call_id].quotable
        self._chars -= sum(map(len, quotable))
        quotable.clear()

    def certain(self, content: Content, quoted_from: Collection[CallId] = ()) -> tuple[CallId, ...]:
        """Return the calls whose outputs an input names by an id, or repeats as a whole text of 16 characters or more.

        This costs one look-up for each id and text. The oldest call comes first.

        Args:
            quoted_from: calls whose outputs are also searched for inside longer texts, one search for each.
        """
        found = {self._ids.only(id_) for id_ in content.ids}
        texts = (text.strip() for text in content.texts)
        found |= {self._whole.only(hash(text)) for text in texts if len(text) >= MIN_QUOTED_CHARS}
        others = [call_id for call_id in self._with_output(quoted_from) if call_id not in found]
        text = "\0".join(self._longer(content)) if others else ""
        if text and self._quoted(text, others):  # an output of any other call may hold the quoted one
            found |= self._quoted(text, self._outputs) & set(others)
        return self._in_order(found)

    def origins(self, content: Content, quoted_from: Collection[CallId] | None = None) -> tuple[CallId, ...]:
        """Return the calls whose outputs occur in an input, the oldest first.

        An output occurs if the input names it by an id, repeats it as a whole text of any length, or has it inside a
        longer text (from 16 characters on).

        Args:
            quoted_from: the calls whose outputs are searched for inside longer texts, one search for each. By default
                these are all calls.
        """
        found = {self._ids.only(id_) for id_ in content.ids}
        found |= {self._whole.only(hash(text.strip())) for text in content.texts}
        longer = self._longer(content)
        if longer:
            known = self._outputs if quoted_from is None else self._with_output(quoted_from)
            found |= self._quoted("\0".join(longer), (call_id for call_id in known if call_id not in found))
        return self._in_order(found)

    def undecided(self, content: Content, calls: Collection[CallId]) -> set[CallId]:
        """Return those of `calls` of which an input says neither that it contains their output nor that it does not.

        Other calls have given the same output; or it has no id that the input could name, and its text is too short to
        be recognized inside another one.
        """
        texts = [text.strip() for text in content.texts]
        keys, everything = set(map(hash, texts)), "\0".join(texts)
        outputs = ((call_id, self._outputs[call_id]) for call_id in self._with_output(calls))
        return {
            call_id
            for call_id, output in outputs
            if not (output.quotable or (output.ids and content.ids))
            or any(key in keys and self._whole.only(key) is None for key in output.hashes)
            or any(text in everything and self._whole.only(hash(text)) is None for text in output.quotable)
        }

    def _longer(self, content: Content) -> list[str]:
        """Return the texts that may quote an output. A text that is itself an output is no evidence of a quotation."""
        texts = map(str.strip, content.texts)
        return [text for text in texts if len(text) > MIN_QUOTED_CHARS and hash(text) not in self._whole]

    def _with_output(self, calls: Collection[CallId]) -> list[CallId]:
        """Return those of `calls` whose output is kept, in steps for each call or each output, whichever are fewer."""
        few, others = (calls, self._outputs) if len(calls) < len(self._outputs) else (self._outputs, calls)
        return [call_id for call_id in few if call_id in others]

    def _quoted(self, text: str, calls: Iterable[CallId]) -> set[CallId | None]:
        """Return those of `calls` whose output occurs in `text`.

        An output that occurs inside a longer output that also occurs in `text` does not count: the longer output
        explains it.
        """
        candidates = [
            (quotable, call_id)
            for call_id in calls
            for quotable in self._outputs[call_id].quotable
            if self._whole.only(hash(quotable)) == call_id
        ]
        found: dict[str, CallId | None] = {}
        for quotable, call_id in sorted(candidates, key=lambda each: len(each[0]), reverse=True):
            if quotable in text and not any(quotable in other for other in found):
                found[quotable] = call_id
        return set(found.values())

    def _in_order(self, found: Iterable[CallId | None]) -> tuple[CallId, ...]:
        known = [call_id for call_id in found if call_id is not None]
        return tuple(sorted(known, key=lambda call_id: self._outputs[call_id].number))
