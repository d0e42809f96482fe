"""Finds the program of a request that carries no id, by the messages that it continues.

A conversation after an answer is a *state*: the prompt's messages and the answer, as one digest. A request whose
messages begin with a state continues the program that reached it. Each program that reaches a state may be continued
from it once, so two programs with the same words stay two. Which is which, the connection tells; otherwise the first
one goes on first. A request that begins with a state from which all have gone on is a fork: a sub-agent that quotes the
conversation, or a turn that was edited. So is one that quotes an answer after the state, since its program has gone on
from there before. A fork stays in the program if only one program ever reached that state.

Some clients change the system prompt from call to call, with the time for example. So a conversation is also noted
without it, and found by that if only one program ever reached it, and if nothing else says which program it is.

Some clients shorten their history: they drop the oldest messages, or put a summary in their place. So each answer is
also noted with the message before it, as an *exchange*. A request whose messages are no known conversation belongs to
the program that had its latest exchange that only one program ever had.

All digests begin with the scope of the request's API key, so no key finds another one's programs.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import groupby
from typing import Final, Generic, NamedTuple, TypeVar

from weft.core.identity.messages import Digest, Item, chain, digest_of
from weft.core.identity.sources import Evidence, Identity, Source
from weft.core.ids import IdSource, ProgramId

MOST_STATES: Final = 30_000  # and traces, and responses; those unused for longest are forgotten
_MOST_OWNERS: Final = 256  # of a state
_SEVERAL: Final = ProgramId("")  # programs had an exchange

V = TypeVar("V")


class Placed(NamedTuple):
    """Where a request belongs.

    Attributes:
        identity: Its program.
        prompt: Digest of its messages, for `Lineage.answered`.
        peer: The connection that it came by.
        unprompted: As `prompt`, without the system prompt; None: it has none.
        asked: Digest of its last message alone; None: it has no messages.
    """

    identity: Identity
    prompt: Digest
    peer: str
    unprompted: Digest | None = None
    asked: Digest | None = None


class _Said(NamedTuple):
    """A conversation as digests of its beginnings, and the place of its last answer, or -1."""

    digests: list[Digest]
    last_answer: int


@dataclass(slots=True)
class _State:
    """A conversation after an answer."""

    waiting: dict[ProgramId, str] = field(default_factory=dict)  # reached it by a connection, and have not gone on
    owners: list[ProgramId] = field(default_factory=list)  # reached it
    prompts: dict[Digest, ProgramId] = field(default_factory=dict)  # how it was continued, and by whom
    is_crowded: bool = False  # more programs reached it than it has owners


class Lineage:
    """Finds programs by messages. Not for several threads.

    Args:
        most_states: How many states, exchanges, traces, connections and responses are kept, each.
    """

    def __init__(self, most_states: int = MOST_STATES) -> None:
        self._states: _Recent[_State] = _Recent(most_states)
        self._unprompted: _Recent[_State] = _Recent(most_states)  # without system prompts
        self._exchanges: _Recent[ProgramId] = _Recent(most_states)
        self._traces: _Recent[ProgramId] = _Recent(most_states)
        self._peers: _Recent[ProgramId] = _Recent(most_states)  # the latest program of a connection
        self._responses: _Recent[ProgramId] = _Recent(most_states)
        self._ids = IdSource()

    def __len__(self) -> int:
        conversations = len(self._states) + len(self._unprompted) + len(self._exchanges)
        return conversations + len(self._traces) + len(self._peers) + len(self._responses)

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
        if source is Source.NEW and (speaker := self._speaker(start, items, scope)) is not None:
            source, program_id = Source.LINEAGE, speaker
        if program_id is None:
            source, program_id = Source.NEW, ProgramId(f"{scope}/{self._ids.program()}")
        if evidence.trace_id is not None:
            self._traces.put(scope, digest_of(b"trace", scope, evidence.trace_id), program_id)
        if peer:
            self._peers.put(scope, digest_of(b"peer", scope, peer), program_id)
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
        prompt = said.digests[-1] if items else start
        asked = _asked(start, items[-1]) if items else None
        return Placed(identity, prompt, peer, unprompted.digests[-1] if unprompted is not None else None, asked)

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
            if placed.unprompted is not None:
                _reached(self._unprompted, scope, placed.unprompted, items, placed)
            if placed.asked is not None:
                *_, exchange = chain(placed.asked, items)
                self._had(scope, exchange, program_id)

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
            found = _continued(state, said.digests[-1], peer, latest, is_next=said.last_answer <= place)
            if found is not None:
                return Source.LINEAGE, found
        if evidence.trace_id is not None:
            return Source.TRACE, self._traces.get(scope, digest_of(b"trace", scope, evidence.trace_id))
        if state is None and unprompted is not None:
            place, state = _longest(self._unprompted, scope, unprompted)
            if state is not None and len(state.owners) == 1 and unprompted.last_answer <= place:
                return Source.LINEAGE, state.owners[0]
        return Source.NEW, None

    def _had(self, scope: str, exchange: Digest, program_id: ProgramId) -> None:
        """Note that a program had an exchange."""
        known = self._exchanges.get(scope, exchange)
        self._exchanges.put(scope, exchange, program_id if known in (None, program_id) else _SEVERAL)

    def _speaker(self, start: Digest, items: list[Item], scope: str) -> ProgramId | None:
        """The program that had the latest exchange of a conversation that only one program had. None: there is none."""
        known = [self._exchanges.get(scope, exchange) for exchange in _exchanges_of(start, items)]
        return next((each for each in reversed(known) if each not in (None, _SEVERAL)), None)


def _is_answer(item: Item) -> bool:
    return item[0] == "call" or item[:2] == ("message", "assistant")


def _asked(start: Digest, item: Item) -> Digest:
    return digest_of(digest_of(start, "exchange"), *item)


def _exchanges_of(start: Digest, items: list[Item]) -> Iterator[Digest]:
    for is_answer, places in groupby(range(len(items)), key=lambda place: _is_answer(items[place])):
        if is_answer:
            answer = list(places)
            if answer[0] > 0:
                *_, exchange = chain(_asked(start, items[answer[0] - 1]), (items[place] for place in answer))
                yield exchange


def _said(start: Digest, items: list[Item]) -> _Said:
    answers = [place for place, item in enumerate(items) if _is_answer(item)]
    return _Said(list(chain(start, items)), answers[-1] if answers else -1)


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
    program_id = placed.identity.program_id
    if len(state.owners) < _MOST_OWNERS:
        state.waiting[program_id] = placed.peer
        if program_id not in state.owners:
            state.owners.append(program_id)
    else:
        state.is_crowded = True


def _continued(
    state: _State, prompt: Digest, peer: str, latest: ProgramId | None, *, is_next: bool
) -> ProgramId | None:
    """The program that goes on from a state with a prompt, by a connection whose latest program is given.

    None: it may be each of several.
    """
    program_id = next((each for each, last in state.waiting.items() if last == peer), None) if is_next else None
    if program_id is None and latest in state.owners and latest not in state.waiting:
        program_id = latest  # its client edited a turn, or sent it again
    if program_id is None and is_next and state.waiting and not state.is_crowded:
        program_id = next(iter(state.waiting))
    if program_id is not None:
        state.waiting.pop(program_id, None)
    elif prompt in state.prompts and not state.is_crowded:  # the request was sent again
        return state.prompts[prompt]
    elif len(state.owners) == 1:
        program_id = state.owners[0]
    else:
        return None
    if len(state.prompts) < _MOST_OWNERS:
        state.prompts[prompt] = program_id
    return program_id


class _Recent(Generic[V]):
    """A mapping that forgets what was unused for longest, of the scope that has the most, so that no API key makes
    another one's entries forgotten."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._count = 0
        self._of_scope: dict[str, OrderedDict[Digest, V]] = {}

    def __len__(self) -> int:
        return self._count

    def get(self, scope: str, digest: Digest) -> V | None:
        values = self._of_scope.get(scope)
        value = values.get(digest) if values is not None else None
        if values is not None and value is not None:
            values.move_to_end(digest)
        return value

    def put(self, scope: str, digest: Digest, value: V) -> None:
        values = self._of_scope.setdefault(scope, OrderedDict())
        self._count += digest not in values
        values[digest] = value
        values.move_to_end(digest)
        if self._count > self._most:
            fullest = max(self._of_scope, key=lambda each: len(self._of_scope[each]))
            self._of_scope[fullest].popitem(last=False)
            self._count -= 1
            if not self._of_scope[fullest]:
                del self._of_scope[fullest]
