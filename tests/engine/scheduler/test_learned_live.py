"""What a policy learns leaves the scheduler, and comes back to the next one; on vLLM's real scheduler, no model."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from weft.core.class_rows import Branch, ClassRow
from weft.core.ids import ProgramId
from weft.core.policies.history import History
from weft.engine.wire.control import ProgramsEnded, TakeLearned, UseHistory, encode_control
from weft.engine.wire.reports import LearnedReport, read_answer

pytestmark = pytest.mark.engine


@pytest.fixture
def harness(tmp_path: Path) -> Any:
    from scheduler_harness import SchedulerHarness

    return SchedulerHarness(tmp_path, {"name": "auto", "model": "my/model"})


def learned(harness: Any) -> LearnedReport:
    found = read_answer(LearnedReport, harness.scheduler(encode_control(TakeLearned())))
    assert found is not None
    return found


def run(harness: Any, count: int) -> None:
    """Programs come, make one call of ten tokens, and end."""
    for number in range(count):
        harness.add(f"call-{number}", program_id=f"p{number}", program_name="chat", max_tokens=10)
    harness.run()
    harness.scheduler(encode_control(ProgramsEnded(tuple(ProgramId(f"p{number}") for number in range(count)))))


def test_what_a_scheduler_learns_is_taken_once(harness: Any) -> None:
    """Each program that has ended is reported with its work, and its class with what is known of it."""
    run(harness, 3)
    first = learned(harness)
    assert (first.model, first.has_history) == ("my/model", False)
    assert [(end.name, end.is_known) for end in first.ends] == [("chat", True)] * 3
    assert all(end.work_tokens >= 10 for end in first.ends)
    assert [(row.name, row.ended, row.live) for row in first.classes] == [("chat", 3, 0)]
    assert learned(harness).ends == ()


def test_an_answer_has_a_hundred_classes(harness: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those with programs at the gate or in progress are among them, however many names there are."""
    few = [ClassRow(None, f"busy {n}", 0, 1, math.nan, math.nan, Branch.QUEUES, held=n % 2) for n in range(50)]
    many = [ClassRow(None, f"n{n}", 9, 0, math.nan, math.nan, Branch.INDEX) for n in range(1000)]
    monkeypatch.setattr(harness.scheduler.weft_policy, "classes", lambda: [*many, *few])
    classes = learned(harness).classes
    assert len(classes) == 100
    assert {row.name for row in few} <= {row.name for row in classes}


def test_the_prompts_of_an_engines_start_are_forgotten(harness: Any) -> None:
    """They are no programs, so nothing is known after them. A program that has come by then is not forgotten."""
    harness.add("calibration", max_tokens=1)
    harness.run()
    assert len(learned(harness).classes) == 1
    harness.scheduler(encode_control(UseHistory(History().to_json())))
    assert learned(harness).classes == ()


def test_a_program_that_came_before_the_history_stays(harness: Any) -> None:
    """A replica that starts again may have calls before it gets the history."""
    harness.add("early", program_id="early", program_name="chat", max_tokens=5)
    harness.scheduler(encode_control(UseHistory(History().to_json())))
    harness.run()
    harness.scheduler(encode_control(ProgramsEnded((ProgramId("early"),))))
    assert [end.name for end in learned(harness).ends] == ["chat"]


def test_a_scheduler_begins_with_the_history_of_its_model(harness: Any) -> None:
    """It uses the first history that comes. That of another model is not its own."""
    run(harness, 12)
    history = History()
    for end in learned(harness).ends:
        history["my/model"].add(end)
        history["other"].add(end._replace(name="other"))
    for _ in range(2):
        assert harness.scheduler(encode_control(UseHistory(history.to_json()))) == {}
    harness.step()
    (row,) = learned(harness).classes
    assert (row.name, row.ended, row.branch) == ("chat", 12, Branch.ALIKE)
    assert learned(harness).has_history


def test_a_history_may_come_while_the_step_of_an_aborted_call_is_under_way(harness: Any) -> None:
    """No call is left, so the scheduler begins anew. The outputs of the step come all the same."""
    harness.add("calibration", max_tokens=5)
    scheduler = harness.scheduler
    plan = scheduler.schedule()
    output = harness.worker.execute(plan)
    harness.abort("calibration")
    scheduler(encode_control(UseHistory(History().to_json())))
    scheduler.update_from_output(plan, output)
    assert learned(harness).classes == ()
    run(harness, 1)
    assert [end.name for end in learned(harness).ends] == ["chat"]
