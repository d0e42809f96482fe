"""Stealing: which engine takes calls of which, how many and when, and a machine against a naive reading of the rule."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from weft.core.errors import BalancerError
from weft.core.ids import EngineId, ProgramId
from weft.core.routing import EngineLoad, Loads, StealingConfig
from weft.core.routing.stealing import EngineQueue, Steal, Stealing

A, B = EngineId("a"), EngineId("b")
CAPACITY = 8


def queue(engine_id: EngineId, calls: int, waiting: int) -> EngineQueue:
    return EngineQueue(EngineLoad(engine_id, calls, CAPACITY), waiting)


def after_idle(thief: EngineQueue, victim: EngineQueue) -> Steal | None:
    """What is stolen when the queues have looked like this for the time that an engine must be idle."""
    stealing = Stealing(StealingConfig())
    assert stealing.decide([thief, victim], 0.0) is None
    return stealing.decide([thief, victim], 0.1)


def test_an_idle_engine_takes_half_of_the_difference() -> None:
    """Both engines then have about the same load."""
    assert after_idle(queue(A, 0, 0), queue(B, 12, 10)) == Steal(A, B, 6, 256 * 12)


@pytest.mark.parametrize(
    ("thief", "victim", "most"),
    [
        (queue(A, 0, 0), queue(B, 12, 2), 2),  # only what waits
        (queue(A, 5, 0), queue(B, 40, 32), 3),  # only what the thief begins at once
        (queue(A, 8, 0), queue(B, 40, 32), 0),  # it has no free slot
        (queue(A, 0, 0), queue(B, 12, 0), 0),  # nothing waits
        (queue(A, 2, 1), queue(B, 12, 4), 0),  # the thief has a queue of its own
        (queue(A, 4, 0), queue(B, 8, 4), 0),  # the ratio is 2.0, and not above
        (queue(A, 4, 0), queue(B, 9, 4), 2),
        (queue(A, 0, 0), queue(B, 2, 1), 0),  # an engine without calls counts as having one
        (queue(A, 0, 0), queue(B, 3, 1), 1),
    ],
)
def test_both_conditions_and_the_room_limit_what_moves(thief: EngineQueue, victim: EngineQueue, most: int) -> None:
    """SAGA 5.2: a queue that stays empty and a ratio of loads above 2.0 are both required."""
    steal = after_idle(thief, victim)
    assert (steal.most if steal is not None else 0) == most


def test_a_call_moves_if_little_is_cached_for_the_difference_in_load() -> None:
    """256 tokens for each call that it is ahead of, less where the thief has calls that wait while it is computed."""
    found = [after_idle(queue(A, calls, 0), queue(B, 12, 10)) for calls in (0, 1, 5)]
    assert [steal.most_cached for steal in found if steal is not None] == [256 * 12, 256 * 11 // 2, 256 * 7 // 6]


def test_an_engine_must_have_been_idle_for_100_ms_without_a_break() -> None:
    """A call that waits there in between begins the time again."""
    stealing = Stealing(StealingConfig())
    busy = queue(B, 12, 10)
    seen = [(0.0, 0), (0.05, 0), (0.09, 1), (0.12, 0), (0.2, 0), (0.22, 0)]
    stolen = [stealing.decide([queue(A, 1, waiting), busy], now_s) is not None for now_s, waiting in seen]
    assert stolen == [False, False, False, False, False, True]


def test_loads_that_are_even_end_all_idleness() -> None:
    """Queues are not asked for meanwhile, so nobody knows that they stayed empty."""
    stealing = Stealing(StealingConfig())
    stealing.decide([queue(A, 0, 0), queue(B, 12, 10)], 0.0)
    loads = Loads(CAPACITY)
    loads.open(A, 0, 2)
    loads.open(B, 1, 4)
    assert not stealing.is_uneven(loads)
    assert stealing.decide([queue(A, 0, 0), queue(B, 12, 10)], 0.1) is None


def test_an_engine_that_has_taken_calls_must_be_idle_again() -> None:
    """Otherwise it would go on taking calls before the first ones count."""
    stealing = Stealing(StealingConfig())
    queues = [queue(A, 0, 0), queue(B, 12, 10)]
    stealing.decide(queues, 0.0)
    assert stealing.decide(queues, 0.1) is not None
    stealing.moved(ProgramId("p"), A, 0.1)
    assert stealing.decide(queues, 0.15) is None
    assert stealing.decide(queues, 0.25) is not None


def test_a_program_is_not_moved_again_in_its_cooldown() -> None:
    """Its context is recomputed at each move. Others may move."""
    stealing = Stealing(StealingConfig(cooldown_s=2.0))
    stealing.moved(ProgramId("p"), A, 1.0)
    assert [stealing.may_move(ProgramId("p"), now_s) for now_s in (1.0, 2.9, 3.0)] == [False, False, True]
    assert stealing.may_move(ProgramId("q"), 1.0)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"idle_s": -1}, "idle_s must be a finite number, 0 or more, not -1"),
        ({"load_ratio": 0.5}, "load_ratio must be a finite number, 1 or more, not 0.5"),
        ({"load_ratio": math.nan}, "load_ratio must be a finite number, 1 or more, not nan"),
        ({"cooldown_s": math.inf}, "cooldown_s must be a finite number, 0 or more, not inf"),
        ({"cooldown_s": "1"}, "cooldown_s must be a number, not '1'"),
    ],
)
def test_invalid_limits_are_refused(wrong: dict[str, Any], message: str) -> None:
    """The error names the limit and the values that are possible."""
    with pytest.raises(BalancerError, match=message):
        StealingConfig(**wrong)


class StealingMachine(RuleBasedStateMachine):
    """Three engines with calls that begin, end and are stolen. Each steal is checked against the rule as it is written,
    on the whole history of queues."""

    def __init__(self) -> None:
        super().__init__()
        self.stealing = Stealing(StealingConfig(cooldown_s=0.5))
        self.now_s = 0.0
        self.running: dict[EngineId, list[str]] = {EngineId(f"e{n}"): [] for n in range(3)}
        self.waiting: dict[EngineId, list[str]] = {engine: [] for engine in self.running}
        self.calls = self.ended = 0
        self.looks: list[tuple[float, dict[EngineId, int] | None]] = []  # the queues; None where the load was even
        self.moves: list[tuple[float, str, EngineId]] = []

    @rule(engine=st.integers(0, 2), count=st.integers(1, 9))
    def arrive(self, engine: int, count: int) -> None:
        for _ in range(count):
            self.waiting[EngineId(f"e{engine}")].append(f"c{self.calls}")
            self.calls += 1
        self.begin()

    def begin(self) -> None:
        for engine, queued in self.waiting.items():
            while queued and len(self.running[engine]) < CAPACITY:
                self.running[engine].append(queued.pop(0))

    @rule(engine=st.integers(0, 2), count=st.integers(1, 9))
    def end(self, engine: int, count: int) -> None:
        gone = self.running[EngineId(f"e{engine}")]
        self.ended += len(gone[:count])
        del gone[:count]
        self.begin()

    def queues(self) -> list[EngineQueue]:
        return [
            EngineQueue(EngineLoad(engine, len(self.running[engine]) + len(queued), CAPACITY), len(queued))
            for engine, queued in self.waiting.items()
        ]

    @rule(after_s=st.sampled_from([0.02, 0.05, 0.1, 0.3]))
    def look(self, after_s: float) -> None:
        self.now_s += after_s
        queues = self.queues()
        loads = Loads(CAPACITY)
        for number, queue in enumerate(queues):
            loads.open(queue.load.engine_id, number, queue.load.calls)
        if not self.stealing.is_uneven(loads):
            self.looks.append((self.now_s, None))
            return
        self.looks.append((self.now_s, {queue.load.engine_id: queue.waiting for queue in queues}))
        steal = self.stealing.decide(queues, self.now_s)
        assert (steal is not None) == self.expects_a_steal(queues)
        if steal is not None:
            self.check(steal)
            self.take(steal)

    def idle_s(self, engine: EngineId) -> float:
        """Seconds for which every look has found the engine's queue empty, since it last took a call."""
        since_s = self.now_s
        for at_s, seen in reversed(self.looks):
            if (
                seen is None
                or seen[engine]
                or any(thief == engine and at_s <= moved_s for moved_s, _, thief in self.moves)
            ):
                break
            since_s = at_s
        return self.now_s - since_s

    def may_take(self, engine: EngineId) -> bool:
        return self.idle_s(engine) >= 0.1 and len(self.running[engine]) < CAPACITY and not self.waiting[engine]

    def expects_a_steal(self, queues: list[EngineQueue]) -> bool:
        thieves = [queue.load.calls for queue in queues if self.may_take(queue.load.engine_id)]
        victims = [queue.load.calls for queue in queues if queue.waiting]
        return bool(thieves and victims) and max(victims) > 2 * max(1, min(thieves))

    def check(self, steal: Steal) -> None:
        calls = {queue.load.engine_id: queue.load.calls for queue in self.queues()}
        assert self.may_take(steal.thief)
        assert calls[steal.victim] > 2 * max(1, calls[steal.thief])
        assert 1 <= steal.most <= len(self.waiting[steal.victim])
        assert len(self.running[steal.thief]) + steal.most <= CAPACITY
        assert calls[steal.thief] + steal.most <= calls[steal.victim] - steal.most

    def take(self, steal: Steal) -> None:
        movable = [call for call in self.waiting[steal.victim] if self.stealing.may_move(ProgramId(call), self.now_s)]
        for call in movable[: steal.most]:
            assert not any(call == moved and self.now_s - at_s < 0.5 for at_s, moved, _ in self.moves)
            self.waiting[steal.victim].remove(call)
            self.waiting[steal.thief].append(call)
            self.stealing.moved(ProgramId(call), steal.thief, self.now_s)
            self.moves.append((self.now_s, call, steal.thief))
        self.begin()

    @invariant()
    def each_call_is_in_one_place(self) -> None:
        calls = [call for held in (self.running, self.waiting) for each in held.values() for call in each]
        assert len(calls) == len(set(calls)) == self.calls - self.ended

    @invariant()
    def only_recent_moves_are_remembered(self) -> None:
        last_s = max((at_s for at_s, _, _ in self.moves), default=0.0)
        assert len(self.stealing._moved_s) <= len([0 for at_s, _, _ in self.moves if last_s - at_s < 0.5 + 1e-9])


def test_any_sequence_of_events() -> None:
    """Calls move exactly when the rule says so, and none is lost, doubled or moved twice in its cooldown."""
    case = StealingMachine.TestCase
    case.settings = settings(max_examples=150, stateful_step_count=50)
    case("runTest").runTest()
