"""Work that is done once a period, in parts."""

from __future__ import annotations

from weft.core.kv_cache.eviction_order import Rotation


def test_every_item_comes_once_a_period() -> None:
    """Some in each step, whatever the steps' lengths are, and new items in the next period."""
    items = list(range(100))
    rotation = Rotation(lambda: items, 1.0)
    assert rotation.due(0.0) == items, "the first question comes a period late"
    items = list(range(50))
    seen = []
    parts = []
    for step in range(1, 21):
        part = rotation.due(step / 10)
        parts.append(len(part))
        seen += part
    assert seen == list(range(50))
    assert max(parts) <= 6


def test_a_question_after_a_whole_period_gets_all_items() -> None:
    """An engine that was idle starts with nothing out of date."""
    rotation = Rotation(lambda: range(10), 1.0)
    rotation.due(0.0)
    assert rotation.due(0.5) == []
    assert rotation.due(5.0) == list(range(10))


def test_many_items_take_longer_than_a_period() -> None:
    """At most so many a second come, and each comes once."""
    rotation = Rotation(lambda: range(50), 1.0, most_a_s=10)
    rotation.due(0.0)
    parts = [rotation.due(step / 10) for step in range(1, 101)]
    assert max(map(len, parts)) <= 2
    assert [item for part in parts for item in part] == list(range(50))
