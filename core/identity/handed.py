"""What agents of a team hand on: texts of tool calls, steps of plans, entries of lists, and short answers."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping
from itertools import islice, takewhile
from typing import Final, NamedTuple

from weft.core.identity.conversations import arguments_of, is_answer, quotes_in, values_in, without_system
from weft.core.identity.given import (
    LONG_BYTES,
    SEPARATOR,
    SHORT_BYTES,
    Question,
    Sample,
    folded_texts,
    is_asked,
    sample_of,
    texts_of,
)
from weft.core.identity.items import SILENCE, Digest, Item, digest_of
from weft.core.identity.pieces import folded
from weft.core.identity.recent import Recent
from weft.core.identity.states import SEVERAL
from weft.core.ids import ProgramId, ThreadId

_MOST_MESSAGES: Final = 16  # the latest, in which entries are looked for
_MOST_TURNS: Final = 256  # of a scope
_MOST_GIVERS: Final = 10_000  # of short answers
_TURN_BYTES: Final = 8 << 10  # folded, of a text of a turn; longer ones are evidence by themselves
_CHOICE_BYTES: Final = 64  # folded, of a text that chooses who speaks next
_SHORTEST_BYTES: Final = 4  # folded, of such a text
_MOST_LINES: Final = 4  # of an answer, that tell something
_MOST_CANNED: Final = 4  # items, the latest, among which are answers that nobody gave
_MOST_EARLIER: Final = 4  # answers of a program before its latest
_MOST_SEARCHED: Final = 32 << 10  # characters of a request in which short answers are looked for
_SEARCHED_BYTES: Final = 2 << 10  # folded, of a text in which these are looked for, which takes 1 ms for 256 programs
_MARKS: Final = re.compile(rb"(?:[^a-z0-9\x80-\xff]|</[a-z0-9]+){0,32}")  # of punctuation, and ends of tags
_TAG: Final = re.compile(rb"</([a-z0-9]+)")
_FIELD: Final = b"[[##"  # folded, of DSPy's mark before a field
_BEFORE_VALUES: Final = (b"]", b"[", b",")  # folded, of a field: its mark, or a place in a list
_ENDS: Final = b".,:;!?"  # of an answer, that clients may leave out
_WORD: Final = re.compile(r"[A-Z]?[a-z]{4,}|[A-Z]{5,}")


class HandedText(NamedTuple):
    """A text that a model handed to an agent."""

    program_id: ProgramId
    kind: str  # of the agent; "" if the call does not say
    asked: bytes  # the end of what the model was told, folded
    thread_id: ThreadId | None = None  # of the call that hands it
    caller: int | None = None  # the number of the agent that hands it on by a tool call


class Handed:
    """The texts of answers that may become an agent's task, until their tool call returns.

    Args:
        most: How many are kept.
        is_open: Whether a program has not ended.
    """

    def __init__(self, most: int, is_open: Callable[[ProgramId], bool]) -> None:
        self._is_open = is_open
        self._tasks: Recent[HandedText] = Recent(most)

    def add(
        self, scope: str, start: Digest, task: HandedText, texts: list[tuple[str, str]], told: Collection[str]
    ) -> list[Digest]:
        """Note texts that may be a whole message, and entries that may stand in one. Returns their digests. Those that
        the model was told are no tasks, but then they are no other program's either."""
        is_new = {digest_of(start, *each): each[1] not in told for each in texts}
        for digest, is_task in is_new.items():
            known = self._tasks.get(scope, digest)
            if known is not None and known.program_id != task.program_id:
                self._tasks.put(scope, digest, task._replace(program_id=SEVERAL))
            elif is_task:
                self._tasks.put(scope, digest, task)
        return [digest for digest, is_task in is_new.items() if is_task]

    def drop(self, scope: str, digests: Iterable[Digest]) -> None:
        """Their tool call has returned, so they are nobody's task any more."""
        for digest in digests:
            self._tasks.pop(scope, digest)

    def find(self, scope: str, start: Digest, items: list[Item], told: bytes) -> HandedText | None:
        """What a request has of one program: a message of the user, or an entry of a list in it.

        An entry is no evidence beside the end of what its model was told, as in an example, or if that was too short
        to tell. `items` are new in the request, and `told` has their texts, folded.
        """
        texts = [text for item in reversed(items) if item[:2] == ("message", "user") for text in texts_of(item)]
        whole = (self._get(scope, digest_of(start, "text", text)) for text in texts)
        if (task := next(filter(None, whole), None)) is not None:
            return task
        quotes = (each for text in texts[:_MOST_MESSAGES] for each in quotes_in(text))
        entries = (self._get(scope, digest_of(start, *each)) for each in quotes)
        found = {task.program_id: task for task in entries if task is not None}
        tasks = [task for task in found.values() if len(task.asked) >= SHORT_BYTES and task.asked not in told]
        return tasks[0] if len(found) == len(tasks) == 1 else None

    def _get(self, scope: str, digest: Digest) -> HandedText | None:
        task = self._tasks.get(scope, digest)
        return task if task and task.program_id != SEVERAL and self._is_open(task.program_id) else None


