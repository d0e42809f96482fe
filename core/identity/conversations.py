"""Conversations as digests of their beginnings, and the places of what models said in them.

Nothing here knows programs. `lineage.py` keeps these digests, and says which program each one stands for.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import islice
from typing import Final, NamedTuple

from weft.core.identity.items import Digest, Item, text_of, utf8_bytes

CALL_ID: Final = re.compile(r"[A-Za-z0-9_-]{12,128}")  # of a tool call, long enough to be no word
_ID_IN_TEXT: Final = re.compile(r"(?:chatcmpl-tool-|call_|toolu_|fc_)[A-Za-z0-9_-]{4,100}")
_ID_MARKS: Final = ("chatcmpl-tool-", "call_", "toolu_", "fc_")
_MOST_IDS: Final = 1_000  # that are looked for in texts
_MOST_CHARACTERS: Final = 1 << 20  # of texts that are searched for ids, the latest first
_MOST_ARGUMENTS: Final = 16  # of a tool call
_STEP_BYTES: Final = 40  # of a line that is taken for a step of a plan
_ENTRY_BYTES: Final = 32  # of an entry of a list that is taken for one
_MOST_STEPS: Final = 32
_PASSED_BYTES: Final = 16  # of a text that code passes to a function
_MOST_WORDS: Final = 12  # before an entry
_MOST_ENDED: Final = 200  # characters of a line at whose end an entry may be
_CODE: Final = "<code>"  # smolagents' mark
_MOST_LINES: Final = 12  # of a list without marks
_NO_LIST: Final = re.compile(r"[={}\[\];<>\\]|\w\(|\n\s*\n|.{120}|[,:!]$", re.MULTILINE)
_LABEL: Final = re.compile(": |\uff1a")
_ENDS: Final = ".!?\u3002"
_MOST_QUOTED: Final = 16 << 10  # characters of a message in which entries are looked for
_BULLETS: Final = "0123456789.)*-\u2022 "
_QUOTED: Final = re.compile(  # no key of JSON, or in code
    r"""\"([^"\\\n]{6,})"(?!:)|(?<=[(=,\[{ ])'([^'\\\n]{6,})'(?=[),\]}])"""
)
_PASSED: Final = re.compile(r"""\w\((?:\w+ ?= ?)?["']([^"'\\\n]{6,})["']""")  # to a function
_FIELD: Final = re.compile(r"^\[\[ ## \w+ ## \]\]$", re.MULTILINE)  # DSPy's mark before a field
_ANSWER: Final = 1  # kinds of items, which are added up
SYSTEM: Final = 2  # of the system prompt
_NAMED: Final = 4  # may have ids of tool calls


class Said(NamedTuple):
    """A conversation as digests of its beginnings, and the places of its answers, less those at its end, which the
    next answer continues."""

    items: list[Item]
    kinds: bytes  # see `kinds_of`
    digests: list[Digest]
    answers: list[int]
    question: Digest  # of what is before those at the end
    kept: dict[Item, Digest]  # what lineage keeps answers by, once it was asked for

    def of_kind(self, kind: int) -> list[int]:
        """The places of the items of a kind."""
        return [place for place, each in enumerate(self.kinds) if each & kind]

    def answer_after(self, place: int) -> int | None:
        """The place of the first answer after a place."""
        return next((answer for answer in self.answers if answer > place), None)

    def latest_first(self) -> Iterator[tuple[int, int]]:
        """Where answers begin and end, the latest one first: calls and texts without anything between them are one."""
        last = len(self.answers)
        while last:
            end = self.answers[last - 1] + 1
            begin = end
            while last and self.answers[last - 1] == begin - 1:
                begin, last = begin - 1, last - 1
            yield begin, end


def said_in(items: list[Item], kinds: bytes, digests: list[Digest], start: Digest, kept: dict[Item, Digest]) -> Said:
    """A conversation as digests, each of which begins with `start`."""
    answers = [place for place, kind in enumerate(kinds) if kind & _ANSWER]
    end = len(items)
    while answers and answers[-1] == end - 1:
        end = answers.pop()
    return Said(items, kinds, digests, answers, digests[end - 1] if end else start, kept)


def kinds_of(items: list[Item]) -> bytes:
    """The kind of each item, in a byte, so that what was read before need not be looked at again."""
    kinds, unread = bytearray(), _MOST_CHARACTERS
    for item in reversed(items):
        kind = _ANSWER if is_answer(item) else SYSTEM if item[:2] == ("message", "system") else 0
        if item[0] in ("call", "result"):
            kind |= _NAMED
        elif item[0] == "message" and unread > 0:
            text = _text_of(item)
            unread -= len(text)
            if ("_" in text or "-tool-" in text) and any(mark in text for mark in _ID_MARKS):
                kind |= _NAMED
        kinds.append(kind)
    kinds.reverse()
    return bytes(kinds)


