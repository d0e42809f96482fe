"""Conversations as digests: their beginnings, answers, exchanges and long texts, and what tells an answer.

Nothing here knows programs. `lineage.py` keeps these digests, and says which program each one stands for.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from itertools import groupby, islice
from typing import Final, NamedTuple

from weft.core.identity.messages import Digest, Item, chain, digest_of, text_of

Mark = tuple[int, Digest]  # see `marks_of`

FEWEST_CHARACTERS: Final = 80  # of a text that tells whose model wrote it
_MOST_TEXTS: Final = 16  # of a message or a tool call
_FEWEST_OF_ANSWER: Final = 16  # characters of an answer that may begin a longer one
_CALL_ID: Final = re.compile(r"[A-Za-z0-9_-]{12,128}")  # of a tool call, long enough to be no word
_MOST_IDS: Final = 1_000  # that are looked for in a text


class Said(NamedTuple):
    """A conversation as digests of its beginnings, and the places of its answers, less those at its end, which the
    next answer continues."""

    items: list[Item]
    digests: list[Digest]
    answers: list[int]
    question: Digest  # of what is before those at the end

    def answer_after(self, place: int) -> int | None:
        """The place of the first answer after a place."""
        return next((answer for answer in self.answers if answer > place), None)

    def latest_answer(self) -> int | None:
        """The place where the latest answer begins."""
        if not self.answers:
            return None
        place = self.answers[-1]
        while place > 0 and is_answer(self.items[place - 1]):
            place -= 1
        return place


def said_in(start: Digest, items: list[Item]) -> Said:
    """A conversation as digests, each of which begins with `start`."""
    digests = list(chain(start, items))
    answers = [place for place, item in enumerate(items) if is_answer(item)]
    end = len(items)
    while answers and answers[-1] == end - 1:
        end = answers.pop()
    return Said(items, digests, answers, digests[end - 1] if end else start)


def is_answer(item: Item) -> bool:
    """Whether a model said an item: a text or a tool call."""
    return item[0] == "call" or item[:2] == ("message", "assistant")


def asked_digest(start: Digest, item: Item) -> Digest:
    """Digest of a message alone, which an exchange begins with."""
    return digest_of(digest_of(start, "exchange"), *item)


def text_digest(start: Digest, text: str) -> Digest:
    """Digest of a text alone: the same in an answer and in a user's message."""
    return digest_of(start, "text", text)


def exchanges_of(start: Digest, items: list[Item]) -> Iterator[Digest]:
    """Digests of the exchanges of a conversation: an answer, with the message before it."""
    for are_answers, places in groupby(range(len(items)), key=lambda place: is_answer(items[place])):
        if are_answers:
            answer = list(places)
            if answer[0] > 0:
                *_, exchange = chain(asked_digest(start, items[answer[0] - 1]), (items[place] for place in answer))
                yield exchange


def texts_written(answer: list[Item]) -> Iterator[str]:
    """The long texts of an answer that may be handed to another agent: its own text, and arguments of tool calls."""
    for item in answer:
        texts = _arguments(item[3]) if item[0] == "call" else item[3:]
        yield from islice((text for text in texts if len(text) >= FEWEST_CHARACTERS), _MOST_TEXTS)


def _arguments(text: str) -> Iterator[str]:
    try:
        arguments = json.loads(text)
    except (ValueError, RecursionError):
        return
    if isinstance(arguments, dict):
        yield from (text_of(value) for value in arguments.values() if isinstance(value, str))


def marks_of(answer: list[Item]) -> Iterator[Mark]:
    """What tells an answer: how long its text is, and the text's digest; of a tool call, 0 and the id's digest."""
    kind, *_, text = answer[0]
    if kind == "message" and len(text) >= _FEWEST_OF_ANSWER:
        yield len(text), digest_of(b"", text)
    for item in answer:
        if item[0] == "call" and _CALL_ID.fullmatch(item[1]):
            yield 0, digest_of(b"", item[1])


def marks_in(item: Item, marks: Iterable[Mark]) -> Iterator[Mark]:
    """Those of an answer's marks that are in an item, which may be that answer with more behind it."""
    text = item[-1] if item[0] == "message" else ""
    ids = {digest_of(b"", each) for each in islice(_CALL_ID.findall(text), _MOST_IDS)}
    for length, digest in marks:
        if digest_of(b"", text[:length]) == digest if length else digest in ids:
            yield length, digest