class _Turn(NamedTuple):
    """A call of a program and its answer, folded and in lower case."""

    question: bytes  # what the program told its model first, without the system prompt
    told: bytes  # what it told its model last, without the system prompt
    system: Sample  # of its system prompt
    answer: bytes = b""  # what its model said to that; b"": it has not answered, called a tool, or said too much
    earlier: tuple[tuple[bytes, bytes], ...] = ()  # what it was told and said before, if it was short; the latest first
    lines: tuple[bytes, ...] = ()  # the first ones of that which are neither short nor long
    words: tuple[bytes, ...] = ()  # in the names and the arguments of the tools that it called
    fields: tuple[tuple[bytes, bytes], ...] = ()  # told and answered, of DSPy, behind what stands before a value
    choices: frozenset[bytes] = frozenset()  # the answer, and the texts in its JSON, if they are short


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

    def asked(self, scope: str, program_id: ProgramId, told: bytes, system: Sample) -> None:
        """Note what a program tells its model that it had not told before, folded, and its system prompt."""
        turns = self._of_scope.setdefault(scope, OrderedDict())
        known, told = turns.pop(program_id, None), _kept(told).lower()
        said = ((known.told, known.answer), *known.earlier)[:_MOST_EARLIER] if known else ()
        earlier = tuple(each for each in said if 0 < len(each[1]) < LONG_BYTES)
        turns[program_id] = _Turn(known.question if known else told, told, system, earlier=earlier)
        if len(turns) > _MOST_TURNS:
            turns.popitem(last=False)

    def answered(self, scope: str, program_id: ProgramId, answer: list[Item], prompt: list[Item]) -> None:
        """Note the answer to that. `prompt` is all that the model was told."""
        turns = self._of_scope.get(scope, OrderedDict())
        turn = turns.get(program_id)
        if turn is not None:
            calls = [item for item in answer if item[0] == "call"]
            text = b"" if calls else _kept(folded_texts(answer).lower().strip(_ENDS))
            named = (each for call in calls for each in (call[2], *arguments_of(call)) if len(each) <= _CHOICE_BYTES)
            words = tuple({folded(word).lower() for each in named for word in _WORD.findall(each)})
            lines = [line for line in _lines_of(answer) if len(line) < LONG_BYTES][:_MOST_LINES] if text else []
            values = [value for item in answer if text for each in texts_of(item) for value in values_in(each)]
            parts = [part.lower().strip(_ENDS) for part in map(folded, values)]
            choices = frozenset(each for each in (text, *parts) if _SHORTEST_BYTES <= len(each) < LONG_BYTES)
            middle = [each for each in parts if SHORT_BYTES <= len(each) < LONG_BYTES and text.startswith(_FIELD)]
            told = [folded(part).lower() for item in prompt for part in texts_of(item)] if middle else []
            new = (each for each in middle if not any(each in part for part in told))
            fields = tuple((turn.told, mark + each) for each in islice(new, _MOST_LINES) for mark in _BEFORE_VALUES)
            turns[program_id] = turn._replace(
                answer=text, words=words, lines=tuple(lines), fields=fields, choices=choices
            )
            exchange = [digest_of(turn.told + SEPARATOR + text)] if text and len(turn.told) >= SHORT_BYTES else []
            whole = {text} if SHORT_BYTES <= len(text) < LONG_BYTES else ()
            for each in {*whole, *lines, *(field for _told, field in fields), *exchange}:
                known = self._givers.get(scope, each)
                is_new = known is None and each not in turn.told and each not in turn.question
                self._givers.put(scope, each, program_id if is_new or known == program_id else SEVERAL)

    def find(
        self, scope: str, items: list[Item], system: bytes, given: Mapping[Item, Mapping[ProgramId, Question | None]]
    ) -> ProgramId | None:
        """The only open program whose task a request has with its latest answer, or with answers that it was given.

        The request's system prompt is folded. `given` has the owners of those answers that models gave.
        """
        if sum(len(text) for item in without_system(items) for text in texts_of(item)) > _MOST_SEARCHED:
            return None
        texts = [folded_texts([item]).lower() for item in without_system(items)]
        if not texts:
            return None
        text, around = SEPARATOR.join(texts), system.lower()
        first = [item for item in takewhile(is_answer, without_system(items)) if item in given]
        told = [*first, *(item for item in items if item == SILENCE or not is_answer(item))]
        is_told, plain = len(told) == len(items), folded_texts(without_system(told)).lower()
        tasks = _lines_of(without_system(told)) if not is_told else []
        lines = _lines_of([each for each in items[-_MOST_CANNED:] if is_answer(each) and each not in given])
        inside, likely = SEPARATOR.join(lines), sample_of(system)
        is_own = any(
            len(folded_texts([item])) >= SHORT_BYTES or (had is not None and had.place and had.system.is_like(likely))
            for item, owners in given.items()
            for had in (owners.values() if len(owners) == 1 else ())
        )
        asked, is_short = text[:-SHORT_BYTES], len(text) <= _SEARCHED_BYTES  # its own question stands at its end
        last = texts[-1].strip(_ENDS) if items[-1] in given else None

        def is_of(part: bytes, where: bytes, program_id: ProgramId) -> bool:
            return part in where and self._givers.get(scope, part) == program_id

        def is_said(program_id: ProgramId, turn: _Turn) -> bool:
            pairs = ((turn.told, turn.answer), *turn.fields, *(turn.earlier if is_short else ()))
            said = [each for each in pairs if each[1] in text]
            had = [SEPARATOR.join(each) for each in said if is_told and 0 <= text.find(each[0]) < text.rfind(each[1])]
            if sum(self._givers.get(scope, digest_of(each)) == program_id for each in had) > 1:
                return True
            for question, answer in said:
                is_new = is_of(answer, plain, program_id) and not is_asked(question, asked)
                if is_new or (is_told and _ends_with(text, question, answer)):
                    return True
            if is_told or is_asked(turn.told, asked):
                return False
            # A line of its own is as likely another model's.
            parts = (line for line in turn.lines if line in inside and line not in lines)
            is_in = is_of(turn.answer, text, program_id) or any(is_of(line, inside, program_id) for line in parts)
            return is_in and any(line in turn.question for line in tasks)  # which takes long to look for

        def is_chosen(turn: _Turn) -> bool:
            """Whether an agent gets the last message of a turn, or parts of it, under a system prompt that has what the
            model chose. If it has what models chose for others, too, it may be the same choice in other words."""
            if len(text) < SHORT_BYTES or any(each not in turn.told for each in texts):
                return False
            others = (each for each in turns.values() if text == turn.told and each.system.is_like(turn.system))
            said = {choice for each in (turn, *others) for choice in each.choices if choice in around}
            return (text != turn.told or not turn.system.is_like(likely)) and said != set() and said <= turn.choices

        found = set()
        turns = self._of_scope.get(scope, OrderedDict())
        for program_id, turn in turns.items():
            has_task = is_own and len(turn.question) >= SHORT_BYTES and texts[0] == turn.question
            is_judged = last is not None and turn.told != b"" and (texts[-2:-1], last) == ([turn.told], turn.answer)
            is_next = is_told and (_goes_on(turn, text, around) or (len(text) <= len(turn.told) and is_chosen(turn)))
            if has_task or is_judged or is_next or is_said(program_id, turn):
                had = [each.get(program_id) for each in given.values()]
                if self._is_open(program_id) and not any(each is None or each.is_example for each in had):
                    found.add(program_id)
        return found.pop() if len(found) == 1 else None


