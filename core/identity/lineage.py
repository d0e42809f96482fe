"""Finds the program of a request that carries no id, by the messages that it continues.

A conversation after an answer is a *state*: the prompt's messages and the answer, as one digest. A request whose
messages begin with a state continues the program that reached it, or forks from it: a sub-agent that quotes the
conversation, or a turn that was edited. If several programs with the same words reached it, the connection tells which
one goes on: its latest one, if that got the answer by it, and if no other one that did has still to go on. A connection
that carries programs in turns tells nothing. Then the request may be each of theirs, and so it begins a program.

A request may quote an answer after the state that was never given, because its client changed the answer or left its
stream. It belongs to the program that has gone on from the state with the messages before that answer. If there is no
such program, the answers came from another server, and the request is no fork.

Some clients write the answer into their history with more behind it: ReAct agents add what they observed, others write
tool calls as text. So a prompt is noted with its answers' texts and the ids of their calls. A request whose latest
answer follows a known prompt, and begins with such a text or has such an id, belongs to that program.

Some clients change the system prompt from call to call, with the time for example. So a conversation is also noted
without it, and found by that if only one program ever reached it, and if nothing else says which program it is.

Some clients shorten their history: they drop the oldest messages, or put a summary in their place. So each answer is
also noted with the message before it, as an *exchange*; system messages do not count. A request whose messages are no
known conversation belongs to the program that had its latest exchange. If several programs had that one, the exchange
before it decides. An exchange that was never had ends the search, because the answers before it may be anybody's.

Some agents hand a text to another one, which starts without their history: the model writes it as an argument of a tool
call, or as its answer, and it comes back as a user's message. A request without answers belongs to the program whose
model wrote one of its messages, if no other program's model wrote the same. Only long texts count, and no text that the
model was told itself.

All digests begin with the scope of the request's API key, so no key finds another one's programs.
"""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import groupby, islice
from typing import Final, Generic, NamedTuple, TypeVar

from weft.core.identity.messages import Digest, Item, chain, digest_of, text_of
from weft.core.identity.sources import Evidence, Identity, Source
from weft.core.ids import IdSource, ProgramId

MOST_STATES: Final = 30_000  # and traces, and responses; those unused for longest are forgotten
_MOST_OWNERS: Final = 256  # of a state
_FEWEST_CHARACTERS: Final = 80  # of a text that tells whose model wrote it
_MOST_TEXTS: Final = 16  # of a message or a tool call
_SEVERAL: Final = ProgramId("")  # programs had an exchange, wrote a text, or went on with the same words

_FEWEST_OF_ANSWER: Final = 16  # characters of an answer that may begin a longer one
_CALL_ID: Final = re.compile(r"[A-Za-z0-9_-]{12,128}")  # of a tool call, long enough to be no word
_MOST_MARKS: Final = 16  # of the answers to a prompt
_MOST_IDS: Final = 1_000  # that are looked for in a text

V = TypeVar("V")
_Mark = tuple[int, Digest]


class Placed(NamedTuple):
    """Where a request belongs.

    Attributes:
        identity: Its program.
        prompt: Digest of its messages, for `Lineage.answered`.
        peer: The connection that it came by.
        unprompted: As `prompt`, without the system prompt; None: it has none.
        asked: Digest of its last message alone that is not the system's; None: it has no such message.
        told: Its long texts.
        start: What digests of its messages begin with.
    """

    identity: Identity
    prompt: Digest
    peer: str
    unprompted: Digest | None = None
    asked: Digest | None = None
    told: tuple[str, ...] = ()
    start: Digest = b""


class _Said(NamedTuple):
    """A conversation as digests of its beginnings, and the places of its answers, less those at its end, which the
    next answer continues."""

    items: list[Item]
    digests: list[Digest]
    answers: list[int]
    question: Digest  # of what is before those at the end

    def answer_after(self, place: int) -> int | None:
        """The place of the first answer after a place."""
        return next((answer for answer in self.answers if answer > place), None)


@dataclass(slots=True)
class _State:
    """A conversation after an answer."""

    owners: dict[ProgramId, str] = field(default_factory=dict)  # reached it, by a connection
    waiting: set[ProgramId] = field(default_factory=set)  # of these, have not gone on
    prompts: dict[Digest, ProgramId] = field(default_factory=dict)  # how it was continued, and by whom
    is_crowded: bool = False  # more programs reached it than it has owners

    @property
    def size(self) -> int:
        """For how many states it counts: for one in a conversation without forks and twins."""
        return max(1, len(self.owners), len(self.prompts))


