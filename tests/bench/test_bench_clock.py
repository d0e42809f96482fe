"""The clock of a baseline's engine."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

from weft.bench.clock import STEP_S, Clock, engine_timer


def test_the_clock_counts_only_its_own_steps() -> None:
    """Steps and their seconds count, the time between them does not. A jump counts as steps of the mean length."""
    now = SimpleNamespace(s=0.0)
    clock = Clock(counts_steps=True, timer=lambda: now.s)
    for begin_s, end_s in ((10.0, 11.0), (20.0, 23.0)):
        now.s = begin_s
        clock.begin_step()
        assert clock.now_s == clock.steps * STEP_S
        clock.note_scheduled()
        assert clock.now_s == (clock.steps + 1) * STEP_S
        now.s = end_s
        assert clock.end_step() == end_s - begin_s
    assert (clock.steps, clock.seconds) == (2, 4.0)
    clock.skip_to(5 * STEP_S)
    assert (clock.steps, clock.seconds, clock.now_s) == (5, 4.0 + 3 * 2.0, 5 * STEP_S)


def test_a_clock_of_seconds_jumps_in_seconds() -> None:
    """Six seconds without work are three steps where the mean step takes two seconds."""
    now = SimpleNamespace(s=0.0)
    clock = Clock(counts_steps=False, timer=lambda: now.s)
    clock.begin_step()
    now.s = 2.0
    assert clock.now_s == 2.0
    clock.end_step()
    clock.skip_to(8.0)
    assert (clock.steps, clock.now_s) == (4, 8.0)


@pytest.mark.parametrize(
    ("threads", "on_cpu", "timer"),
    [("1", True, time.process_time), ("2", True, time.perf_counter), ("1", False, time.perf_counter)],
)
def test_one_thread_on_a_cpu_is_timed_by_the_processor(
    monkeypatch: pytest.MonkeyPatch, threads: str, on_cpu: bool, timer: object
) -> None:
    """Then what other processes do hardly counts. Threads would count more than once, and a GPU not at all."""
    monkeypatch.setenv("OMP_NUM_THREADS", threads)
    assert engine_timer(on_cpu=on_cpu) is timer