def is_answer(item: Item) -> bool:
    """Whether a model said an item: a text or a tool call."""
    return item[0] == "call" or (item[0] == "message" and item[1] == "assistant")


def is_input(item: Item) -> bool:
    """Whether a model was told an item, and not as its system prompt."""
    return item[0] != "call" and (item[0] != "message" or item[1] not in ("assistant", "system"))


def without_system(items: list[Item]) -> list[Item]:
    """The items without those of the system prompt."""
    return [item for item in items if item[1] != "system" or item[0] != "message"]


def arguments_of(item: Item) -> Iterator[str]:
    """The texts that a tool call passes on."""
    yield from map(text_of, values_in(item[3]))


def steps_in(text: str) -> list[tuple[str, str]]:
    """The steps that a text may hand on, without numbers and dots, each with how it may come back.

    As a whole "text" may its long lines, and the long texts in quotation marks, as in JSON; as an "entry" of another
    list the entries of lists, and these texts, for which fewer bytes are enough. A few short lines that follow each
    other are a list, too, unless they may be code or a letter. As a "line" of a longer text may what code passes on.
    """
    lines = [line for line in map(str.strip, islice(text.splitlines(), _MOST_STEPS)) if line]
    quoted = list(_quoted_in(text))
    texts = (*(line.lstrip(_BULLETS) for line in lines), *quoted)
    is_list = 1 < len(lines) <= _MOST_LINES and not _NO_LIST.search(text)
    entries = (*(line.lstrip(_BULLETS) for line in lines if is_list or line[0] in _BULLETS), *quoted)
    code = _PASSED.findall(text)[:_MOST_STEPS] if _CODE in text else []
    passed = [each for each in code if each.count(" ") > 1 or not each.isascii()]
    ways = (("entry", entries, _ENTRY_BYTES), ("line", passed, _PASSED_BYTES))
    parts = [(way, each.rstrip(_ENDS)) for way, found, least in ways for each in found if utf8_bytes(each) >= least]
    return [*(("text", each) for each in texts if utf8_bytes(each) >= _STEP_BYTES), *parts]


def quotes_in(text: str) -> Iterator[tuple[str, str]]:
    """What may be an entry of another list in the first lines of a text: alone, behind a label, or at the end of the
    only line, and not in a list. Each is an "entry", and a "line" as well if it is not the whole text, or in quotes."""
    text = text[:_MOST_QUOTED].strip()
    for line in map(str.strip, islice(text.splitlines(), _MOST_STEPS)):
        if line and line[0] not in _BULLETS:
            words = line.split(" ", _MOST_WORDS) if line == text and len(text) <= _MOST_ENDED else []
            ends = (" ".join(words[at:]) for at in range(1, len(words)))
            for each in (line, _LABEL.split(line, 1)[-1].lstrip(_BULLETS), *ends):
                yield from ((way, each.rstrip(_ENDS)) for way in ("entry", *(["line"] if each != text else [])))
    yield from (("entry", each.rstrip(_ENDS)) for each in _quoted_in(text))


def _quoted_in(text: str) -> Iterator[str]:
    return (found[1] or found[2] for found in islice(_QUOTED.finditer(text), _MOST_STEPS))


def values_in(text: str) -> list[str]:
    """The texts in a JSON object, or in an answer that has DSPy's fields; none if it is neither."""
    if _FIELD.match(text):
        return [field for each in _FIELD.split(text, _MOST_ARGUMENTS) if (field := each.strip())]
    try:
        found = json.loads(text) if text.startswith("{") else None
    except (ValueError, RecursionError):
        return []
    values = islice(found.values(), _MOST_ARGUMENTS) if isinstance(found, dict) else ()
    return [value for value in values if isinstance(value, str)]


def ids_in(said: Said) -> Iterator[tuple[int, str]]:
    """The ids of tool calls in a conversation, with the places of their items, the latest first.

    Some clients write calls into texts, with their ids.
    """
    left = _MOST_IDS
    for place in reversed(said.of_kind(_NAMED)):
        item = said.items[place]
        if item[0] in ("call", "result"):
            if CALL_ID.fullmatch(item[1]):
                yield place, item[1]
        elif left > 0:
            found = _ID_IN_TEXT.findall(_text_of(item))[-left:]
            left -= len(found)
            yield from ((place, each) for each in reversed(found))


def _text_of(message: Item) -> str:
    return message[4] if len(message) == 5 else "\0".join(message[4::2])