class Lineage:
    """Finds programs by messages. Not for several threads.

    Args:
        most_states: How many states, exchanges, prompts, texts, traces, connections and responses are kept, each.
    """

    def __init__(self, most_states: int = MOST_STATES) -> None:
        self._states: _Recent[_State] = _Recent(most_states)
        self._unprompted: _Recent[_State] = _Recent(most_states)  # without system prompts
        self._exchanges: _Recent[ProgramId] = _Recent(most_states)
        self._given: _Recent[dict[_Mark, ProgramId]] = _Recent(most_states)  # what tells an answer to a prompt
        self._texts: _Recent[ProgramId] = _Recent(most_states)  # that models wrote
        self._traces: _Recent[ProgramId] = _Recent(most_states)
        self._peers: _Recent[ProgramId] = _Recent(most_states)  # the latest program of a connection, if not in turns
        self._responses: _Recent[ProgramId] = _Recent(most_states)
        self._ids = IdSource()

    def __len__(self) -> int:
        conversations = len(self._states) + len(self._unprompted) + len(self._exchanges)
        texts = len(self._given) + len(self._texts)
        return conversations + texts + len(self._traces) + len(self._peers) + len(self._responses)

    def place(self, evidence: Evidence, items: Iterable[Item], scope: str, peer: str = "") -> Placed:
        """Find the program of a request, or begin one.

        Args:
            evidence: What the request carries in addition to messages.
            items: Its messages; see `items_of_request`.
            scope: Of its API key.
            peer: Names the connection that it came by. It decides only between programs with the same messages.
        """
        start = digest_of(b"", scope, evidence.prompt_cache_key or "")
        items = list(items)
        said = _said(start, items)
        others = [item for item in items if item[:2] != ("message", "system")]
        unprompted = _said(digest_of(start, "unprompted"), others) if 0 < len(others) < len(items) else None
        source, program_id = self._find(evidence, said, unprompted, scope, peer)
        if source is Source.NEW:
            program_id = self._speaker(start, others, scope) if said.answers else self._writer(start, others, scope)
            source = Source.NEW if program_id is None else Source.LINEAGE
        if program_id is None:
            source, program_id = Source.NEW, ProgramId(f"{scope}/{self._ids.program()}")
        _go_on(self._states, scope, said, program_id)
        if unprompted is not None:
            _go_on(self._unprompted, scope, unprompted, program_id)
        if evidence.trace_id is not None:
            self._traces.put(scope, digest_of(b"trace", scope, evidence.trace_id), program_id)
        if peer:
            connection = digest_of(b"peer", scope, peer)
            latest = self._peers.get(scope, connection)
            is_in_turns = latest == _SEVERAL or (latest not in (None, program_id) and bool(said.answers))
            self._peers.put(scope, connection, _SEVERAL if is_in_turns else program_id)
        identity = Identity(
            source,
            program_id,
            session_id=evidence.session_id,
            program_name=evidence.program_name,
            tenant=evidence.tenant,
            label=evidence.label,
            # Without messages and other evidence no later request can be known to continue it.
            ends=evidence.ends or (not items and source is Source.NEW and evidence.trace_id is None),
        )
        return Placed(
            identity,
            said.digests[-1] if items else start,
            peer,
            unprompted.digests[-1] if unprompted is not None else None,
            _asked(start, others[-1]) if others else None,
            tuple(text for item in items for text in item[2:] if len(text) >= _FEWEST_CHARACTERS),
            start,
        )

    def answered(self, placed: Placed, answers: Iterable[Iterable[Item]], scope: str, response_id: str | None) -> None:
        """Note the answers to a request, before its client gets them.

        Args:
            placed: What `place` returned for the request.
            answers: One for each choice; see `items_of_answer`.
            scope: Of its API key.
            response_id: By which a later request may name the answer.
        """
        program_id = placed.identity.program_id
        if response_id is not None:
            self._responses.put(scope, digest_of(b"response", scope, response_id), program_id)
        for answer in answers:
            items = list(answer)
            if not items:
                continue  # the prompt is no state, or each request would continue itself
            _reached(self._states, scope, placed.prompt, items, placed)
            self._note_marks(scope, placed, items)
            if placed.unprompted is not None:
                _reached(self._unprompted, scope, placed.unprompted, items, placed)
            if placed.asked is not None:
                *_, exchange = chain(placed.asked, items)
                _note_owner(self._exchanges, scope, exchange, program_id)
            for text in _written(items):
                if not any(text in each for each in placed.told):
                    _note_owner(self._texts, scope, _text(placed.start, text), program_id)

    def _find(
        self, evidence: Evidence, said: _Said, unprompted: _Said | None, scope: str, peer: str
    ) -> tuple[Source, ProgramId | None]:
        if evidence.previous_response_id is not None:
            found = self._responses.get(scope, digest_of(b"response", scope, evidence.previous_response_id))
            if found is not None:
                return Source.PREVIOUS_RESPONSE, found
        place, state = _longest(self._states, scope, said)
        if state is not None:
            latest = self._peers.get(scope, digest_of(b"peer", scope, peer))
            found = _continued(state, said, place, _by_connection(state, peer, latest))
            if found is not None:
                return Source.LINEAGE, found
        elif (found := self._answerer(scope, said)) is not None:
            return Source.LINEAGE, found
        if evidence.trace_id is not None:
            return Source.TRACE, self._traces.get(scope, digest_of(b"trace", scope, evidence.trace_id))
        if state is None and unprompted is not None:
            place, state = _longest(self._unprompted, scope, unprompted)
            if state is not None and (found := _continued(state, unprompted, place, None)) is not None:
                return Source.LINEAGE, found
        return Source.NEW, None

    def _note_marks(self, scope: str, placed: Placed, answer: list[Item]) -> None:
        """Note what tells an answer to a prompt when its client adds to it."""
        program_id, marks = placed.identity.program_id, list(_marks(answer))
        given = self._given.get(scope, placed.prompt)
        if given is None and marks:
            given = {}
            self._given.put(scope, placed.prompt, given)
        for mark in marks:
            if given is not None and (mark in given or len(given) < _MOST_MARKS):
                given[mark] = program_id if given.get(mark, program_id) == program_id else _SEVERAL

    def _answerer(self, scope: str, said: _Said) -> ProgramId | None:
        """The program that was given the latest answer of a conversation, which its client has added to."""
        if not said.answers:
            return None
        place = said.answers[-1]
        while place > 0 and _is_answer(said.items[place - 1]):
            place -= 1
        given = self._given.get(scope, said.digests[place - 1]) if place > 0 else None
        if given is None:
            return None
        text = said.items[place][-1] if said.items[place][0] == "message" else ""
        ids = {digest_of(b"", each) for each in islice(_CALL_ID.findall(text), _MOST_IDS)}
        found = {
            program_id
            for (length, digest), program_id in given.items()
            if (digest_of(b"", text[:length]) == digest if length else digest in ids)
        }
        return next(iter(found)) if len(found) == 1 and _SEVERAL not in found else None

    def _speaker(self, start: Digest, items: list[Item], scope: str) -> ProgramId | None:
        """The program that had the latest exchange of a conversation that only one program had.

        None: there is none, or a later exchange was never had.
        """
        for exchange in reversed(list(_exchanges_of(start, items))):
            program_id = self._exchanges.get(scope, exchange)
            if program_id != _SEVERAL:
                return program_id
        return None

    def _writer(self, start: Digest, items: list[Item], scope: str) -> ProgramId | None:
        """The program whose model wrote the latest long text of a user. None: there is none."""
        for item in reversed(items):
            for text in item[2:] if item[:2] == ("message", "user") else ():
                program_id = self._texts.get(scope, _text(start, text)) if len(text) >= _FEWEST_CHARACTERS else None
                if program_id not in (None, _SEVERAL):
                    return program_id
        return None


