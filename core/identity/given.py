"""What models answered and what they had been asked, kept as evidence of a program."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Final, NamedTuple

from weft.core.identity.conversations import arguments_of, is_answer, values_in, without_system
from weft.core.identity.items import Digest, Item
from weft.core.identity.pieces import PIECE, folded, span_of
from weft.core.identity.recent import Recent
from weft.core.identity.states import SEVERAL
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
_SEPARATOR: Final = b"\0"
_MOST_TURNS: Final = 256  # of a scope
_MOST_GIVERS: Final = 10_000  # of short answers
_TURN_BYTES: Final = 8 << 10  # folded, of a text of a turn; longer ones are evidence by themselves
_CHOICE_BYTES: Final = 64  # folded, of a text that chooses who speaks next
_END_BYTES: Final = 40  # folded, of a question that a client has changed at its beginning
_SHORTEST_BYTES: Final = 4  # folded, of such a text
_MOST_LINES: Final = 4  # of an answer, that tell something
_MOST_CANNED: Final = 4  # items, the latest, among which are answers that nobody gave
_MOST_EARLIER: Final = 4  # answers of a program before its latest
_SEARCHED_BYTES: Final = 2 << 10  # folded, of a text in which these are looked for, which takes 1 ms for 256 programs
_MARKS: Final = re.compile(rb"(?:[^a-z0-9\x80-\xff]|</[a-z0-9]+){0,32}")  # of punctuation, and ends of tags
_TAG: Final = re.compile(rb"</([a-z0-9]+)")
_ENDS: Final = b".,:;!?"  # of an answer, that clients may leave out
_WORD: Final = re.compile(r"[A-Z]?[a-z]{4,}|[A-Z]{5,}")


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

    def is_one_of(self, told: list[tuple[bytes, str]]) -> bool:
        """Whether it is one of some texts; see `GivenAnswer.asked`. Clients may leave out calls behind it."""
        return any(
            (self.call_id == call_id and self.asked.is_related_to(text))
            or (not call_id and self.user.is_related_to(text))
            for text, call_id in told
        )

    def is_example_in(self, text: bytes, answer: bytes) -> bool:
        """Whether a text has the end of it, or not all of its answer, and not what its program went on with, as where
        it is another client's example."""
        has_gone_on = self.next is not None and not self.next.is_part_of(text)
        return self.is_example or (has_gone_on and (_is_asked(self.asked.tail, text) or answer not in text))

    def has_system_like(self, other: Sample) -> bool:
        """Whether another system prompt is mostly the same, such as one with another time of day."""
        if not self.system.length or not other.length:
            return self.system.length == other.length
        return 2 * self.system.shared_with(other) >= min(len(self.system.head), len(other.head))


@dataclass(slots=True, eq=False)
class GivenAnswer:
    """A text, a tool call without its id, or an argument of a tool call, as models wrote it."""

    start: Digest  # what the digests of its conversations begin with
    text: bytes  # its first bytes, folded
    owners: dict[ProgramId, Question | None] = field(default_factory=dict)  # with what they were asked, if it is kept
    is_crowded: bool = False  # more programs wrote it than are kept
    keys: list[int] = field(default_factory=list)  # of pieces that no model was told, or that other models wrote, too
    places: list[int] = field(default_factory=list)  # of these pieces in the text

    def size(self) -> int:
        """For how many answers it counts."""
        return max(1, len(self.owners)) + len(self.keys) // _KEYS_A_SIZE

    def add(self, program_id: ProgramId, question: Question | None) -> None:
        """A program's model wrote it."""
        if program_id in self.owners or len(self.owners) < MOST_OWNERS:
            self.owners[program_id] = question or self.owners.get(program_id)
        else:
            self.is_crowded = True

    def is_only_of(self, program_id: ProgramId) -> bool:
        """Whether no other program's model wrote it."""
        return len(self.owners) == 1 and program_id in self.owners

    def give_up(self, key: int) -> None:
        """A later answer of its program has the same piece, as a draft that was mended has."""
        at = self.keys.index(key)
        del self.keys[at], self.places[at]

    def asked(self, told: list[tuple[bytes, str]]) -> dict[ProgramId, Question]:
        """The programs that were given it as an answer to one of some questions, if that is no client's example.

        Args:
            told: The folded texts before the answer, each with the id of the tool call whose result it is, or "".
        """
        found = {each: known for each, known in self.owners.items() if known is not None and known.is_one_of(told)}
        return found if not any(each.is_example for each in found.values()) else {}

    def bytes_in(self, text: bytes, found: Collection[int]) -> tuple[int, int]:
        """How many bytes of it are in a folded text, and how many of these are in pieces that nobody else has: those
        whose keys were found to be of one answer only."""
        total, pieces, end, piece_end = 0, 0, 0, 0
        for key, place in sorted(zip(self.keys, self.places, strict=True), key=lambda each: each[1]):
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
        least = min(self.text.length, len(self.text.head) + len(self.text.tail))
        return len(text) >= self.text.length and sum(self.text.common_with(text)) >= least

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
        if not self.is_new:
            return 0
        self.span = self.span or span_of(self.text.head, self.keys)
        before = min(common_prefix(self.text.head, text), self.text.length)
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
    return _SEPARATOR.join(folded(text) for item in items for text in texts_of(item))


