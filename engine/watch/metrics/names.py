"""Names in metrics: which are shown, and which are told apart."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final, Generic, NamedTuple, TypeVar

MOST_NAMES: Final = 32  # of programs, tenants and tools that are told apart, those that are used most
OTHER: Final = "other"  # all others
MOST_LETTERS: Final = 100  # of a name
_MOST_CANDIDATES: Final = 256  # names that are not told apart and whose uses are counted
_AGE: Final = 4096  # uses, after which all earlier ones count half

T = TypeVar("T")


class Shown(NamedTuple):
    """Which names metrics show. Whatever has another name is counted under `other`.

    Attributes:
        names: Whether to show the names of programs and tools, which clients choose.
        tenants: The tenants to show; None shows all of them.
    """

    names: bool = True
    tenants: Collection[str] | None = None


ALL: Final = Shown()


def shown_to_strangers(tenants: Collection[str]) -> Shown:
    """Return what may be read without a key: the tenants that the operator has named, and nothing that clients sent.

    Args:
        tenants: The tenants that the operator has named.
    """
    return Shown(names=False, tenants=frozenset(("", *tenants)))


class ByName(dict[str, T], Generic[T]):
    """A value for each of the names that are used most, and one for all others, whose number has no bound.

    The names that come first do not keep others out: a name that is used more than twice as often as one of them takes
    its place. The value of the name that leaves is dropped. Added to that of all others, it would look like a burst. If
    the name comes back, its value begins at 0, as after a start of the process.

    Args:
        shown: The names that may be told apart; None allows all of them.
    """

    def __init__(self, make: type[T], shown: Collection[str] | None = None) -> None:
        super().__init__()
        self._make = make
        self._shown = shown
        self._uses: dict[str, int] = {}  # of the names that are told apart
        self._candidates: dict[str, int] = {}  # uses of others
        self._until_older = _AGE

    def use(self, name: str) -> T:
        """The value of a name, or that of all others, for one more use of the name."""
        name = name[:MOST_LETTERS]
        self._until_older -= 1
        if self._until_older == 0:
            self._until_older = _AGE
            self._uses = {each: (uses + 1) // 2 for each, uses in self._uses.items()}
            self._halve_candidates()
        if name in self._uses:
            self._uses[name] += 1
        elif name != OTHER and (self._shown is None or name in self._shown):
            self._come(name)
        return self.of(name)

    def of(self, name: str) -> T:
        """The value of a name, or that of all others."""
        key = self.key(name)
        if key not in self:
            self[key] = self._make()
        return self[key]

    def key(self, name: str) -> str:
        """The name by which a name counts."""
        name = name[:MOST_LETTERS]
        return name if name in self._uses else OTHER

    def _come(self, name: str) -> None:
        """Tell a name apart if there is room, or if it is used more than another one."""
        if len(self._uses) < MOST_NAMES:
            self._uses[name] = 1
            return
        uses = self._candidates[name] = self._candidates.get(name, 0) + 1
        least = min(self._uses, key=self._uses.__getitem__)
        if uses > 2 * self._uses[least]:
            del self._uses[least], self._candidates[name]
            self.pop(least, None)
            self._uses[name] = uses
        elif len(self._candidates) > _MOST_CANDIDATES:
            self._halve_candidates()

    def _halve_candidates(self) -> None:
        """Names that were used once go, so names without end push out no name that is used again and again."""
        self._candidates = {each: uses // 2 for each, uses in self._candidates.items() if uses > 1}
