"""The owner of each slot of a pool.

The table deals in numbers only, so the scheduler's process can keep it although the memory is the workers'. An *extent*
is a range of consecutive slots that are free, or that were allocated together.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from weft.core.errors import SwapArgumentError, SwapError

_NOBODY: Final = object()


class SlotUsage(NamedTuple):
    """How full a table of slots is."""

    slots: int
    used: int
    peak: int  # most slots that were ever in use at once
    owners: int
    free_extents: int  # ranges of consecutive free slots; more than 1 means fragmentation


class SlotTable:
    """Slots 0 to `slots` - 1, each of them free or with one owner.

    Free slots are kept as extents, in bins by the power of two of their length. An extent that is freed is joined with
    its free neighbours. `allocate` and `free` take time in the number of extents that they touch, mostly one, whatever
    the size of the table. Consecutive slots matter because they cross the bus in one copy (Autellix §4.2.2).
    """

    def __init__(self, slots: int) -> None:
        """Raises SwapArgumentError if `slots` is not positive."""
        if slots < 1:
            raise SwapArgumentError(f"a table of {slots} slots holds nothing. Give it at least 1.")
        self.slots = slots
        self.used = 0
        self.peak = 0
        self._owned: dict[Hashable, list[range]] = {}
        self._bins: list[dict[int, None]] = [{} for _ in range(slots.bit_length())]  # starts of free extents
        self._filled = 0  # bit i is set if bin i has extents
        self._starts: dict[int, range] = {}  # every free extent by its start
        self._ends: dict[int, range] = {}  # every free extent by its stop
        self._add(range(slots))

    def allocate(self, owner: Hashable, count: int) -> NDArray[np.int64] | None:
        """Give `count` slots to `owner`, in addition to those that it has. Never waits.

        Returns:
            The slots' numbers, `(count,)`, or None if fewer are free. They are consecutive if there is a free extent in
            a bin all of whose extents are long enough.

        Raises:
            SwapArgumentError: `count` is not positive.
        """
        if count < 1:
            raise SwapArgumentError(f"{owner!r} asks for {count} slots. Ask for at least 1.")
        if count > self.slots - self.used:
            return None
        taken = []
        left = count
        while left:
            # Every extent in bin i has at least 2**i slots. Take the first bin all of whose extents are long enough. If
            # there is none, take the last bin, which has the longest extents.
            fitting = self._filled & -1 << (left - 1).bit_length()
            index = (fitting & -fitting if fitting else self._filled).bit_length() - 1
            extent = self._remove(self._starts[next(reversed(self._bins[index]))])
            part, rest = extent[:left], extent[left:]
            if rest:
                self._add(rest)
            taken.append(part)
            left -= len(part)
        self._owned.setdefault(owner, []).extend(taken)
        self.used += count
        self.peak = max(self.peak, self.used)
        return _numbers(taken)

    def allocate_each(self, count: int) -> list[int] | None:
        """As `allocate`, but each slot has itself as its owner, so that it can be freed alone."""
        taken = self.allocate(_NOBODY, count)
        if taken is None:
            return None
        del self._owned[_NOBODY]
        slots: list[int] = taken.tolist()
        self._owned.update({slot: [range(slot, slot + 1)] for slot in slots})
        return slots

    def free(self, owner: Hashable) -> int:
        """Free all slots of `owner` and return their number, 0 if it has none."""
        extents = self._owned.pop(owner, [])
        for extent in extents:
            before, after = self._ends.get(extent.start), self._starts.get(extent.stop)
            start = self._remove(before).start if before else extent.start
            stop = self._remove(after).stop if after else extent.stop
            self._add(range(start, stop))
        count = sum(map(len, extents))
        self.used -= count
        return count

    def owned(self, owner: Hashable) -> NDArray[np.int64]:
        """The slots of `owner`, `(n,)`, in the order in which they were allocated."""
        return _numbers(self._owned.get(owner, []))

    def usage(self) -> SlotUsage:
        """How full the table is."""
        return SlotUsage(self.slots, self.used, self.peak, len(self._owned), len(self._ends))

    def check_integrity(self) -> None:
        """Raise SwapError unless every slot is free or owned exactly once, and all indices agree. For tests."""
        free = list(self._starts.values())
        owned = [extent for extents in self._owned.values() for extent in extents]
        stop = 0
        for extent in sorted(free + owned, key=lambda extent: extent.start):
            if extent.start != stop or not extent:
                low, high = sorted((stop, extent.start))
                raise SwapError(f"slots {low} to {high} are lost or owned twice")
            stop = extent.stop
        if stop != self.slots or sum(map(len, owned)) != self.used or self.used > self.peak:
            raise SwapError(f"the count of {self.used} slots of {self.slots} (peak {self.peak}) is wrong: {owned}")
        if {extent.start for extent in free} & {extent.stop for extent in free}:
            raise SwapError(f"free neighbours were not joined: {free}")
        if self._ends != {extent.stop: extent for extent in free} or not all(self._owned.values()):
            raise SwapError("the index of free extents is wrong, or an owner has no slots")
        for index, starts in enumerate(self._bins):
            if bool(starts) != bool(self._filled >> index & 1) or set(starts) != {
                extent.start for extent in free if _bin(extent) == index
            }:
                raise SwapError(f"bin {index} is wrong: {starts}")

    def _add(self, extent: range) -> None:
        index = _bin(extent)
        self._bins[index][extent.start] = None
        self._filled |= 1 << index
        self._starts[extent.start] = self._ends[extent.stop] = extent

    def _remove(self, extent: range) -> range:
        index = _bin(extent)
        del self._bins[index][extent.start], self._starts[extent.start], self._ends[extent.stop]
        if not self._bins[index]:
            self._filled &= ~(1 << index)
        return extent


def _bin(extent: range) -> int:
    return len(extent).bit_length() - 1


def _numbers(extents: list[range]) -> NDArray[np.int64]:
    return np.concatenate(
        [np.arange(extent.start, extent.stop, dtype=np.int64) for extent in extents] or [np.empty(0, np.int64)]
    )