def searched_texts(items: list[Item]) -> tuple[bytes, bool]:
    """The texts of items in one, folded, or of very long ones the beginning and the end. Returns whether it is all.

    A search takes 15 ms a MiB, during which a server does nothing else.
    """
    text = "\0".join(text for item in items for text in texts_of(item))
    if len(text) <= SEARCHED:
        return folded(text), True
    return folded(text[: SEARCHED // 2]) + _SEPARATOR + folded(text[-SEARCHED // 2 :]), False


class _Turn(NamedTuple):
    """A call of a program and its answer, folded and in lower case."""

    question: bytes  # what the program told its model first, without the system prompt
    told: bytes  # what it told its model last, without the system prompt
    answer: bytes = b""  # what its model said to that; b"": it has not answered, called a tool, or said too much
    earlier: tuple[tuple[bytes, bytes], ...] = ()  # what it was told and said before, if it was short; the latest first
    lines: tuple[bytes, ...] = ()  # the first ones of that which are neither short nor long
    words: tuple[bytes, ...] = ()  # in the names and the arguments of the tools that it called


class Turns:
    """The latest turns of the programs of each scope. Those unused for longest are forgotten.

    They find agents of a team that hand on too little to be found by it. A speaker is chosen by a word, and then gets
    the user's task; a task is handed on by a tool that never returns; a next agent gets the task and a short answer to
    it. The task alone is no evidence, because others may ask the same. Nor is the word. Together they are: the task
    that a program had, and behind it what its model has just said. So is a short answer alone, if only one program's
    model ever gave it, and not in words of its prompt: without the question, which would make it an example. A request
    where it stands in an answer that nobody gave needs a line of the task too, because many answers end alike.
    """

    def __init__(self, is_open: Callable[[ProgramId], bool]) -> None:
        self._is_open = is_open
        self._of_scope: dict[str, OrderedDict[ProgramId, _Turn]] = {}
        self._givers: Recent[ProgramId] = Recent(_MOST_GIVERS)  # of short answers

    def asked(self, scope: str, program_id: ProgramId, items: list[Item], told: bytes) -> None:
        """Note what a program tells its model: all items, and what it had not told before, folded, without the system
        prompt."""
        turns = self._of_scope.setdefault(scope, OrderedDict())
        known = turns.pop(program_id, None)
        is_long = len(told) > _TURN_BYTES  # and so is all that it tells
        question = known.question if known else b"" if is_long else _kept(folded_texts(without_system(items)).lower())
        said = ((known.told, known.answer), *known.earlier)[:_MOST_EARLIER] if known else ()
        earlier = tuple(each for each in said if 0 < len(each[1]) < LONG_BYTES)
        turns[program_id] = _Turn(question, _kept(told).lower(), earlier=earlier)
        if len(turns) > _MOST_TURNS:
            turns.popitem(last=False)

    def answered(self, scope: str, program_id: ProgramId, answer: list[Item]) -> None:
        """Note the answer to that."""
        turns = self._of_scope.get(scope, OrderedDict())
        turn = turns.get(program_id)
        if turn is not None:
            calls = [item for item in answer if item[0] == "call"]
            text = b"" if calls else _kept(folded_texts(answer).lower().strip(_ENDS))
            words = tuple({word for call in calls for word in _words_of(call)})
            lines = [line for line in _lines_of(answer) if len(line) < LONG_BYTES][:_MOST_LINES] if text else []
            turns[program_id] = turn._replace(answer=text, words=words, lines=tuple(lines))
            for each in {text, *lines} if SHORT_BYTES <= len(text) < LONG_BYTES else lines:
                known = self._givers.get(scope, each)
                is_new = known is None and each not in turn.told and each not in turn.question
                self._givers.put(scope, each, program_id if is_new or known == program_id else SEVERAL)

    def find(
        self, scope: str, items: list[Item], system: bytes, given: Mapping[Item, Mapping[ProgramId, Question | None]]
    ) -> ProgramId | None:
        """The only open program whose task a request has with its latest answer, or with answers that it was given.

        The request's system prompt is folded. `given` has the owners of those answers that models gave.
        """
        texts = [folded_texts([item]).lower() for item in without_system(items)]
        if not texts:
            return None
        text, around = _SEPARATOR.join(texts), system.lower()
        first = [item for item in takewhile(is_answer, without_system(items)) if item in given]
        told = [*first, *(item for item in items if not is_answer(item))]
        is_told, plain = len(told) == len(items), folded_texts(without_system(told)).lower()
        tasks = _lines_of(without_system(told)) if not is_told else []
        canned = [each for each in items[-_MOST_CANNED:] if is_answer(each) and each not in given]
        lines = _lines_of([each for each in canned if sum(map(len, each)) <= _TURN_BYTES])
        inside, likely = _SEPARATOR.join(lines), sample_of(system)
        is_own = any(
            len(folded_texts([item])) >= SHORT_BYTES or (had is not None and had.place and had.has_system_like(likely))
            for item, owners in given.items()
            for had in (owners.values() if len(owners) == 1 else ())
        )

        asked, is_short = text[:-SHORT_BYTES], len(text) <= _SEARCHED_BYTES  # its own question stands at its end

        def is_of(part: bytes, where: bytes, program_id: ProgramId) -> bool:
            return part in where and self._givers.get(scope, part) == program_id

        def is_said(program_id: ProgramId, turn: _Turn) -> bool:
            for question, answer in ((turn.told, turn.answer), *(turn.earlier if is_short else ())):
                if answer in text and (
                    (is_of(answer, plain, program_id) and not _is_asked(question, asked))
                    or (is_told and _ends_with(text, question, answer))
                ):
                    return True
            if is_told or _is_asked(turn.told, asked):
                return False
            # A line of its own is as likely another model's.
            parts = (line for line in turn.lines if line in inside and line not in lines)
            is_in = is_of(turn.answer, text, program_id) or any(is_of(line, inside, program_id) for line in parts)
            return is_in and any(line in turn.question for line in tasks)  # which takes long to look for

        found = set()
        for program_id, turn in self._of_scope.get(scope, OrderedDict()).items():
            is_asked = is_own and len(turn.question) >= SHORT_BYTES and texts[0] == turn.question
            if is_asked or is_said(program_id, turn) or (is_told and _goes_on(turn, texts, text, around)):
                had = [each.get(program_id) for each in given.values()]
                if self._is_open(program_id) and not any(each is None or each.is_example for each in had):
                    found.add(program_id)
        return found.pop() if len(found) == 1 else None


def _ends_with(text: bytes, told: bytes, answer: bytes) -> bool:
    """Whether a text ends with an answer, somewhere behind its question: it is to be judged, or gets a title. Behind an
    example there would be another question."""
    before, _found, behind = text.rpartition(answer or text)
    is_end = _MARKS.fullmatch(behind) is not None and all(b"<" + tag in before for tag in _TAG.findall(behind))
    return is_end and told in before and min(len(told), 2 * len(answer)) >= SHORT_BYTES


def _goes_on(turn: _Turn, texts: list[bytes], text: bytes, system: bytes) -> bool:
    """Whether an agent gets the task of a turn, and behind it the turn's answer, or the name that it was called by."""
    task = turn.question + _SEPARATOR
    if len(task) > SHORT_BYTES and text.startswith(task):
        behind = text[len(task) :]
        is_said = len(turn.answer) >= SHORT_BYTES // 2 and turn.answer in behind
        is_said = is_said or (turn.answer != b"" and behind.partition(_SEPARATOR)[0].strip(_ENDS) == turn.answer)
        return is_said or any(word in behind or word in system for word in turn.words if word not in task)
    is_template = SHORT_BYTES <= len(text) < len(turn.told) and all(each in turn.told for each in texts)
    return is_template and _SHORTEST_BYTES <= len(turn.answer) <= _CHOICE_BYTES and turn.answer in system


def _is_asked(question: bytes, text: bytes) -> bool:
    """Whether a text has the end of a question, or of a sample's tail of it."""
    return len(question) >= SHORT_BYTES and question[-_END_BYTES:] in text


def _lines_of(items: list[Item]) -> list[bytes]:
    """The lines of items that are not short, folded and in lower case."""
    lines = (folded(line).lower() for item in items for text in texts_of(item) for line in text.splitlines())
    return [line for line in lines if len(line) >= SHORT_BYTES]


def _kept(text: bytes) -> bytes:
    return text if len(text) <= _TURN_BYTES else b""


def _words_of(call: Item) -> Iterator[bytes]:
    for text in (call[2], *(each for each in arguments_of(call) if len(each) <= _CHOICE_BYTES)):
        yield from (folded(word).lower() for word in _WORD.findall(text))
