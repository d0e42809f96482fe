"""The rule that tells an engine that is stuck from one in a long step."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from weft.core.routing.liveness import Liveness, ProcessUsage

LIMIT_S = 120.0
PERIOD_S = Liveness(LIMIT_S).period_s


class Observed:
    """An engine that a test observes once in each period."""

    def __init__(self) -> None:
        self.rule = Liveness(LIMIT_S)
        self.now_s = self.cpu_s = 0.0
        self.observe(answered=True)

    def observe(self, periods: int = 1, *, answered: bool = False, busy: float = 0.0, stopped: bool = False) -> bool:
        """Observe for some periods, in which the processes use the share `busy` of a core."""
        verdict = False
        for _ in range(periods):
            self.now_s += PERIOD_S
            self.cpu_s += busy * PERIOD_S
            verdict = self.rule.observe(self.now_s, ProcessUsage(self.cpu_s, stopped), answered=answered)
        return verdict


def test_silence_without_cpu_time_is_a_hang_after_the_limit() -> None:
    """It is not one before, and the share of a core that idle threads use makes no difference."""
    engine = Observed()
    assert not engine.observe(9, busy=0.005)
    assert engine.observe(busy=0.005)


def test_a_long_step_is_no_hang() -> None:
    """The engine does not answer for an hour, but it computes, though slowly on a crowded machine."""
    engine = Observed()
    assert not any(engine.observe(busy=0.02) for _ in range(300))


def test_an_answer_begins_the_limit_from_its_start() -> None:
    """An idle engine uses no CPU time and answers."""
    engine = Observed()
    for _ in range(10):
        assert not engine.observe(9)
        assert not engine.observe(answered=True)


def test_a_hang_after_a_long_step_is_noticed() -> None:
    """Only the CPU time since the hang counts."""
    engine = Observed()
    assert not engine.observe(50, busy=1.0)
    assert not engine.observe(9)
    assert engine.observe()


def test_a_stopped_process_is_a_hang_although_others_wait_busily() -> None:
    """A worker of a stopped engine process may spin for ever."""
    engine = Observed()
    assert not engine.observe(9, busy=1.0, stopped=True)
    assert engine.observe(busy=1.0, stopped=True)


def test_a_process_that_was_stopped_for_a_moment_is_no_hang() -> None:
    """A debugger stops a process like this in the midst of a long step."""
    engine = Observed()
    assert not engine.observe(20, busy=1.0)
    assert not engine.observe(9, stopped=True)
    assert not engine.observe(busy=1.0)
    assert not engine.observe(9, stopped=True)


def test_time_without_observations_does_not_count() -> None:
    """After Ctrl-Z and `fg`, the engine has been stopped as long as its observer, and will answer soon."""
    engine = Observed()
    assert not engine.observe(3)
    engine.now_s += 3600.0
    assert not engine.observe()
    assert not engine.observe(answered=True)


def test_the_memory_is_bounded() -> None:
    """However long a step is."""
    engine = Observed()
    engine.observe(1000, busy=1.0)
    assert len(engine.rule._silent) <= 12


@given(st.lists(st.tuples(st.booleans(), st.sampled_from([0.0, 0.005, 0.5]), st.booleans()), max_size=60))
def test_the_rule_is_its_definition(periods: list[tuple[bool, float, bool]]) -> None:
    """Stuck means: in the last ten periods no answer came, and the processes used at most 1 % of a core or stood."""
    engine = Observed()
    for number, (answered, busy, stopped) in enumerate(periods, start=1):
        verdict = engine.observe(answered=answered, busy=busy, stopped=stopped)
        last = periods[max(0, number - 10) : number]
        silent = not any(answer for answer, _, _ in last)
        used = sum(0.0 if stood else use for _, use, stood in last) / 10
        assert verdict == (len(last) == 10 and silent and used <= 0.01 + 1e-9)
