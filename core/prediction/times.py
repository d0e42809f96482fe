"""How long programs stay away and wait: tools by name, the next call, the queue."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import OrderedDict, deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Final

from weft.core.prediction.samples import Samples, SamplesByName

MOST_LETTERS: Final = 128  # of a name; longer names count as one if they begin alike


class ToolTimes:
    """The latest 256 times of each tool, of at most 1024 tools, and of all tools together."""

    def __init__(self) -> None:
        self._all = Samples()
        self._tools = SamplesByName(self._all)

    def __len__(self) -> int:
        """The number of tools that are known by name."""
        return len(self._tools)

    def observe(self, tool: str | None, took_s: float) -> None:
        """A tool has returned after `took_s` seconds. A tool without a name counts only in the times of all tools."""
        self._all.observe(took_s)
        if tool:
            self._tools.observe(tool[:MOST_LETTERS], took_s)

    def of(self, tool: str | None) -> Samples:
        """What is known of a tool: its own times, or those of all tools together if there are none."""
        own = self._tools.get(tool[:MOST_LETTERS]) if tool else None
        return self._all if own is None else own

    def most_seen(self, count: int) -> list[tuple[str, Samples]]:
        """The tools with the most samples, at most `count` of them."""
        return [(str(name), samples) for name, samples in self._tools.most_seen(count)]


def pause_name(tool: str | None, program_name: str) -> str:
    """What the pause after a call is known by: its tool, or the program between whose calls it lies."""
    return (tool or f"after {program_name}")[:MOST_LETTERS]


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

        `price_s` is the seconds that it costs if the program comes back later; finite.
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


_SHARE: Final = 0.05  # the weight of the latest call in the averages; the first calls have more
_MOST_LEVELS: Final = 64
_WAITS_WINDOW: Final = 128  # the latest calls, of which the median is taken


class Waits:
    """Waits of the latest calls, in seconds.

    Under most policies many calls start at once and a few wait for long. The mean then fits no call. The median is what
    a call that has not arrived is expected to wait.

    Attributes:
        mean_s: The mean wait.
        median_s: The median wait.
        turn_s: The mean time from the start of one call to the start of the next, while calls wait.
    """

    def __init__(self) -> None:
        self.mean_s = 0.0
        self.median_s = 0.0
        self.turn_s = 0.0
        self._began_s = -math.inf
        self._calls = 0
        self._latest: deque[float] = deque()
        self._ordered: list[float] = []

    def observe(self, now_s: float, waited_s: float) -> None:
        """A call starts to run after a wait of `waited_s`."""
        self._calls += 1
        share = max(_SHARE, 1 / self._calls)
        self.mean_s += share * (waited_s - self.mean_s)
        self.turn_s += share * (min(now_s - self._began_s, waited_s) - self.turn_s)
        self._began_s = now_s
        self._latest.append(waited_s)
        insort(self._ordered, waited_s)
        if len(self._latest) > _WAITS_WINDOW:
            del self._ordered[bisect_left(self._ordered, self._latest.popleft())]
        middle, ordered = len(self._ordered) // 2, self._ordered
        self.median_s = ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


class WaitsByLevel:
    """The waits in each of a scheduling policy's queues.

    Under ATLAS, calls of the first queue start at once, and those of the last queue may wait for minutes. An average
    over all calls would be wrong for each of them.
    """

    def __init__(self) -> None:
        self._levels: dict[int, Waits] = {}

    def of(self, level: int) -> Waits:
        """The waits of calls in a queue. The object follows later calls, too."""
        level = min(level, _MOST_LEVELS - 1)
        waits = self._levels.get(level)
        if waits is None:
            waits = self._levels[level] = Waits()
        return waits


# -- after how long without a call a program counts as ended, learned from the gaps of programs of its kind


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