def _is_answer(item: Item) -> bool:
    return item[0] == "call" or item[:2] == ("message", "assistant")


def _asked(start: Digest, item: Item) -> Digest:
    return digest_of(digest_of(start, "exchange"), *item)


def _text(start: Digest, text: str) -> Digest:
    return digest_of(start, "text", text)


def _written(answer: list[Item]) -> Iterator[str]:
    """The long texts of an answer that may be handed to another agent: its own text, and arguments of tool calls."""
    for item in answer:
        texts = _arguments(item[3]) if item[0] == "call" else item[3:]
        yield from islice((text for text in texts if len(text) >= _FEWEST_CHARACTERS), _MOST_TEXTS)


def _arguments(text: str) -> Iterator[str]:
    try:
        arguments = json.loads(text)
    except (ValueError, RecursionError):
        return
    if isinstance(arguments, dict):
        yield from (text_of(value) for value in arguments.values() if isinstance(value, str))


def _marks(answer: list[Item]) -> Iterator[_Mark]:
    """What tells an answer: how long its text is, and the text's digest; of a tool call, 0 and the id's digest."""
    kind, *_, text = answer[0]
    if kind == "message" and len(text) >= _FEWEST_OF_ANSWER:
        yield len(text), digest_of(b"", text)
    for item in answer:
        if item[0] == "call" and _CALL_ID.fullmatch(item[1]):
            yield 0, digest_of(b"", item[1])


def _exchanges_of(start: Digest, items: list[Item]) -> Iterator[Digest]:
    for is_answer, places in groupby(range(len(items)), key=lambda place: _is_answer(items[place])):
        if is_answer:
            answer = list(places)
            if answer[0] > 0:
                *_, exchange = chain(_asked(start, items[answer[0] - 1]), (items[place] for place in answer))
                yield exchange


