"""The replay: Bélády's rule is the best, LRU is the simulator's, and the sequence is the same for all."""

from __future__ import annotations

import random
import sys
from array import array
from collections.abc import Callable
from functools import partial
from itertools import chain, combinations
from types import FrameType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.core.errors import SimulationError
from weft.core.kv_cache.policies import KV_POLICIES, KvPolicyConfig
from weft.core.policies import PolicyConfig
from weft.core.sim import SimSettings
from weft.core.sim.kv_cache.kv_replay import Access, Kind, PlayedCall, accesses, replay, replay_all, replay_belady
from weft.core.trace.format import TraceCall, TraceProgram
from weft.core.trace.prefixes import BLOCK_TOKENS
from weft.core.trace.workloads import generate, poisson


def of_blocks(blocks: int) -> SimSettings:
    return SimSettings(kv_tokens=blocks * BLOCK_TOKENS)


def sequence(chains: list[str]) -> list[Access]:
    """Calls one after the other, a program each. Each letter is a block; its key is all letters up to it."""
    numbers: dict[str, int] = {}
    events: list[Access] = []
    for at_s, letters in enumerate(chains):
        keys = [letters[: end + 1] for end in range(len(letters))]
        blocks = array("q", (numbers.setdefault(key, len(numbers)) for key in keys))
        call = PlayedCall(at_s, "", 0, blocks, len(blocks), len(blocks) * BLOCK_TOKENS, at_s, at_s, at_s)
        events += (Access(at_s, kind, 0, call) for kind in (Kind.ARRIVE, Kind.BEGIN, Kind.END))
    return events


def fewest_misses(chains: list[str], capacity: int) -> int:
    """By trial of every set of blocks that could be kept after each call."""
    costs: dict[frozenset[str], int] = {frozenset(): 0}
    for letters in chains:
        keys = [letters[: end + 1] for end in range(len(letters))]
        after: dict[frozenset[str], int] = {}
        for kept, cost in costs.items():
            misses = sum(key not in kept for key in keys)
            others = sorted(kept.difference(keys))
            room = max(0, capacity - len(keys))
            for subset in chain.from_iterable(combinations(others, count) for count in range(room + 1)):
                state = frozenset(subset) | frozenset(keys)
                after[state] = min(after.get(state, cost + misses), cost + misses)
        costs = after
    return min(costs.values())


@settings(max_examples=60)
@given(st.lists(st.text("abc", min_size=1, max_size=3), min_size=1, max_size=7), st.integers(3, 6))
def test_belady_is_the_best_of_all_choices(chains: list[str], capacity: int) -> None:
    """As good as the best choice that trial of everything finds."""
    best = replay_belady(sequence(chains), of_blocks(capacity))
    assert best.computed_tokens == fewest_misses(chains, capacity) * BLOCK_TOKENS


@settings(max_examples=150)
@given(st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=25), st.integers(2, 12))
def test_no_policy_beats_belady(chains: list[str], capacity: int) -> None:
    """On any sequence, with any size of the cache."""
    events = sequence(chains)
    best = replay_belady(events, of_blocks(capacity))
    for name in KV_POLICIES:
        assert replay(events, of_blocks(capacity), KvPolicyConfig(name)).computed_tokens >= best.computed_tokens


@pytest.mark.parametrize("workload", ["tools", "chat", "mixed"])
def test_a_workload_keeps_the_order_of_the_rules(workload: str) -> None:
    """Knowing each context's next use comes within 2 % of Bélády's rule, and expecting it beats LRU under pressure.
    Nothing is counted twice, nothing is left in the cache of the open programs."""
    rng = random.Random(4)
    programs = generate(workload, 12, poisson(rng, 1.0), rng)
    results = {each.rule: each for each in replay_all(programs, SimSettings(PolicyConfig("fcfs"), kv_tokens=32_768))}
    best = results["belady (oracle)"]
    assert all(each.ratio(best) >= 1.0 for each in results.values())
    assert results["next-use (oracle)"].ratio(best) <= 1.02
    assert results["next-use"].computed_tokens <= results["lru"].computed_tokens
    assert len({each.prompt_tokens for each in results.values()}) == 1


