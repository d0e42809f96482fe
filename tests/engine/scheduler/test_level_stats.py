"""What each queue has had, on vLLM's real scheduler, without a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from weft.core.policies.queues import ScheduleStats
from weft.engine.wire.reports import read_answer

pytestmark = pytest.mark.engine


def stats(h: Any) -> ScheduleStats:
    found = read_answer(ScheduleStats, h.scheduler({"type": "take_schedule_stats"}))
    assert found is not None
    return found


def test_wait_and_service_are_summed_by_queue(tmp_path: Path) -> None:
    """The sums over the queues are those over the calls' accounts, and a call that was demoted counts in both."""
    from scheduler_harness import SchedulerHarness

    h = SchedulerHarness(tmp_path, {"name": "atlas", "bounds_s": [2.0], "beta": None}, slots=1)
    for name in ("a", "b"):
        h.add(name, max_tokens=4, program_id=name)
    h.step()
    assert [(each.running, each.waiting) for each in stats(h).levels] == [(1, 1)]
    h.run()
    first, second = stats(h).levels
    assert (first.level, second.level) == (0, 1)
    assert (first.starts, second.starts) == (2, 2), "each call was preempted once, in the second queue"
    assert (first.service_s, second.service_s) == (4.0, 4.0)
    accounts = h.accounts.values()
    assert first.wait_s + second.wait_s == sum(each["wait_s"] for each in accounts)
    assert (first.running, first.waiting, second.running, second.waiting) == (0, 0, 0, 0)
    assert stats(h).promotions == 0


@pytest.mark.parametrize("name", ["atlas", "fair"])
def test_promotions_are_counted(tmp_path: Path, name: str) -> None:
    """A call that starves in the second queue is promoted, also by a policy inside another one."""
    from scheduler_harness import SchedulerHarness

    policy = {"bounds_s": [2.0], "beta": 0.5, "gate": True} if name == "atlas" else {"inner": "atlas"}
    h = SchedulerHarness(tmp_path, {"name": name, **policy}, slots=1)
    h.add("old", max_tokens=4, program_id="old", service_s=9.0, total_service_s=9.0)
    for number in range(12):
        h.add(f"new {number}", max_tokens=8, program_id=f"new {number}")
    h.run()
    assert stats(h).promotions > 0
