"""Which slot of a pool belongs to whom. Numbers only, so the scheduler can keep it where the memory is not."""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from weft.core.errors import SwapArgumentError, SwapError


class SlotUsage(NamedTuple):
    """How full a table is, in slots."""

    slots: int
    used: int
    peak: int  # the most that were ever in use at once
    owners: int
    free_runs: int  # stretches of consecutive free slots; 1 or 0 is no fragmentation


class SlotTable:
    """Slots 0 to `slots` - 1, each free or with one owner.

    Free slots are kept as runs, by the power of two of their length, and joined with their neighbours when they come
    back. Both `allocate` and `free` take time in the number of runs concerned, mostly one, whatever the table's size.
    Consecutive slots matter because they cross the bus in one copy (Autellix §4.2.2).
    """

    def __init__(self, slots: int) -> None:
        """Raises SwapArgumentError if there is not at least one slot."""
        if slots < 1:
            raise SwapArgumentError(f"a table of {slots} slots. Give it at least 1.")
        self.slots = slots
        self.used = 0
        self.peak = 0
        self._owned: dict[Hashable, list[range]] = {}
        self._bins: list[dict[int, None]] = [{} for _ in range(slots.bit_length())]  # starts of free runs
        self._filled = 0  # bit i: bin i has runs
        self._starts: dict[int, range] = {}  # every free run by its start, and by its stop
        self._ends: dict[int, range] = {}
        self._add(range(slots))

    def allocate(self, owner: Hashable, count: int) -> NDArray[np.int64] | None:
        """Give `count` slots to `owner`, beside those that it has; None if fewer are free. Never waits.

        Returns:
            Their numbers, `(count,)`, consecutive if there is a run that is surely long enough.

        Raises:
            SwapArgumentError: `count` is not positive.
        """
        if count < 1:
            raise SwapArgumentError(f"{count} slots for {owner!r}. Ask for at least 1.")
        if count > self.slots - self.used:
            return None
        taken = []
        left = count
        while left:
            # Every run of bin i has at least 2**i slots. If no bin is sure to have a run that is long enough: the last.
            fitting = self._filled & -1 << (left - 1).bit_length()
            index = (fitting & -fitting if fitting else self._filled).bit_length() - 1
            run = self._remove(self._starts[next(reversed(self._bins[index]))])
            part, rest = run[:left], run[left:]
            if rest:
                self._add(rest)
            taken.append(part)
            left -= len(part)
        self._owned.setdefault(owner, []).extend(taken)
        self.used += count
        self.peak = max(self.peak, self.used)
        return _numbers(taken)

    def free(self, owner: Hashable) -> int:
        """Take back all slots of `owner`; how many that were, 0 if it had none."""
        runs = self._owned.pop(owner, [])
        for run in runs:
            before, after = self._ends.get(run.start), self._starts.get(run.stop)
            start = self._remove(before).start if before else run.start
            stop = self._remove(after).stop if after else run.stop
            self._add(range(start, stop))
        count = sum(map(len, runs))
        self.used -= count
        return count

    def owned(self, owner: Hashable) -> NDArray[np.int64]:
        """The slots of `owner`, `(n,)`, in the order in which it got them."""
        return _numbers(self._owned.get(owner, []))

    def usage(self) -> SlotUsage:
        """How full the table is."""
        return SlotUsage(self.slots, self.used, self.peak, len(self._owned), len(self._ends))

    def check_integrity(self) -> None:
        """Raise SwapError unless every slot is free or owned exactly once and the books agree. For tests and `idle`."""
        free = list(self._starts.values())
        owned = [run for runs in self._owned.values() for run in runs]
        stop = 0
        for run in sorted(free + owned, key=lambda run: run.start):
            if run.start != stop or not run:
                raise SwapError(f"slots {min(stop, run.start)} to {max(stop, run.start)} are lost or owned twice")
            stop = run.stop
        if stop != self.slots or sum(map(len, owned)) != self.used or self.used > self.peak:
            raise SwapError(f"{self.used} slots of {self.slots} (peak {self.peak}) are not what is owned: {owned}")
        if {run.start for run in free} & {run.stop for run in free}:
            raise SwapError(f"free neighbours were not joined: {free}")
        if self._ends != {run.stop: run for run in free} or not all(self._owned.values()):
            raise SwapError("the index of free runs is wrong, or an owner has nothing")
        for index, starts in enumerate(self._bins):
            if bool(starts) != bool(self._filled >> index & 1) or set(starts) != {
                run.start for run in free if _bin(run) == index
            }:
                raise SwapError(f"bin {index} is wrong: {starts}")

    def _add(self, run: range) -> None:
        index = _bin(run)
        self._bins[index][run.start] = None
        self._filled |= 1 << index
        self._starts[run.start] = self._ends[run.stop] = run

    def _remove(self, run: range) -> range:
        index = _bin(run)
        del self._bins[index][run.start], self._starts[run.start], self._ends[run.stop]
        if not self._bins[index]:
            self._filled &= ~(1 << index)
        return run


def _bin(run: range) -> int:
    return len(run).bit_length() - 1


def _numbers(runs: list[range]) -> NDArray[np.int64]:
    return np.concatenate([np.arange(run.start, run.stop, dtype=np.int64) for run in runs] or [np.empty(0, np.int64)])
