"""Finds the program of a request that carries no id, by the messages that it continues.

A conversation after an answer is a *state*: the prompt's messages and the answer, as one digest. A request whose
messages begin with a state continues the program that reached it. Each program that reaches a state may be continued
from it once, so two programs with the same words stay two. Which is which, the connection tells; otherwise the first
one goes on first. A request that begins with a state from which all have gone on is a fork: a sub-agent that quotes the
conversation, or a turn that was edited. It stays in the program if only one program ever reached that state.

All digests begin with the scope of the request's API key, so no key finds another one's programs.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final, Generic, NamedTuple, TypeVar

from weft.core.identity.messages import Digest, Item, chain, digest_of
from weft.core.identity.sources import Evidence, Identity, Source
from weft.core.ids import IdSource, ProgramId

MOST_STATES: Final = 30_000  # and traces, and responses; those unused for longest are forgotten
_MOST_OWNERS: Final = 64  # of a state

V = TypeVar("V")


class Placed(NamedTuple):
    """Where a request belongs.

    Attributes:
        identity: Its program.
        prompt: Digest of its messages, for `Lineage.answered`.
        peer: The connection that it came by.
    """

    identity: Identity
    prompt: Digest
    peer: str


@dataclass(slots=True)
class _State:
    """A conversation after an answer."""

    waiting: dict[ProgramId, str] = field(default_factory=dict)  # reached it by a connection, and have not gone on
    owners: list[ProgramId] = field(default_factory=list)  # reached it
    prompts: dict[Digest, ProgramId] = field(default_factory=dict)  # how it was continued, and by whom


class Lineage:
    """Finds programs by messages. Not for several threads.

    Args:
        most_states: How many states, traces and responses are kept, each.
    """

    def __init__(self, most_states: int = MOST_STATES) -> None:
        self._states: _Recent[_State] = _Recent(most_states)
        self._traces: _Recent[ProgramId] = _Recent(most_states)
        self._responses: _Recent[ProgramId] = _Recent(most_states)
        self._ids = IdSource()

    def __len__(self) -> int:
        return len(self._states) + len(self._traces) + len(self._responses)

    def place(self, evidence: Evidence, items: Iterable[Item], scope: str, peer: str = "") -> Placed:
        """Find the program of a request, or begin one.

        Args:
            evidence: What the request carries in addition to messages.
            items: Its messages; see `items_of_request`.
            scope: Of its API key.
            peer: Names the connection that it came by. It decides only between programs with the same messages.
        """
        start = digest_of(b"", scope, evidence.prompt_cache_key or "")
        digests = list(chain(start, items))
        prompt = digests[-1] if digests else start
        source, program_id = self._find(evidence, digests, prompt, scope, peer)
        if program_id is None:
            source, program_id = Source.NEW, ProgramId(f"{scope}/{self._ids.program()}")
        if evidence.trace_id is not None:
            self._traces.put(scope, digest_of(b"trace", scope, evidence.trace_id), program_id)
        identity = Identity(
            source,
            program_id,
            session_id=evidence.session_id,
            program_name=evidence.program_name,
            tenant=evidence.tenant,
            # Without messages and other evidence no later request can be known to continue it.
            ends=evidence.ends or (not digests and source is Source.NEW and evidence.trace_id is None),
        )
        return Placed(identity, prompt, peer)

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
            digests = list(chain(placed.prompt, answer))
            if not digests:
                continue  # an empty answer: the prompt is no state, or each request would continue itself
            state = self._states.get(scope, digests[-1])
            if state is None:
                state = _State()
                self._states.put(scope, digests[-1], state)
            if len(state.owners) < _MOST_OWNERS:
                state.waiting[program_id] = placed.peer
                if program_id not in state.owners:
                    state.owners.append(program_id)

    def _find(
        self, evidence: Evidence, digests: list[Digest], prompt: Digest, scope: str, peer: str
    ) -> tuple[Source, ProgramId | None]:
        if evidence.previous_response_id is not None:
            found = self._responses.get(scope, digest_of(b"response", scope, evidence.previous_response_id))
            if found is not None:
                return Source.PREVIOUS_RESPONSE, found
        for digest in reversed(digests):
            state = self._states.get(scope, digest)
            if state is not None:
                found = _continued(state, prompt, peer)
                if found is not None:
                    return Source.LINEAGE, found
                break
        if evidence.trace_id is not None:
            return Source.TRACE, self._traces.get(scope, digest_of(b"trace", scope, evidence.trace_id))
        return Source.NEW, None


def _continued(state: _State, prompt: Digest, peer: str) -> ProgramId | None:
    """The program that goes on from a state with a prompt. None: it may be each of several."""
    if state.waiting:
        program_id = next((each for each, last in state.waiting.items() if last == peer), next(iter(state.waiting)))
        del state.waiting[program_id]
    elif prompt in state.prompts:  # the request was sent again
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
