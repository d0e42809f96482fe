"""A policy that re-ranks calls at random, for tests of everything that drives a policy."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from unittest import mock

from weft.core.policies import Call, Policy, Rank, register
from weft.core.policies.policy import REGISTRY


@dataclass(frozen=True)
class ShuffledParameters:
    """Parameters of `Shuffled`."""

    seed: int = 0
    share: float = 0.3


class Shuffled(Policy):
    """Gives calls new random ranks at each decision.

    Args:
        seed: Of the random numbers.
        share: The share of calls, waiting or running, that get a new rank at a decision.
    """

    ranks_follow_steps = True  # a decision at each step draws numbers, so no step may be skipped

    def __init__(self, seed: int, share: float) -> None:
        super().__init__()
        self._rng = random.Random(seed)
        self._share = share
        self._calls: dict[Call, None] = {}
        self._ties = itertools.count()
        self._changes: list[tuple[Call, Rank]] = []

    @classmethod
    @contextmanager
    def registered(cls, seed: int, share: float) -> Iterator[None]:
        """Have it in the registry as "shuffled", with these parameters as defaults."""

        @dataclass(frozen=True)
        class Parameters(ShuffledParameters):
            pass

        Parameters.__init__.__defaults__ = (seed, share)  # type: ignore[misc]
        with mock.patch.object(REGISTRY, "entries", dict(REGISTRY.entries)):
            register("shuffled", "random ranks", Parameters)(cls)
            yield

    def queue_change(self, call: Call, rank: Rank) -> None:
        """Have a call re-ranked at the next decision."""
        self._changes.append((call, rank))

    def _random_rank(self) -> Rank:
        return Rank(0, self._rng.random() + next(self._ties) * 1e-9)

    def rank(self, call: Call, now_s: float) -> Rank:
        del now_s
        self._calls[call] = None
        return self._random_rank()

    def leave(self, call: Call) -> None:
        super().leave(call)
        self._calls.pop(call, None)

    def rerank(self, now_s: float) -> Iterable[tuple[Call, Rank]]:
        del now_s
        changes, self._changes = self._changes, []
        yield from changes
        for call in self._calls:
            if self._rng.random() < self._share:
                yield call, self._random_rank()

    def next_change_s(self) -> float:
        return 0.0
