"""What models answered and what they had been asked, kept as evidence of a program."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final, NamedTuple

from weft.core.identity.conversations import arguments_of, values_in
from weft.core.identity.items import Digest, Item
from weft.core.identity.pieces import PIECE, folded, span_of
from weft.core.ids import ProgramId
from weft.core.trace.prefixes import common_prefix

LONG_BYTES: Final = 64  # folded, of a text that tells by itself whose model wrote it: about 80 characters
SEARCHED: Final = 256 << 10  # characters of a request
NEW_BYTES: Final = 32  # of these, in pieces that nobody else has: more than a piece at the edge of what others have
SHORT_BYTES: Final = 16  # folded, of a text that tells something beside another one
MOST_OWNERS: Final = 64  # of an answer
KEPT_BYTES: Final = 2048  # folded, of a text
PROMPT_BYTES: Final = 16 << 10  # folded, of a prompt that is kept
_KEYS_A_SIZE: Final = 32
SEPARATOR: Final = b"\0"
_END_BYTES: Final = 40  # folded, of a question that a client has changed at its beginning


class Sample(NamedTuple):
    """The beginning and the end of a folded text, which may overlap."""

    head: bytes
    tail: bytes
    length: int

    def is_part_of(self, text: bytes) -> bool:
        """Whether the text is in another one, or is what the other one was before something was inserted."""
        if self.length < SHORT_BYTES:
            return False
        return (len(self.head) == self.length and self.head in text) or self._is_around(text)

    def is_related_to(self, text: bytes) -> bool:
        """Whether two texts are one, or one is the other with something added to it."""
        if self.length == len(text):
            return text.startswith(self.head) and text.endswith(self.tail)
        if len(text) < SHORT_BYTES:
            return False
        return text in self.head or text in self.tail or self.is_part_of(text) or self._is_around(text)

    def _is_around(self, text: bytes) -> bool:
        """Whether the shorter one of two texts is the longer one without something inside."""
        return sum(self.common_with(text)) >= min(self.length, len(text), len(self.head) + len(self.tail))

    def is_nearly(self, other: Sample) -> bool:
        """Whether two texts are the same but for a tenth, such as a date or a folder, as far as the samples go."""
        most, kept = max(self.length, other.length), max(len(self.head), len(other.head)) + len(self.tail)
        if self == other or 10 * abs(self.length - other.length) > most:
            return self == other
        return 10 * self.shared_with(other) >= 9 * min(most, kept)

    def is_like(self, other: Sample) -> bool:
        """Whether two system prompts are mostly the same, such as with another time of day."""
        if not self.length or not other.length:
            return self.length == other.length
        return 2 * self.shared_with(other) >= min(len(self.head), len(other.head))

    def is_of_another(self, other: Sample) -> bool:
        """Whether two system prompts, one of which may have grown, are of two agents."""
        begin, least = common_prefix(self.head, other.head), min(len(self.head), len(other.head))
        is_as_long = 10 * abs(self.length - other.length) <= max(self.length, other.length)
        return 2 * begin < least and not (is_as_long and self.is_like(other))

    def shared_with(self, other: Sample) -> int:
        """How many bytes two samples begin and end with in common."""
        return common_prefix(self.head, other.head) + common_prefix(self.tail[::-1], other.tail[::-1])

    def common_with(self, text: bytes) -> tuple[int, int]:
        """How many bytes two texts begin and end with in common."""
        return common_prefix(self.head, text), common_prefix(self.tail[::-1], text[: -len(self.tail) - 1 : -1])


def sample_of(text: bytes, kept_bytes: int = KEPT_BYTES) -> Sample:
    """The sample of a folded text."""
    if len(text) <= kept_bytes:
        return Sample(text, text, len(text))
    half = kept_bytes // 2
    return Sample(text[:half], text[-half:], len(text))


class Before:
    """A message before an answer, which is folded only if it is not the same as another one.

    Args:
        item: The message.
    """

    def __init__(self, item: Item) -> None:
        self._item = item
        self.key = hash(item)
        self.call_id = item[1] if item[0] == "result" else ""  # of the tool call whose result it is

    @cached_property
    def text(self) -> bytes:
        """Its texts, folded."""
        return folded_texts([self._item])


class Question(NamedTuple):
    """What an answer was given to."""

    asked: Sample  # the message before it
    user: Sample  # the latest message of the user before it
    system: Sample  # the system prompt
    before: Digest | None = None  # the answer before that a model gave
    lead: frozenset[Digest] | None = None  # long answers before, none of which is the program's; None: one is
    call_id: str = ""  # of the tool call whose result was asked about
    place: int = 0  # how many answers stood before it
    is_example: bool = False  # a request had it with this answer before any model gave that
    next: Sample | None = None  # what the program told its model behind the answer
    is_passed_on: bool = False  # that was another agent of the program
    key: int = 0  # of the message before it; see `Before`

    def is_one_of(self, told: list[Before]) -> bool:
        """Whether it is one of some messages. Clients may leave out calls behind it."""
        for each in told:
            if each.key == self.key or (self.call_id == each.call_id and self.asked.is_related_to(each.text)):
                return True
            if not each.call_id and self.user.is_related_to(each.text):
                return True
        return False

    def is_example_in(self, text: bytes, answer: bytes) -> bool:
        """Whether a text has the end of it, or not all of its answer, and not what its program went on with, as where
        it is another client's example."""
        has_gone_on = self.next is not None and not self.next.is_part_of(text)
        return self.is_example or (has_gone_on and (is_asked(self.asked.tail, text) or answer not in text))


