"""The scheduler's side of the swap, against a naive model of the device, the host memory and the calls."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from weft.core.kv_cache.swap import CopySpeed, SwapChoice, SwapStats
from weft.engine.kv_cache.plan import SwapPlan, SwapPlanner

BLOCK = 4


def planner(slots: int, min_tokens: int = 0) -> SwapPlanner:
    return SwapPlanner(slots, BLOCK, SwapChoice(min_tokens, 1.0))


def planned(plans: SwapPlanner) -> SwapPlan:
    """What the workers would copy now."""
    return plans.take_plan() or SwapPlan()


def content(tokens: list[int], index: int, known: int) -> tuple[int, ...]:
    """What block `index` holds when the first `known` tokens are computed."""
    return tuple(tokens[index * BLOCK : min(known, (index + 1) * BLOCK)])


def hashes_of(tokens: list[int]) -> list[Any]:
    """Stand-ins for vLLM's: a full block's names all tokens up to its end."""
    return [tuple(tokens[: end + BLOCK]) for end in range(0, len(tokens) - BLOCK + 1, BLOCK)]


class SwapMachine(RuleBasedStateMachine):
    """Calls are preempted, resumed, extended and ended in any order; what is loaded must be what was computed."""

    @initialize(slots=st.integers(1, 30), caching=st.booleans(), min_tokens=st.sampled_from([0, 0, 6]))
    def start(self, slots: int, caching: bool, min_tokens: int) -> None:
        self.planner = planner(slots, min_tokens)
        self.caching = caching
        self.min_tokens = min_tokens
        self.host: dict[int, tuple[int, ...]] = {}
        self.tokens: dict[str, list[int]] = {}  # of each call, all computed
        self.running: set[str] = set()
        self.names = iter(range(10**6))
        self.blocks = iter(range(10**9))  # a device whose blocks are never used twice

    @rule(length=st.integers(1, 30), family=st.integers(0, 2))
    def arrive(self, length: int, family: int) -> None:
        """Calls of one family begin alike, as prompts do."""
        name = f"call-{next(self.names)}"
        self.tokens[name] = [family] * min(length, 9) + [int(name[5:]) + 10] * max(0, length - 9)
        self.running.add(name)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), more=st.integers(1, 9))
    def compute(self, data: st.DataObject, more: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.running)))
        self.tokens[name] += [int(name[5:]) + 10] * more

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        """Some running calls are preempted, some waiting ones resume, and the workers carry the plan out."""
        victims = data.draw(st.lists(st.sampled_from(sorted(self.running)), unique=True)) if self.running else []
        device: dict[int, tuple[int, ...]] = {}
        for name in victims:
            self.running.discard(name)
            tokens = self.tokens[name]
            blocks = [next(self.blocks) for _ in range(-(-len(tokens) // BLOCK))]
            device |= {block: content(tokens, index, len(tokens)) for index, block in enumerate(blocks)}
            saved = self.planner.save(name, blocks, len(tokens), hashes_of(tokens) if self.caching else [])
            if saved:
                assert self.planner.match(name, 0, len(tokens) + 1) == len(tokens) >= self.min_tokens
        waiting = sorted(self.tokens.keys() - self.running)
        resuming = data.draw(st.lists(st.sampled_from(waiting), unique=True)) if waiting else []
        loads: list[tuple[str, int, int, list[int]]] = []
        for name in resuming:
            tokens = self.tokens[name]
            local = BLOCK * data.draw(st.integers(0, len(tokens) // BLOCK))
            more = self.planner.match(name, local, len(tokens) + data.draw(st.integers(0, 1)))
            blocks = [next(self.blocks) for _ in range(-(-(local + more) // BLOCK))]
            self.planner.resume(name, blocks, local, local + more)
            assert self.planner.loaded_tokens(name) == more
            loads.append((name, local, local + more, blocks))
            self.running.add(name)
        self.carry_out(device)
        for name, start, end, blocks in loads:
            for index in range(start // BLOCK, -(-end // BLOCK)):
                wanted = content(self.tokens[name], index, end)
                assert self.loaded[blocks[index]][: len(wanted)] == wanted

    def carry_out(self, device: dict[int, tuple[int, ...]]) -> None:
        plan = planned(self.planner)
        assert len(set(plan.out.slots)) == len(plan.out.slots)
        for block, slot in zip(plan.out.blocks, plan.out.slots, strict=True):
            self.host[slot] = device[block]
        self.loaded = {
            block: self.host[slot]
            for copies in plan.loads
            for block, slot in zip(copies.blocks, copies.slots, strict=True)
        }

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.tokens)))
        del self.tokens[name]
        self.running.discard(name)
        self.planner.release(name)

    @rule()
    def reset(self) -> None:
        self.planner.reset()
        assert self.planner.stats().used == 0

    @invariant()
    def books_agree(self) -> None:
        if hasattr(self, "planner"):
            self.planner.check_integrity()
            if not self.tokens:
                assert self.planner.stats().used == 0


TestSwapMachine = SwapMachine.TestCase
TestSwapMachine.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)


def test_a_second_preemption_copies_only_what_is_new() -> None:
    """Ten tokens, then sixteen: of the second copy the first two blocks are there already."""
    plans = planner(100)
    plans.save("a", [1, 2, 3], 10, [])
    assert planned(plans).out.blocks == [1, 2, 3]
    plans.resume("a", [11, 12, 13], 0, 10)
    (load,) = planned(plans).loads
    assert load.blocks == [11, 12, 13]
    plans.save("a", [11, 12, 13, 14], 16, [])
    assert planned(plans).out.blocks == [13, 14]


def test_the_last_token_is_left_to_compute() -> None:
    """The model has to run to say something, even where every token is known in host memory."""
    plans = planner(100)
    plans.save("a", [1, 2, 3], 10, [])
    assert [plans.match("a", 0, count) for count in (9, 10, 11, 99)] == [8, 9, 10, 10]
    assert plans.match("a", 8, 99) == 2
    assert plans.match("b", 0, 99) == 0


def test_a_copy_that_is_being_loaded_is_not_given_up() -> None:
    """What is copied out in a step is copied before what is copied in, so its slots are not for others yet."""
    plans = planner(4)
    plans.save("a", [1, 2, 3], 12, [])
    plans.take_plan()
    plans.resume("a", [4, 5, 6], 0, 12)
    assert not plans.save("longer", [7, 8, 9, 10], 16, [])
    plans.take_plan()
    assert plans.save("longer", [7, 8, 9, 10], 16, [])


def test_calls_that_share_a_prefix_share_its_copy() -> None:
    """The blocks of a common prompt are copied once, and stay while anybody needs them."""
    plans = planner(100)
    plans.save("a", [1, 2, 3], 12, ["x", "y", "a"])
    plans.save("b", [1, 2, 4], 12, ["x", "y", "b"])
    assert planned(plans).out.blocks == [1, 2, 3, 4]
    plans.release("a")
    assert plans.match("b", 0, 13) == 12
    plans.release("b")
    assert plans.stats().used == 0


def test_a_full_memory_gives_up_what_is_worth_least() -> None:
    """First a copy whose call runs again, then a shorter one; where that is not enough, nothing is given up."""
    plans = planner(8)
    plans.save("again", [1, 2], 8, [])
    plans.resume("again", [3, 4], 0, 8)
    plans.save("short", [5], 4, [])
    plans.save("long", [6, 7, 8, 9], 16, [])
    plans.take_plan()
    assert plans.save("middle", [10, 11, 12], 12, [])
    assert (plans.match("again", 0, 99), plans.match("short", 0, 99)) == (0, 4)
    assert not plans.save("little", [13, 14], 8, [])
    assert plans.match("short", 0, 99) == 4
    assert plans.save("longest", [15, 16, 17, 18, 19], 20, [])
    assert [plans.match(name, 0, 99) for name in ("short", "middle", "long", "longest")] == [0, 0, 0, 20]
    assert (plans.stats().too_full, plans.stats().evicted) == (1, 4)


def test_a_copy_given_up_in_the_same_step_is_not_made() -> None:
    """Two calls are preempted in one step, and there is room for the longer one only."""
    plans = planner(4)
    plans.save("short", [1, 2], 8, [])
    plans.save("long", [3, 4, 5, 6], 16, [])
    assert planned(plans).out.blocks == [3, 4, 5, 6]


def test_the_threshold_is_where_both_take_as_long() -> None:
    """1 ms a swap, 1 µs to copy a token and 11 µs to compute it: 200 tokens."""
    choice = SwapChoice("auto", token_bytes=1000.0)
    assert choice.min_tokens == 0
    choice.observe_copy(CopySpeed(0.001, 2e9, 2e9))
    assert choice.min_tokens == 0
    choice.observe_step(127, 99.0)  # too few tokens to tell
    assert choice.prefill_tokens_per_s is None
    for step_s in (0.0055, 0.011, 1.1):
        choice.observe_step(1000, step_s)
    assert choice.min_tokens == pytest.approx(200)
    choice.observe_copy(CopySpeed(0.001, 1e7, 1e7))  # slower than computing
    assert choice.min_tokens == float("inf")
    assert SwapChoice(7, 1000.0).min_tokens == 7


def test_the_slower_worker_counts() -> None:
    """All workers copy their shards at once."""
    assert CopySpeed(1.0, 5.0, 9.0).slowest(CopySpeed(2.0, 7.0, 8.0)) == CopySpeed(2.0, 5.0, 8.0)


def test_figures_of_several_engines() -> None:
    """Counts add up; the highest threshold and the lowest speeds, as far as they are known, stand for all."""
    one = SwapStats(10, 1, 2, 3, 4, 5, 6, 7, 8, 9, 20.0, 900.0, None, 4.0)
    other = SwapStats(20, 2, 2, 2, 2, 2, 2, 2, 2, 2, 30.0, 700.0, None, None)
    assert SwapStats.together([one, other]) == (30, 3, 4, 5, 6, 7, 8, 9, 10, 11, 30.0, 700.0, None, 4.0)
    assert SwapStats.together([]) is None


def test_random_traffic_leaks_nothing() -> None:
    """A thousand preemptions on a memory of a third of the demand; when all have ended, nothing is in use."""
    rng = random.Random(0)
    plans = planner(60)
    lengths = {f"call-{n}": rng.randrange(10, 60) for n in range(30)}
    for _ in range(1000):
        name = rng.choice(list(lengths))
        lengths[name] += 1
        plans.save(name, list(range(-(-lengths[name] // BLOCK))), lengths[name], [])
        plans.resume(name, list(range(99)), 0, plans.match(name, 0, lengths[name]))
        plans.take_plan()
        plans.check_integrity()
    assert plans.stats().evicted > 0
    for name in lengths:
        plans.release(name)
    assert plans.stats().used == 0
