"""Which calls had to finish before a call: the frontier of its run, and what its text shows."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Final

from weft.core.ids import CallId
from weft.core.program.structure.ancestry import Ancestry, Calls, newest
from weft.core.program.structure.lineage import Inputs, TextLineage

_MOST_TOOLS: Final = 100  # names of tools between two calls
_MOST_GROUPS: Final = 16


@dataclass(eq=False, slots=True)
class Front:
    """The calls of a frontier, as sets of an `Ancestry`. None of them is an ancestor of another.

    It is certain that the next call comes after a call of the frontier if a framework has stated so, or if no other
    call overlapped, or only calls of other branches. It is a guess if other calls overlapped.
    """

    calls: int = 0
    guesses: int = 0  # those of the calls that are guesses
    stated: int = 0  # those of the calls that a framework has stated
    branched: int = 0  # those of the calls that were made in branches, and with which only other branches overlapped
    past: int = 0  # all ancestors of the calls
    groups: tuple[int, ...] = ()  # sets of several of the calls, each the calls with which one run ended
    loose: int = 0  # guesses beside the calls, of the parents of one call: see `ParentChoice.choose`
    _covered: int | None = None
    possible_past: int | None = None  # all ancestors of the calls, those by way of loose guesses included; once known
    reduced: Front | None = None  # the same without guesses that loose guesses make ancestors of others; once known
    listed: tuple[Calls, Calls] | None = None  # the parents of a call that comes after all calls, and the guesses

    @property
    def covered(self) -> int:
        """The calls and all their ancestors. Kept, so that the calls after this frontier share one integer."""
        if self._covered is None:
            self._covered = self.calls | self.past
        return self._covered

    def renumber(self, renumbered: Callable[[int], int]) -> None:
        """Change all sets after the ancestry has forgotten calls."""
        self.calls, self.guesses = renumbered(self.calls), renumbered(self.guesses)
        self.stated, self.branched = renumbered(self.stated), renumbered(self.branched)
        self.past, self.groups = renumbered(self.past), tuple(map(renumbered, self.groups))
        self._covered = self.possible_past = self.reduced = None


@dataclass(frozen=True, slots=True)
class Frontier:
    """The calls that the next call inside a run comes after."""

    front: Front = field(default_factory=Front)
    tools: tuple[str, ...] = ()  # the tools that ran after these calls


def still(groups: tuple[int, ...], calls: int) -> tuple[int, ...]:
    """Return what remains of groups among some calls: sets of several calls, the newest sets."""
    left = (group & calls for group in groups[-_MOST_GROUPS:])
    return tuple(group for group in left if group & group - 1)


def merged(tools: tuple[str, ...], more: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names of some tools and then of more, each once."""
    return tuple(dict.fromkeys(tools + more))[:_MOST_TOOLS] if set(more) - set(tools) else tools


# Without a bound, calls of many strands that each come after all others would have edges by the square of their number.
# A call has all of its parents as long as the calls so far have this many on average. Otherwise it has the newest,
# certain ones rather than guesses. Calls with the same frontier share a tuple of parents, which counts once.
PARENTS_A_CALL: Final = 16
FEWEST_LISTED: Final = 64
_QUOTED_BESIDE: Final = 64  # calls of other strands, the newest, whose outputs are searched for in a call's texts