def test_a_large_cache_recomputes_nothing() -> None:
    """Every rule finds all that came before; what is computed is computed once."""
    rng = random.Random(5)
    programs = generate("tools", 6, poisson(rng, 1.0), rng)
    for each in replay_all(programs, SimSettings(kv_tokens=10**7)):
        assert (each.recomputed_tokens, each.ratio(each)) == (0, 1.0)
        assert each.hit_tokens > 0


def lines_run(work: Callable[[], object]) -> int:
    """The lines of Weft's KV policies and replay that some work runs."""
    count = 0

    def of_line(frame: FrameType, event: str, _: object) -> Any:
        nonlocal count
        count += event == "line"
        return of_line

    def of_call(frame: FrameType, _event: str, _: object) -> Any:
        name = frame.f_globals.get("__name__", "")
        return of_line if name.startswith(("weft.core.kv_cache", "weft.core.sim.kv_cache.kv_replay")) else None

    before = sys.gettrace()
    sys.settrace(of_call)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize("name", ["least-waste", "next-use", "saga", "ttl"])
def test_the_work_of_a_replay_grows_with_the_blocks_that_are_read(name: str) -> None:
    """A cache that is far from full holds more with each program. Each epoch decides on the open contexts again, and
    must not look at all blocks, nor at all leaves, nor walk along a context: with four times the programs, the work for
    each block that is read stays nearly the same. Looking at all blocks makes it 2.4 times as much."""
    per_block = []
    for count in (4, 16):
        rng = random.Random(7)
        programs = generate("mixed", count, poisson(rng, 0.1), rng)
        large = SimSettings(PolicyConfig("fcfs"), kv_tokens=10**7)
        events = accesses(programs, large)
        blocks = sum(len(event.call.chain) for event in events)
        per_block.append(lines_run(partial(replay, events, large, KvPolicyConfig(name))) / blocks)
    assert per_block[1] < 1.4 * per_block[0]


def test_a_replay_says_how_far_it_is() -> None:
    """The share grows to 1 over all rules, and within a rule as well."""
    rng = random.Random(5)
    programs = generate("tools", 40, poisson(rng, 1.0), rng)
    shares: list[float] = []
    replay_all(programs, SimSettings(kv_tokens=10**6), progress=shares.append)
    assert shares == sorted(shares)
    assert shares[-1] == pytest.approx(1.0)
    assert len(shares) > len(KV_POLICIES) + 2


def test_integrity_holds_after_each_event() -> None:
    """The counts of the order and of its tree agree all along, under every policy, on two replicas."""
    rng = random.Random(6)
    programs = generate("mixed", 4, poisson(rng, 1.0), rng)
    two = SimSettings(PolicyConfig("fcfs"), replicas=2, kv_tokens=16_384)
    events = accesses(programs, two)[:400]
    for name in KV_POLICIES:
        checked = [0]

        def check(kept: object, checked: list[int] = checked) -> None:
            checked[0] += 1
            if checked[0] % 20 == 0:
                kept.check_integrity()  # type: ignore[attr-defined]

        replay(events, two, KvPolicyConfig(name), check=check)
        assert checked[0] == len(events)


def test_programs_of_one_name_share_their_first_blocks() -> None:
    """The system prompt is computed once, and a child finds its parent's prompt and output."""
    calls = (
        TraceCall("a", (), output_tokens=16, prompt_tokens=48, shared_prefix_tokens=32),
        TraceCall("b", ("a",), output_tokens=1, prompt_tokens=80, shared_prefix_tokens=64, gap_s=1.0, tool="t"),
    )
    programs = [TraceProgram(each, calls, number * 10.0, "agent") for number, each in enumerate("pq")]
    events = accesses(programs, SimSettings(kv_tokens=4096))
    found = replay(events, SimSettings(kv_tokens=4096), KvPolicyConfig("lru"))
    assert (found.prompt_tokens, found.hit_tokens, found.recomputed_tokens) == (256, 64 + 32 + 64, 0)
    assert [event.call.tool for event in events if event.kind is Kind.END] == ["t", None, "t", None]


def test_a_replay_needs_a_cache_with_prefixes() -> None:
    """Settings without one are refused."""
    program = TraceProgram("p", (TraceCall("a", (), 1),))
    with pytest.raises(SimulationError, match="bounded KV cache"):
        replay_all([program], SimSettings(unit_steps=True))
    with pytest.raises(SimulationError, match="keeps prefixes"):
        accesses([program], SimSettings(prefix_cache=False))
