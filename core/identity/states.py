"""States: conversations after an answer, and which programs reached them and went on from them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from weft.core.identity.conversations import Said
from weft.core.identity.items import Digest, Item, chain, item_keys
from weft.core.identity.recent import Recent
from weft.core.ids import ProgramId

SEVERAL: Final = ProgramId("")  # programs had an exchange, wrote a text, or went on with the same words
_MOST_OWNERS: Final = 256  # of a state


@dataclass(slots=True)
class State:
    """A conversation after an answer."""

    owners: dict[ProgramId, str] = field(default_factory=dict)  # reached it, by a connection
    waiting: set[ProgramId] = field(default_factory=set)  # of these, have not gone on
    prompts: dict[Digest, ProgramId] = field(default_factory=dict)  # how it was continued, and by whom
    is_crowded: bool = False  # more programs reached it than it has owners
    agent: int = 0  # the number of the agent that reached it first, in its program

    def size(self) -> int:
        """For how many states it counts: for one in a conversation without forks and twins."""
        return max(1, len(self.owners), len(self.prompts))


def longest(states: Recent[State], scope: str, said: Said) -> tuple[int, State | None]:
    """The longest beginning of a conversation that is a state, and its place."""
    known = states.known(scope)
    place = next((each for each in reversed(range(len(said.digests))) if said.digests[each] in known), -1)
    return place, states.get(scope, said.digests[place]) if place >= 0 else None


def reached(
    states: Recent[State], scope: str, prompt: Digest, answer: list[Item], owner: tuple[ProgramId, int], *, peer: str
) -> None:
    """Note that an agent of a program has reached the state after a prompt and its answer."""
    *_, digest = chain(prompt, item_keys(answer))
    (program_id, agent), state = owner, states.get(scope, digest)
    if state is None:
        state = State(agent=agent)
        states.put(scope, digest, state)
    size = state.size()
    if program_id in state.owners or len(state.owners) < _MOST_OWNERS:
        state.owners[program_id] = peer
        state.waiting.add(program_id)
    else:
        state.is_crowded = True
    states.grow(scope, state.size() - size)


def owner_by_connection(state: State, peer: str, latest: ProgramId | None) -> ProgramId | None:
    """The latest program of a connection, if it reached a state by it, and no other of its host has still to go on: a
    pool would send that one's request by any of its connections."""
    host = peer.rpartition(":")[0]
    others = (state.owners[each].rpartition(":")[0] for each in state.waiting if each != latest)
    return latest if latest is not None and state.owners.get(latest) == peer and host not in others else None


def continued(state: State, said: Said, place: int, by_connection: ProgramId | None) -> ProgramId | None:
    """Return the program that goes on from a conversation's state at a place, or None if it may be one of several."""
    unknown = said.answer_after(place)
    asked_by = state.prompts.get(said.question if unknown is None else said.digests[unknown - 1])
    if by_connection is not None and (unknown is None or asked_by in (by_connection, SEVERAL)):
        return by_connection
    if state.is_crowded or asked_by == SEVERAL:
        return None
    if unknown is not None:
        return asked_by  # the answer was changed
    if len(state.owners) == 1:
        return next(iter(state.owners))
    # The request was sent again, unless it is the first one of a program that has not gone on.
    return None if state.waiting else asked_by


def go_on(states: Recent[State], scope: str, said: Said, found: tuple[int, State | None], owner: ProgramId) -> None:
    """Note that a program goes on from the longest state that its conversation begins with."""
    place, state = found
    if state is None or said.answer_after(place) is not None:
        return
    size = state.size()
    state.waiting.discard(owner)
    if said.question in state.prompts or len(state.prompts) < _MOST_OWNERS:
        known = state.prompts.setdefault(said.question, owner)
        state.prompts[said.question] = owner if known == owner else SEVERAL
    states.grow(scope, state.size() - size)