class ParentChoice:
    """Chooses parents, and lists them."""

    def __init__(self, ancestry: Ancestry, lineage: TextLineage) -> None:
        self._ancestry = ancestry
        self._lineage = lineage
        self._started = 0  # calls
        self._has_loose = False  # whether there was a loose guess
        self._listed = 0  # parents, those that several calls share counted once

    def choose(self, frontier: Front, inputs: Inputs) -> tuple[Front, Calls]:
        """Choose the parents of a call with their certainty, and return the calls that lineage proves as well.

        Lineage is asked if the frontier has guesses or several calls, or if calls of other strands, which are outside
        its past, have finished. Calls of the frontier that lineage names are certain. The other guesses stay guesses:
        that a call uses one result does not prove that the code did not wait for the others. Calls of other strands
        that lineage names are added.

        A guess beside a named call is *loose*: the code may also have been a strand, which goes on with its own result
        alone. A loose guess is a parent of this call, but it does not count as its past, so that a later call can still
        come after it for certain. The exceptions are guesses that lineage could not recognize, and those that ended
        together with a named call: a framework may have waited for calls whose output the next call does not get.
        """
        ancestry = self._ancestry
        is_single = not frontier.calls & (frontier.calls - 1)
        beside = ancestry.finished & ~frontier.covered
        if not frontier.guesses and is_single and not beside:
            return frontier, ()
        content = inputs() if callable(inputs) else inputs
        if not content.texts and not content.ids:
            return self._reduced(frontier), ()
        quoted_from = newest(beside, _QUOTED_BESIDE) if frontier.calls else 0
        proven = certain = self._lineage.certain(content, _Members(ancestry, quoted_from))
        if frontier.guesses or not frontier.calls:  # only then is a search inside longer texts worth its time
            proven = self._lineage.origins(content, _Members(ancestry, frontier.calls) if frontier.calls else None)
        named = ancestry.set_of(call for call in proven if ancestry.contains(frontier.calls, call))
        calls, guesses, covered = frontier.calls, frontier.guesses & ~named, frontier.covered
        if named and guesses:
            unnamed = _Members(ancestry, guesses)
            undecided = ancestry.set_of(iter(self._lineage.undecided(content, unnamed)))
            undecided |= functools.reduce(int.__or__, (each & guesses for each in frontier.groups if each & named), 0)
            calls &= ~(guesses & ~undecided)
            guesses &= undecided
        outside = [call for call in (certain if frontier.calls else proven) if ancestry.has_finished(call)]
        added = [call for call in outside if not ancestry.contains(covered, call)]
        if calls == frontier.calls and guesses == frontier.guesses and not added:
            return self._reduced(frontier), proven
        past = frontier.past if calls == frontier.calls else ancestry.past_of(calls)
        implied = ancestry.past_of(ancestry.set_of(added))
        calls = (calls | ancestry.set_of(added)) & ~implied
        loose = frontier.calls & ~calls & ~implied
        self._has_loose |= bool(loose)
        return self._reduced(Front(calls, guesses & calls, past=past | implied, loose=loose)), proven

    def _reduced(self, front: Front) -> Front:
        """Return a frontier, less the guesses that loose guesses make ancestors of other calls in it."""
        if not self._has_loose or not front.guesses:
            return front
        if front.reduced is None:
            implied = front.guesses & self._ancestry.possible_past_of(front.calls)
            front.reduced = front
            if implied:
                calls, guesses = front.calls & ~implied, front.guesses & ~implied
                front.reduced = Front(calls, guesses, past=front.past | implied, loose=front.loose)
        return front.reduced

    def possible(self, parents: Front, frontier: Front) -> int:
        """Return the parents of a call and all that may have come before them, loose guesses included.

        Args:
            frontier: that from which they were chosen.
        """
        if not self._has_loose:
            return parents.covered
        if parents.possible_past is None:
            parents.possible_past = self._ancestry.possible_past_of(parents.calls)
        return parents.covered | parents.possible_past | (frontier.covered if parents.loose else 0)

    def listed(self, parents: Front) -> tuple[Calls, Calls]:
        """Return the parents of a call, the oldest first, and those of them that are guesses, within the bounds."""
        self._started += 1
        if parents.listed is None:
            parents.listed = self._list(parents)
        return parents.listed

    def _list(self, parents: Front) -> tuple[Calls, Calls]:
        guesses, most = (
            parents.guesses | parents.loose,
            max(FEWEST_LISTED, PARENTS_A_CALL * self._started - self._listed),
        )
        certain = parents.calls & ~guesses
        if (certain | guesses).bit_count() > most:
            certain = newest(certain, most)
            guesses = newest(guesses, most - certain.bit_count())
        if parents.loose:  # one that is an ancestor of another parent is listed there
            guesses &= ~(parents.loose & self._ancestry.possible_past_of(certain | guesses))
        ordered = self._ancestry.in_order(certain | guesses)
        self._listed += len(ordered)
        return ordered, self._ancestry.in_order(guesses) if certain else ordered


class _Members(Collection[CallId]):
    """A set of calls as a collection."""

    def __init__(self, ancestry: Ancestry, calls: int) -> None:
        self._ancestry, self._calls = ancestry, calls

    def __len__(self) -> int:
        return self._calls.bit_count()

    def __iter__(self) -> Iterator[CallId]:
        return iter(self._ancestry.in_order(self._calls))

    def __contains__(self, call_id: object) -> bool:
        return isinstance(call_id, str) and self._ancestry.contains(self._calls, CallId(call_id))
