"""The table of slots against sets of numbers: no slot has two owners, and no slot is lost."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from weft.core.errors import SwapArgumentError, SwapError
from weft.engine.kv_cache import SlotTable, SlotUsage

OWNERS = st.sampled_from(["a", "b", "c", "d", ("tuple", 1)])


class Slots(RuleBasedStateMachine):
    """A `SlotTable` and a naive model of it: a set of free numbers and a list for each owner."""

    @initialize(slots=st.integers(1, 40))
    def begin(self, slots: int) -> None:
        self.table = SlotTable(slots)
        self.free = set(range(slots))
        self.owned: dict[object, list[int]] = {}
        self.peak = 0

    @rule(owner=OWNERS, count=st.integers(1, 45))
    def allocate(self, owner: object, count: int) -> None:
        before = self.table.usage()
        got = self.table.allocate(owner, count)
        if count > len(self.free):
            assert got is None
            assert self.table.usage() == before
            return
        assert got is not None
        numbers = got.tolist()
        assert len(numbers) == len(set(numbers)) == count
        assert set(numbers) <= self.free
        if len(self.owned) == 0:
            assert numbers == list(range(numbers[0], numbers[0] + count)), "an empty table gives consecutive slots"
        self.free -= set(numbers)
        self.owned.setdefault(owner, []).extend(numbers)
        self.peak = max(self.peak, self.table.slots - len(self.free))

    @rule(owner=OWNERS)
    def release(self, owner: object) -> None:
        numbers = self.owned.pop(owner, [])
        assert self.table.free(owner) == len(numbers)
        self.free |= set(numbers)

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "table"):
            return
        self.table.check_integrity()
        for owner in ("a", "b", "c", "d", ("tuple", 1)):
            assert self.table.owned(owner).tolist() == self.owned.get(owner, [])
        extents = sum(1 for slot in self.free if slot - 1 not in self.free)
        used = self.table.slots - len(self.free)
        assert self.table.usage() == SlotUsage(self.table.slots, used, self.peak, len(self.owned), extents)


TestSlots = Slots.TestCase
TestSlots.settings = settings(max_examples=200, stateful_step_count=40)


def test_no_slots() -> None:
    """A table without slots is refused, and so is a request for no slots."""
    for count in (0, -1):
        with pytest.raises(SwapArgumentError, match="at least 1"):
            SlotTable(count)
        with pytest.raises(SwapArgumentError, match="at least 1"):
            SlotTable(4).allocate("a", count)


def test_a_long_extent_is_preferred() -> None:
    """A request that one free extent can hold gets consecutive slots, although shorter extents are free, too."""
    table = SlotTable(64)
    for owner in range(32):
        table.allocate(owner, 1)
    for owner in range(0, 32, 2):
        table.free(owner)
    numbers = table.allocate("long", 16)
    assert numbers is not None
    assert numbers.tolist() == list(range(numbers[0], numbers[0] + 16))


def test_a_broken_table_is_noticed() -> None:
    """`check_integrity` raises for every kind of damage: a lost slot, a slot with two owners, a stale index."""

    def broken(number: int) -> SlotTable:
        table = SlotTable(16)
        table.allocate("a", 3)
        table.allocate("b", 4)
        table.allocate("c", 2)
        table.free("b")
        table.check_integrity()
        match number:
            case 0:
                table._owned["a"] = [range(2)]
            case 1:
                table._owned["d"] = [range(1)]
            case 2:
                table.used += 1
            case 3:
                table.peak = 0
            case 4:
                table._ends.popitem()
            case 5:
                table._owned["d"] = []
            case 6:
                table._filled = 0
            case 7:
                table._bins[0][3] = None
            case 8:
                table._remove(range(3, 7))
                table._add(range(3, 5))
                table._add(range(5, 7))
            case 9:
                table.slots = 17
        return table

    for number in range(10):
        with pytest.raises(SwapError):
            broken(number).check_integrity()
