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

A correlation id joins a request to the program of an earlier one that had it. Many clients draw a new one for each
request, so a new one says nothing.

All digests begin with the scope of the request's API key, so no key finds another one's programs.

`conversations.py` makes the digests, `states.py` follows states, and `recent.py` is the memory that forgets.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

from weft.core.identity.conversations import (
    FEWEST_CHARACTERS,
    Mark,
    Said,
    asked_digest,
    exchanges_of,
    marks_in,
    marks_of,
    said_in,
    text_digest,
    texts_written,
)
from weft.core.identity.messages import Digest, Item, chain, digest_of
from weft.core.identity.recent import Recent
from weft.core.identity.sources import Evidence, Identity, Source
from weft.core.identity.states import SEVERAL, State, continued, go_on, longest, owner_by_connection, reached
from weft.core.ids import IdSource, ProgramId

MOST_STATES: Final = 30_000  # and traces, and responses; those unused for longest are forgotten
_MOST_MARKS: Final = 16  # of the answers to a prompt


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


class Lineage:
    """Finds programs by messages. Not for several threads.

    Args:
        most_states: How many states, exchanges, prompts, texts, traces, connections and responses are kept, each.
    """

    def __init__(self, most_states: int = MOST_STATES) -> None:
        self._states: Recent[State] = Recent(most_states, State.size)
        self._unprompted: Recent[State] = Recent(most_states, State.size)  # without system prompts
        self._exchanges: Recent[ProgramId] = Recent(most_states)
        self._given: Recent[dict[Mark, ProgramId]] = Recent(most_states)  # what tells an answer to a prompt
        self._texts: Recent[ProgramId] = Recent(most_states)  # that models wrote
        self._traces: Recent[ProgramId] = Recent(most_states)
        self._peers: Recent[ProgramId] = Recent(most_states)  # the latest program of a connection, if not in turns
        self._responses: Recent[ProgramId] = Recent(most_states)
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
        said = said_in(start, items)
        others = [item for item in items if item[:2] != ("message", "system")]
        unprompted = said_in(digest_of(start, "unprompted"), others) if 0 < len(others) < len(items) else None
        source, program_id = self._find(evidence, said, unprompted, scope, peer)
        if source is Source.NEW:
            program_id = self._speaker(start, others, scope) if said.answers else self._writer(start, others, scope)
            source = Source.NEW if program_id is None else Source.LINEAGE
        if program_id is None:
            source, program_id = Source.NEW, ProgramId(f"{scope}/{self._ids.program()}")
        go_on(self._states, scope, said, program_id)
        if unprompted is not None:
            go_on(self._unprompted, scope, unprompted, program_id)
        if evidence.correlation_id is not None:
            self._traces.put(scope, digest_of(b"correlation", scope, evidence.correlation_id), program_id)
        if evidence.trace_id is not None:
            self._traces.put(scope, digest_of(b"trace", scope, evidence.trace_id), program_id)
        if peer:
            connection = digest_of(b"peer", scope, peer)
            latest = self._peers.get(scope, connection)
            is_in_turns = latest == SEVERAL or (latest not in (None, program_id) and bool(said.answers))
            self._peers.put(scope, connection, SEVERAL if is_in_turns else program_id)
        identity = Identity(
            source,
            program_id,
            session_id=evidence.session_id,
            program_name=evidence.program_name,
            tenant=evidence.tenant,
            label=evidence.label,
            # Without messages and other evidence no later request can be known to continue it.
            ends=evidence.ends
            or (not items and source is Source.NEW and evidence.trace_id is None and evidence.correlation_id is None),
        )
        return Placed(
            identity,
            said.digests[-1] if items else start,
            peer,
            unprompted.digests[-1] if unprompted is not None else None,
            asked_digest(start, others[-1]) if others else None,
            tuple(text for item in items for text in item[2:] if len(text) >= FEWEST_CHARACTERS),
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
            reached(self._states, scope, placed.prompt, items, program_id, peer=placed.peer)
            self._note_marks(scope, placed, items)
            if placed.unprompted is not None:
                reached(self._unprompted, scope, placed.unprompted, items, program_id, peer=placed.peer)
            if placed.asked is not None:
                *_, exchange = chain(placed.asked, items)
                _note_owner(self._exchanges, scope, exchange, program_id)
            for text in texts_written(items):
                if not any(text in each for each in placed.told):
                    _note_owner(self._texts, scope, text_digest(placed.start, text), program_id)

    def _find(
        self, evidence: Evidence, said: Said, unprompted: Said | None, scope: str, peer: str
    ) -> tuple[Source, ProgramId | None]:
        source, found = self._named(evidence, scope)
        if found is not None:
            return source, found
        place, state = longest(self._states, scope, said)
        if state is not None:
            latest = self._peers.get(scope, digest_of(b"peer", scope, peer))
            found = continued(state, said, place, owner_by_connection(state, peer, latest))
            if found is not None:
                return Source.LINEAGE, found
        elif (found := self._answerer(scope, said)) is not None:
            return Source.LINEAGE, found
        if evidence.trace_id is not None:
            return Source.TRACE, self._traces.get(scope, digest_of(b"trace", scope, evidence.trace_id))
        if state is None and unprompted is not None:
            place, state = longest(self._unprompted, scope, unprompted)
            if state is not None and (found := continued(state, unprompted, place, None)) is not None:
                return Source.LINEAGE, found
        return Source.NEW, None

    def _named(self, evidence: Evidence, scope: str) -> tuple[Source, ProgramId | None]:
        """The program of the earlier response or of the known correlation id that a request names."""
        if evidence.previous_response_id is not None:
            found = self._responses.get(scope, digest_of(b"response", scope, evidence.previous_response_id))
            if found is not None:
                return Source.PREVIOUS_RESPONSE, found
        if evidence.correlation_id is not None:
            found = self._traces.get(scope, digest_of(b"correlation", scope, evidence.correlation_id))
            if found is not None:
                return Source.CORRELATION, found
        return Source.NEW, None

    def _note_marks(self, scope: str, placed: Placed, answer: list[Item]) -> None:
        """Note what tells an answer to a prompt when its client adds to it."""
        program_id, marks = placed.identity.program_id, list(marks_of(answer))
        given = self._given.get(scope, placed.prompt)
        if given is None and marks:
            given = {}
            self._given.put(scope, placed.prompt, given)
        for mark in marks:
            if given is not None and (mark in given or len(given) < _MOST_MARKS):
                given[mark] = program_id if given.get(mark, program_id) == program_id else SEVERAL

    def _answerer(self, scope: str, said: Said) -> ProgramId | None:
        """The program that was given the latest answer of a conversation, which its client has added to."""
        place = said.latest_answer()
        given = self._given.get(scope, said.digests[place - 1]) if place else None
        if not place or given is None:
            return None
        found = {given[mark] for mark in marks_in(said.items[place], given)}
        return next(iter(found)) if len(found) == 1 and SEVERAL not in found else None

    def _speaker(self, start: Digest, items: list[Item], scope: str) -> ProgramId | None:
        """The program that had the latest exchange of a conversation that only one program had.

        None: there is none, or a later exchange was never had.
        """
        for exchange in reversed(list(exchanges_of(start, items))):
            program_id = self._exchanges.get(scope, exchange)
            if program_id != SEVERAL:
                return program_id
        return None

    def _writer(self, start: Digest, items: list[Item], scope: str) -> ProgramId | None:
        """The program whose model wrote the latest long text of a user. None: there is none."""
        for item in reversed(items):
            for text in item[2:] if item[:2] == ("message", "user") else ():
                program_id = (
                    self._texts.get(scope, text_digest(start, text)) if len(text) >= FEWEST_CHARACTERS else None
                )
                if program_id not in (None, SEVERAL):
                    return program_id
        return None


def _note_owner(owners: Recent[ProgramId], scope: str, digest: Digest, program_id: ProgramId) -> None:
    """Note that a program had what a digest stands for."""
    known = owners.get(scope, digest)
    owners.put(scope, digest, program_id if known in (None, program_id) else SEVERAL)
