"""Where the time of calls goes, from the batches of a scheduler."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from weft.bench.clock import Clock
from weft.bench.meter import Meter, timed
from weft.bench.results.measures import CALL_PARTS
from weft.core.testing import FakeClock

pytestmark = pytest.mark.engine  # the meter's types are vLLM's


def scheduled(meter: Meter, new: list[str], running: list[str], unfinished: int, schedule_s: float) -> None:
    """A step in which `new` and `running` compute a token each, and the rest of `unfinished` calls wait."""
    output = SimpleNamespace(
        finished_req_ids=(),
        scheduled_new_reqs=[SimpleNamespace(req_id=n, prompt_token_ids=[1], num_computed_tokens=0) for n in new],
        kv_connector_metadata=None,
        scheduled_cached_reqs=SimpleNamespace(req_ids=running, num_computed_tokens=[1] * len(running)),
        num_scheduled_tokens=dict.fromkeys((*new, *running), 1),
        total_num_scheduled_tokens=len(new) + len(running),
    )
    requests = {f"r{n}": SimpleNamespace(request_id=f"r{n}", block_hashes=[]) for n in range(unfinished)}
    meter.note_scheduled(cast("Any", output), cast("Any", requests), schedule_s)


def test_the_time_of_calls_is_what_their_steps_took() -> None:
    """Of three calls two run in a step of 8 seconds, and the third waits. The step has 1 second of copies and 2 of the
    scheduler. In the next step all three run. The parts add up to every call's steps."""
    meter = Meter()
    scheduled(meter, ["r0", "r1"], [], unfinished=3, schedule_s=1.5)
    meter.note_copied(1.0)
    meter.note_updated(0.5)
    meter.end_step(8.0)
    scheduled(meter, ["r2"], ["r0", "r1"], unfinished=3, schedule_s=0.0)
    meter.end_step(4.0)
    counts = meter.counts
    assert (counts.calls, counts.waiting_steps, counts.running_steps) == (3, 1, 5)
    assert (counts.waiting_s, counts.copying_s, counts.scheduling_s) == (8.0, 2.0, 4.0)
    assert sum(getattr(counts, f"{part}_s") for part in CALL_PARTS) == 3 * 8.0 + 3 * 4.0


def test_copies_are_timed_and_return_what_they_return() -> None:
    """A timed method of the connector works as before, and what its clock shows is copying."""
    time, meter = FakeClock(), Meter()

    def copy(block: int) -> int:
        time.advance(0.25)
        return block + 1

    assert timed(copy, meter, Clock(counts_steps=False, timer=time))(4) == 5
    scheduled(meter, ["r0"], [], unfinished=1, schedule_s=0.0)
    meter.end_step(1.0)
    assert meter.counts.copying_s == 0.25