def _said(start: Digest, items: list[Item]) -> _Said:
    digests = list(chain(start, items))
    answers = [place for place, item in enumerate(items) if _is_answer(item)]
    end = len(items)
    while answers and answers[-1] == end - 1:
        end = answers.pop()
    return _Said(items, digests, answers, digests[end - 1] if end else start)


def _note_owner(owners: _Recent[ProgramId], scope: str, digest: Digest, program_id: ProgramId) -> None:
    """Note that a program had what a digest stands for."""
    known = owners.get(scope, digest)
    owners.put(scope, digest, program_id if known in (None, program_id) else _SEVERAL)


def _longest(states: _Recent[_State], scope: str, said: _Said) -> tuple[int, _State | None]:
    """The longest beginning of a conversation that is a state, and its place."""
    for place in reversed(range(len(said.digests))):
        state = states.get(scope, said.digests[place])
        if state is not None:
            return place, state
    return -1, None


def _reached(states: _Recent[_State], scope: str, prompt: Digest, answer: list[Item], placed: Placed) -> None:
    """Note that a program has reached the state after a prompt and its answer."""
    *_, digest = chain(prompt, answer)
    state = states.get(scope, digest)
    if state is None:
        state = _State()
        states.put(scope, digest, state)
    program_id, size = placed.identity.program_id, state.size
    if program_id in state.owners or len(state.owners) < _MOST_OWNERS:
        state.owners[program_id] = placed.peer
        state.waiting.add(program_id)
    else:
        state.is_crowded = True
    states.grow(scope, state.size - size)


def _by_connection(state: _State, peer: str, latest: ProgramId | None) -> ProgramId | None:
    """The latest program of a connection, if it reached a state by it, and no other that did has still to go on."""
    waiting = [program_id for program_id in state.waiting if state.owners[program_id] == peer and program_id != latest]
    return latest if latest is not None and state.owners.get(latest) == peer and not waiting else None


def _continued(state: _State, said: _Said, place: int, by_connection: ProgramId | None) -> ProgramId | None:
    """The program that goes on from a state, which a conversation has at a place. None: it may be each of several."""
    unknown = said.answer_after(place)
    asked_by = state.prompts.get(said.question if unknown is None else said.digests[unknown - 1])
    if by_connection is not None and (unknown is None or asked_by in (by_connection, _SEVERAL)):
        return by_connection
    if state.is_crowded or asked_by == _SEVERAL:
        return None
    if unknown is not None:
        return asked_by  # the answer was changed
    if len(state.owners) == 1:
        return next(iter(state.owners))
    # The request was sent again, unless it is the first one of a program that has not gone on.
    return None if state.waiting else asked_by


def _go_on(states: _Recent[_State], scope: str, said: _Said, program_id: ProgramId) -> None:
    """Note that a program goes on from the longest state that its conversation begins with."""
    place, state = _longest(states, scope, said)
    if state is None or said.answer_after(place) is not None:
        return
    size = state.size
    state.waiting.discard(program_id)
    if said.question in state.prompts or len(state.prompts) < _MOST_OWNERS:
        known = state.prompts.setdefault(said.question, program_id)
        state.prompts[said.question] = program_id if known == program_id else _SEVERAL
    states.grow(scope, state.size - size)


class _Recent(Generic[V]):
    """A mapping that forgets what was unused for longest, of the scope that has the most, so that no API key makes
    another one's entries forgotten.

    Args:
        most: How many values it keeps. A value that has grown counts for several.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._size = 0
        self._sizes: dict[str, int] = {}
        self._of_scope: dict[str, OrderedDict[Digest, V]] = {}

    def __len__(self) -> int:
        return self._size

    def get(self, scope: str, digest: Digest) -> V | None:
        values = self._of_scope.get(scope)
        value = values.get(digest) if values is not None else None
        if values is not None and value is not None:
            values.move_to_end(digest)
        return value

    def put(self, scope: str, digest: Digest, value: V) -> None:
        values = self._of_scope.setdefault(scope, OrderedDict())
        is_new = digest not in values
        values[digest] = value
        values.move_to_end(digest)
        if is_new:
            self.grow(scope, 1)

    def grow(self, scope: str, by: int) -> None:
        """Count what a value of a scope has become larger by."""
        self._sizes[scope] = self._sizes.get(scope, 0) + by
        self._size += by
        while self._size > self._most:
            fullest = max(self._sizes, key=lambda each: self._sizes[each])
            _digest, value = self._of_scope[fullest].popitem(last=False)
            size = value.size if isinstance(value, _State) else 1
            self._sizes[fullest] -= size
            self._size -= size
            if not self._of_scope[fullest]:
                del self._of_scope[fullest], self._sizes[fullest]
