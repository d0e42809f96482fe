"""How long to keep a place for a program that is expected back: ski rental with known gaps.

A program has ended a call, and may call again after a gap G. Each second until then, its place costs a second. If the
place is given away, the program costs a fixed price once it is back. To wait for T seconds and then give up costs

    E[min(G, T)] + P(T < G < inf) * price

and the T of least cost among the known gaps is the best wait. A program that never comes back has G = inf: it costs the
whole wait, and no price. While too little is known, T is the price itself, which costs at most twice as much as knowing
G would (Karlin, Manasse, Rudolph and Sleator 1988, "Competitive snoopy caching").
"""

from __future__ import annotations

import math
from bisect import insort
from collections import OrderedDict, deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Final

_MOST_NAMES: Final = 1024
_WINDOW: Final = 256  # the latest gaps of a name that are kept
_KNOWN_FROM: Final = 8  # gaps from which on a name's own gaps count
_REFIT_GAPS: Final = 8  # new gaps after which the best wait is found again


@dataclass(slots=True)
class _Gaps:
    latest: deque[float] = field(default_factory=deque)  # seconds
    ordered: list[float] = field(default_factory=list)
    unfitted: int = 0  # gaps since the best wait was found
    fitted_for_s: float = math.nan  # the price for which it was found
    wait_s: float = math.nan

    def add(self, gap_s: float) -> None:
        self.latest.append(gap_s)
        insort(self.ordered, gap_s)
        if len(self.latest) > _WINDOW:
            self.ordered.remove(self.latest.popleft())
        self.unfitted += 1

    def retract(self) -> None:
        if self.ordered and self.ordered[-1] == math.inf:
            self.ordered.pop()
            self.latest.remove(math.inf)


class ReturnTimes:
    """The gaps between the calls of programs, by name. The names that were used longest ago are forgotten."""

    def __init__(self) -> None:
        self._names: OrderedDict[Hashable, _Gaps] = OrderedDict()  # the latest used last

    def __len__(self) -> int:
        return len(self._names)

    def observe(self, name: Hashable, gap_s: float) -> None:
        """A program of this name has called again after `gap_s` seconds; inf: it never did."""
        gaps = self._names.setdefault(name, _Gaps())
        self._names.move_to_end(name)
        gaps.add(gap_s)
        if len(self._names) > _MOST_NAMES:
            self._names.popitem(last=False)

    def came_back(self, name: Hashable) -> None:
        """A program of this name that was observed to have gone for good has called again."""
        if (gaps := self._names.get(name)) is not None:
            gaps.retract()

    def best_wait_s(self, name: Hashable, price_s: float) -> float:
        """The seconds to wait for a program of this name before its place is given away.

        Args:
            name: The name.
            price_s: The seconds that it costs if the program comes back later; finite.
        """
        gaps = self._names.get(name)
        if gaps is None or len(gaps.latest) < _KNOWN_FROM:
            return price_s
        if gaps.unfitted >= _REFIT_GAPS or gaps.fitted_for_s != price_s:
            gaps.unfitted, gaps.fitted_for_s = 0, price_s
            gaps.wait_s = best_wait_s(gaps.ordered, price_s)
        return gaps.wait_s


def best_wait_s(gaps_s: Sequence[float], price_s: float) -> float:
    """The wait of least expected cost in seconds. A wait for the longest known gap is at least the price.

    Args:
        gaps_s: Gaps in ascending order; inf for programs that never came back.
        price_s: The seconds that it costs if a program comes back after the wait.
    """
    back = sum(map(math.isfinite, gaps_s))
    best_s, least_s, waited_s = 0.0, back * price_s, 0.0
    for count, gap_s in enumerate(gaps_s[:back], 1):
        waited_s += gap_s
        cost_s = waited_s + (len(gaps_s) - count) * gap_s + (back - count) * price_s
        if cost_s < least_s:
            best_s, least_s = gap_s, cost_s
    outlasts_all = 0 < back == len(gaps_s) and best_s == gaps_s[-1]
    return max(best_s, price_s) if outlasts_all else best_s