@dataclass(slots=True, eq=False)
class GivenAnswer:
    """A text, a tool call without its id, or an argument of a tool call, as models wrote it."""

    start: Digest  # what the digests of its conversations begin with
    text: bytes  # its first bytes, folded
    owners: dict[ProgramId, Question | None] = field(default_factory=dict)  # with what they were asked, if it is kept
    is_crowded: bool = False  # more programs wrote it than are kept
    places: dict[int, int] = field(default_factory=dict)  # in the text, by key, of pieces new to models or of several

    def size(self) -> int:
        """For how many answers it counts."""
        return max(1, len(self.owners)) + len(self.places) // _KEYS_A_SIZE

    def add(self, program_id: ProgramId, question: Question | None) -> None:
        """A program's model wrote it."""
        if program_id in self.owners or len(self.owners) < MOST_OWNERS:
            self.owners[program_id] = question or self.owners.get(program_id)
        else:
            self.is_crowded = True

    def is_only_of(self, program_id: ProgramId) -> bool:
        """Whether no other program's model wrote it."""
        return len(self.owners) == 1 and program_id in self.owners

    def asked(self, told: list[Before]) -> dict[ProgramId, Question]:
        """The programs that were given it as an answer to one of some messages, if that is no client's example."""
        found = {each: known for each, known in self.owners.items() if known is not None and known.is_one_of(told)}
        return found if not any(each.is_example for each in found.values()) else {}

    def bytes_in(self, text: bytes, found: Collection[int]) -> tuple[int, int]:
        """How many bytes of it are in a folded text, and how many of these are in pieces that nobody else has: those
        whose keys were found to be of one answer only."""
        total, pieces, end, piece_end = 0, 0, 0, 0
        for key, place in sorted(self.places.items(), key=lambda each: each[1]):
            at = text.find(self.text[place : place + PIECE]) if key in found else -1
            if at < 0:
                continue
            pieces += place + PIECE - max(place, piece_end)
            piece_end = place + PIECE
            if piece_end > end:  # more of the answer may be around it
                begin = place - common_prefix(self.text[:place][::-1], text[max(0, at - place) : at][::-1])
                begin, end = max(begin, end), place + common_prefix(self.text[place:], text[at : at + len(self.text)])
                total += end - begin
        return total, pieces


class Parts(NamedTuple):
    """What an answer consists of, folded."""

    texts: tuple[bytes, ...]  # its texts, the names of the tools that it calls, and their arguments
    lines: tuple[bytes, ...]  # of these texts, or of a JSON object the values


def parts_of(answer: list[Item]) -> Parts:
    """The parts of an answer."""
    texts = [
        text for item in answer for text in ((item[2], *arguments_of(item)) if item[0] == "call" else texts_of(item))
    ]
    lines = (line for text in texts for line in (values_in(text) or text.splitlines()))
    return Parts(*(tuple(filter(None, map(folded, each))) for each in (texts, lines)))


