"""Samples by name. The number of names is bounded, because users and their clients choose them."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Hashable
from typing import Final

from weft.core.prediction.samples import Samples

MOST_NAMES: Final = 1024
_MOST_NEW: Final = MOST_NAMES // 4  # of these, names with few samples
_KNOWN_FROM: Final = 3  # samples from which on a name is not new


class SamplesByName:
    """Samples of each name. The names that were used longest ago are forgotten.

    Names with fewer than three samples have a quarter of the space to themselves, so that a flood of made-up names does
    not drive out those in use.

    Args:
        prior: What to assume of a new name.
    """

    def __init__(self, prior: Samples) -> None:
        self._prior = prior
        self._new: OrderedDict[Hashable, Samples] = OrderedDict()  # the latest used last
        self._known: OrderedDict[Hashable, Samples] = OrderedDict()

    def __len__(self) -> int:
        return len(self._new) + len(self._known)

    def get(self, name: Hashable) -> Samples | None:
        """The samples of a name, if it has any."""
        return self._known.get(name) or self._new.get(name)

    def most_seen(self, count: int) -> list[tuple[Hashable, Samples]]:
        """The names with the most samples, at most `count` of them."""
        every = [*self._known.items(), *self._new.items()]
        return heapq.nlargest(count, every, key=lambda each: len(each[1]))

    def observe(self, name: Hashable, value: float) -> None:
        """Add a sample to a name."""
        samples = self._known.get(name)
        if samples is not None:
            self._known.move_to_end(name)
            samples.observe(value)
            return
        samples = self._new.get(name)
        if samples is None:
            samples = self._new[name] = Samples(self._prior)
        samples.observe(value)
        self._new.move_to_end(name)
        if len(samples) >= _KNOWN_FROM:
            self._known[name] = self._new.pop(name)
            if len(self._known) > MOST_NAMES - _MOST_NEW:
                self._known.popitem(last=False)
        elif len(self._new) > _MOST_NEW:
            self._new.popitem(last=False)
