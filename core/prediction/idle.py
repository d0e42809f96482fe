"""After how long without a call a program counts as ended, learned from the gaps of programs of its kind."""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Final

LONGEST_S: Final = 600.0  # also while little is known
SHORTEST_S: Final = 30.0
_MOST_KINDS: Final = 1_000  # beyond them the longest unused are forgotten
_GAPS: Final = 64  # the latest of a kind
_FEWEST_GAPS: Final = 8  # before which nothing is concluded
_MARGIN: Final = 4.0  # a program is given this many times the longest gap


class IdleTimes:
    """Learns by kind, which is a name in the scope of an API key. Not for several threads."""

    def __init__(self) -> None:
        self._gaps_s: OrderedDict[str, deque[float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._gaps_s)

    def note(self, kind: str, gap_s: float) -> None:
        """A program of this kind made its next call after `gap_s` seconds."""
        gaps_s = self._gaps_s.setdefault(kind, deque(maxlen=_GAPS))
        gaps_s.append(gap_s)
        self._gaps_s.move_to_end(kind)
        if len(self._gaps_s) > _MOST_KINDS:
            self._gaps_s.popitem(last=False)

    def timeout_s(self, kind: str) -> float:
        """Seconds after which a program of a kind ends: four times the longest of its latest gaps, within bounds."""
        gaps_s = self._gaps_s.get(kind, ())
        if len(gaps_s) < _FEWEST_GAPS:
            return LONGEST_S
        return min(max(SHORTEST_S, _MARGIN * max(gaps_s)), LONGEST_S)