@dataclass(slots=True, eq=False)
class Prompt:
    """What a program told its model."""

    start: Digest  # what the digests of its conversations begin with
    program_id: ProgramId
    text: Sample  # what was new to the model, without the system prompt
    keys: list[int]  # of its first and its last pieces, if possible of pieces that no model was told before
    is_new: bool  # no model was told these pieces before
    answers: list[Parts] = field(default_factory=list)
    is_shared: bool = False  # another program told its model the same
    span: tuple[int, int] | None = None  # where the first and the last of its keys are, once that was asked
    is_forgotten: bool = False  # because there was no room for it

    def size(self) -> int:
        """For how many prompts it counts."""
        return max(1, len(self.answers)) + len(self.text.head) // KEPT_BYTES

    def is_in(self, text: bytes) -> bool:
        """Whether a text is this prompt, or this prompt with something inserted."""
        if len(text) < self.text.length:
            return False
        return sum(self.text.common_with(text)) >= min(self.text.length, len(self.text.head) + len(self.text.tail))

    def has_grown_to(self, text: bytes) -> bool:
        """Whether a text is this prompt with something inserted, in which there is an answer to it."""
        if not self.is_in(text) or len(text) <= self.text.length:
            return False
        before, after = self.text.common_with(text)
        before = min(before, self.text.length)
        inserted = text[before : len(text) - min(after, max(0, self.text.length - before))]
        return any(_are_in(each.texts, inserted) for each in self.answers)

    def begins(self, text: bytes) -> int:
        """How many bytes a text begins with as this prompt, if they have all that only its program was told; else 0."""
        before = min(common_prefix(self.text.head, text), self.text.length)
        if not self.is_new or before < PIECE:
            return 0
        self.span = self.span or span_of(self.text.head, self.keys)
        return before if self.span[0] + PIECE <= before >= self.span[1] else 0

    def goes_on_in(self, text: bytes) -> bool:
        """Whether a text begins as this prompt, with all that only its program was told, and has an answer behind it:
        it is the same template with another end."""
        before = self.begins(text)
        return before > 0 and any(self._is_mostly_in(each.lines, text[before:]) for each in self.answers)

    def _is_mostly_in(self, lines: tuple[bytes, ...], text: bytes) -> bool:
        """Whether most of an answer is in a text, without the lines that the prompt has as well."""
        own = [line for line in lines if line not in self.text.head and line not in self.text.tail]
        found = sum(len(line) for line in own if line in text)
        return found >= SHORT_BYTES // 2 and 2 * found > sum(map(len, own))


def _are_in(parts: tuple[bytes, ...], text: bytes) -> bool:
    """Whether the texts of an answer are in another text, or a long part of them."""
    runs = (part[place : place + PIECE] for part in parts for place in range(0, len(part) - PIECE + 1, PIECE // 4))
    return all(part in text for part in parts) or any(run in text for run in runs)


def texts_of(item: Item) -> Iterator[str]:
    """What is said in an item: no images, and no names."""
    if item[0] == "call":
        yield from item[2:4]
    elif item[0] != "other":
        first = 3 if item[0] == "message" else 2
        yield from (text for kind, text in zip(item[first::2], item[first + 1 :: 2], strict=True) if kind == "text")


def folded_texts(items: list[Item]) -> bytes:
    """All texts of items in one, folded."""
    return SEPARATOR.join(folded(text) for item in items for text in texts_of(item))


def searched_texts(items: list[Item]) -> tuple[bytes, bool]:
    """The texts of items in one, folded, or of very long ones the beginning and the end. Returns whether it is all.

    A search takes 15 ms a MiB, during which a server does nothing else.
    """
    text = "\0".join(text for item in items for text in texts_of(item))
    if len(text) <= SEARCHED:
        return folded(text), True
    return folded(text[: SEARCHED // 2]) + SEPARATOR + folded(text[-SEARCHED // 2 :]), False


def is_asked(question: bytes, text: bytes) -> bool:
    """Whether a text has the end of a question, or of a sample's tail of it."""
    return len(question) >= SHORT_BYTES and question[-_END_BYTES:] in text
