"""The table of slots against a set of numbers: no slot is given twice, and no slot is lost."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from weft.core.errors import SwapArgumentError, SwapError
from weft.engine.kv_cache import SlotTable


class Slots(RuleBasedStateMachine):
    """A `SlotTable` and a naive model of it: a set of free numbers."""

    @initialize(slots=st.integers(1, 40))
    def begin(self, slots: int) -> None:
        self.table = SlotTable(slots)
        self.free = set(range(slots))
        self.taken: list[int] = []
        self.peak = 0

    @rule(count=st.integers(1, 45))
    def allocate(self, count: int) -> None:
        before = self.table.used
        numbers = self.table.allocate(count)
        if count > len(self.free):
            assert numbers is None
            assert self.table.used == before
            return
        assert numbers is not None
        assert len(numbers) == len(set(numbers)) == count
        assert set(numbers) <= self.free
        if not self.taken:
            assert numbers == list(range(numbers[0], numbers[0] + count)), "an empty table gives consecutive slots"
        self.free -= set(numbers)
        self.taken += numbers
        self.peak = max(self.peak, len(self.taken))

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(self.taken))
        self.table.free(slot)
        self.taken.remove(slot)
        self.free.add(slot)

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "table"):
            return
        self.table.check_integrity()
        assert (self.table.used, self.table.peak) == (len(self.taken), self.peak)
        assert len(self.table._ends) == sum(1 for slot in self.free if slot - 1 not in self.free)


TestSlots = Slots.TestCase
TestSlots.settings = settings(max_examples=200, stateful_step_count=40)


def test_no_slots() -> None:
    """A table without slots is refused, and so is a request for no slots."""
    for count in (0, -1):
        with pytest.raises(SwapArgumentError, match="at least 1"):
            SlotTable(count)
        with pytest.raises(SwapArgumentError, match="at least 1"):
            SlotTable(4).allocate(count)


def test_a_slot_is_freed_once() -> None:
    """A slot that is free already could otherwise be given to two blocks."""
    table = SlotTable(4)
    table.allocate(1)
    table.free(0)
    with pytest.raises(KeyError):
        table.free(0)
    table.check_integrity()


def test_a_long_extent_is_preferred() -> None:
    """A request that one free extent can hold gets consecutive slots, although shorter extents are free, too."""
    table = SlotTable(64)
    table.allocate(32)
    for slot in range(0, 32, 2):
        table.free(slot)
    numbers = table.allocate(16)
    assert numbers is not None
    assert numbers == list(range(numbers[0], numbers[0] + 16))


def test_a_broken_table_is_noticed() -> None:
    """`check_integrity` raises for every kind of damage: a lost slot, one that is free and taken, a stale index."""

    def broken(number: int) -> SlotTable:
        table = SlotTable(16)
        table.allocate(9)
        for slot in range(3, 7):
            table.free(slot)
        table.check_integrity()
        match number:
            case 0:
                table._taken.discard(0)
            case 1:
                table._taken.add(3)
            case 2:
                table.peak = 0
            case 3:
                table._ends.popitem()
            case 4:
                table._filled = 0
            case 5:
                table._bins[0][3] = None
            case 6:
                table._remove(range(3, 7))
                table._add(range(3, 5))
                table._add(range(5, 7))
            case 7:
                table.slots = 17
        return table

    for number in range(8):
        with pytest.raises(SwapError):
            broken(number).check_integrity()
