"""Frontiers: the calls that the next call inside a run comes after, and how certain that is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from weft.core.program.ancestry import Calls

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