def _ends_with(text: bytes, told: bytes, answer: bytes) -> bool:
    """Whether a text ends with an answer, somewhere behind its question: it is to be judged, or gets a title. Behind an
    example there would be another question."""
    if min(len(told), 2 * len(answer)) < SHORT_BYTES:
        return False
    at = text.rfind(answer)
    marks = _MARKS.fullmatch(text, at + len(answer)) if at >= 0 else None
    return marks is not None and told in text[:at] and all(b"<" + tag in text[:at] for tag in _TAG.findall(marks[0]))


def _goes_on(turn: _Turn, text: bytes, system: bytes) -> bool:
    """Whether an agent gets the task of a turn, and behind it the turn's answer, or the name that it was called by."""
    task = turn.question + SEPARATOR
    if len(task) > SHORT_BYTES and text.startswith(task):
        behind = text[len(task) :]
        is_said = len(turn.answer) >= SHORT_BYTES // 2 and turn.answer in behind
        is_said = is_said or (turn.answer != b"" and behind.partition(SEPARATOR)[0].strip(_ENDS) == turn.answer)
        return is_said or any(word in behind or word in system for word in turn.words if word not in task)
    return False


def _lines_of(items: list[Item]) -> list[bytes]:
    """The lines of items that are not short, folded and in lower case."""
    lines = (folded(line).lower() for item in items for text in texts_of(item) for line in text.splitlines())
    return [line for line in lines if len(line) >= SHORT_BYTES]


def _kept(text: bytes) -> bytes:
    return text if len(text) <= _TURN_BYTES else b""
