"""Tool times, output lengths and reuse: what they learn by name, and that hostile names cannot make them grow."""

from __future__ import annotations

import pytest

from weft.core.prediction import OutputLengths, Reuse, ReusedPart, ToolTimes, WaitsByLevel
from weft.core.prediction.samples import MOST_NAMES


def test_a_tool_has_its_own_times() -> None:
    """Known tools differ; a tool that was never seen is like all of them together."""
    times = ToolTimes()
    for _ in range(30):
        times.observe("search", 10.0)
        times.observe("add", 0.1)
    assert times.of("search").mean_s == pytest.approx(10.0)
    assert times.of("add").quantile_s(0.95) == pytest.approx(0.1)
    assert times.of("new").mean_s == times.of(None).mean_s == pytest.approx(5.05)


def test_made_up_names_do_not_drive_out_known_ones() -> None:
    """A flood of new names is bounded and leaves the names with three samples alone."""
    times = ToolTimes()
    for _ in range(3):
        times.observe("search", 10.0)
    for number in range(5000):
        times.observe(f"tool {number}", 1.0)
    assert len(times) <= MOST_NAMES
    assert len(times.of("search")) == 3
    for number in range(5000):
        for _ in range(3):
            times.observe(f"tool {number}", 1.0)
    assert len(times) <= MOST_NAMES


@pytest.mark.parametrize("name", ["", "x" * 10**6, "\ud800", "\0", "a\nb", "🧵" * 500])
def test_any_text_is_a_name(name: str) -> None:
    """Names come from models and tools. The length that is kept of each is bounded."""
    times = ToolTimes()
    for _ in range(3):
        times.observe(name, 2.0)
    assert times.of(name).mean_s == pytest.approx(2.0, rel=0.2)
    assert len(times.of(name + "y" * 200)) == 3 or len(name) < 128


def test_output_lengths_back_off_to_coarser_classes() -> None:
    """A label that is new in a program is like the program's other calls; a new program is like all programs."""
    lengths = OutputLengths()
    for calls_before in range(40):
        lengths.observe("agent", "plan", calls_before, 500)
        lengths.observe("agent", "act", calls_before, 20)
    assert lengths.mean_tokens("agent", "plan", 20) == pytest.approx(500, rel=0.15)
    assert lengths.mean_tokens("agent", "act", 20) < 60
    assert lengths.mean_tokens("agent", "reflect", 0) == pytest.approx(260, rel=0.05)
    assert lengths.mean_tokens("other", None, 0) == pytest.approx(260)


def test_the_number_of_calls_tells_the_first_from_the_later_ones() -> None:
    """A first call that plans is longer than those that follow."""
    lengths = OutputLengths()
    for _ in range(40):
        lengths.observe("agent", None, 0, 900)
        lengths.observe("agent", None, 5, 30)
    assert lengths.mean_tokens("agent", None, 0) > 10 * lengths.mean_tokens("agent", None, 5)


def test_a_loop_continues_its_context_and_a_search_gives_branches_up() -> None:
    """The chance falls with the calls that have started since, where that is what happens."""
    reuse = Reuse()
    for _ in range(100):
        for _ in range(9):
            reuse.observe("loop", 0, continued=True)
        reuse.observe("loop", 0, continued=False)
        reuse.observe("search", 1, continued=True)
        for _ in range(4):
            reuse.observe("search", 100, continued=False)
    assert reuse.chance("loop", 0) == pytest.approx(0.9, abs=0.02)
    assert reuse.chance("search", 0) == pytest.approx(0.2, abs=0.02)
    assert reuse.chance("search", 50) < 0.02
    assert reuse.chance("unknown", 0) == pytest.approx(10 / 15, abs=0.05)  # like all programs
    assert Reuse().chance("first", 0) == pytest.approx(0.5)


def test_reuse_keeps_a_bounded_number_of_names() -> None:
    """Names come from users."""
    reuse = Reuse()
    for number in range(2000):
        reuse.observe(f"program {number}", number, continued=False)
    assert len(reuse._names) <= 256


def test_each_queue_has_its_own_waits() -> None:
    """Calls of the first queue that start at once say nothing about those of the last, which wait for a minute."""
    waits = WaitsByLevel()
    for second in range(100):
        waits.of(0).observe(float(second), 0.0)
        if second % 10 == 0:
            waits.of(4).observe(float(second), 60.0)
    assert (waits.of(0).mean_s, waits.of(0).turn_s) == (0.0, 0.0)
    assert waits.of(4).mean_s == pytest.approx(60.0)
    assert 10.0 <= waits.of(4).turn_s < 20.0


def test_most_calls_of_an_ordered_queue_start_at_once() -> None:
    """Of ten calls one waits for a minute: the mean is 6 s, and nearly no call waits for that long."""
    waits = WaitsByLevel().of(0)
    for number in range(100):
        waits.observe(float(number), 60.0 if number % 10 == 0 else 0.0)
    assert waits.mean_s > 3.0
    assert waits.median_s == 0.0


@pytest.mark.parametrize(("waits_s", "median_s"), [([5.0], 5.0), ([1.0, 90.0, 2.0], 2.0), ([4.0, 90.0, 1.0, 2.0], 3.0)])
def test_the_median_is_of_all_waits(waits_s: list[float], median_s: float) -> None:
    """Of an even number it is the mean of the two in the middle."""
    waits = WaitsByLevel().of(0)
    for number, wait_s in enumerate(waits_s):
        waits.observe(100.0 + number, wait_s)
    assert waits.median_s == median_s


def test_the_first_wait_counts_in_full() -> None:
    """A queue of which one call has started so far is not taken for an empty one."""
    waits = WaitsByLevel().of(1)
    waits.observe(100.0, 40.0)
    assert waits.mean_s == waits.turn_s == 40.0


def test_levels_are_bounded() -> None:
    """Whatever levels a policy has."""
    waits = WaitsByLevel()
    assert waits.of(10**9) is waits.of(10**6)


def test_the_part_of_a_context_that_is_used_again() -> None:
    """All of it is assumed until eight calls have shown less. Calls whose context was evicted do not count for less, as
    long as one call in twenty finds it."""
    parts = ReusedPart()
    for _ in range(7):
        parts.observe("web", 0.3)
    assert parts.part("web") == 1.0
    parts.observe("web", 0.3)
    assert parts.part("web") == pytest.approx(0.3)
    for _ in range(3):
        for found in (*[0.0] * 19, 0.3):
            parts.observe("web", found)
    assert parts.part("web") == pytest.approx(0.3)
    assert parts.part("other") == 1.0
    for number in range(1000):
        parts.observe(number, 0.5)
    assert len(parts) <= 256
