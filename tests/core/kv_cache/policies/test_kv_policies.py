"""The KV policies: their formulas by hand, and the limits of their parameters."""

from __future__ import annotations

import math

import pytest

from weft.core.errors import KvPolicyError
from weft.core.kv_cache.policies import (
    KV_POLICIES,
    LEAVE,
    MOST_HOLD_S,
    Action,
    Context,
    KvPolicyConfig,
    LeastWaste,
    Memory,
    NextUse,
    Saga,
    Ttl,
    WaLru,
)
from weft.core.kv_cache.policies.least_waste import waste
from weft.core.prediction import KnownTime, Samples

MEMORY = Memory(used_share=0.95, running_tokens=1000, prefill_token_s=1e-3, copy_token_s=1e-4)


def context(pause_s: float, tokens: int = 500, used_s: float = 0.0) -> Context:
    return Context("p", "agent", used_s, KnownTime(pause_s), tokens=tokens)


def test_the_family_is_registered() -> None:
    """Users have these names in their configurations, so none of them goes away."""
    assert {"ended-first", "least-waste", "lru", "next-use", "saga", "ttl", "wa-lru"} <= {*KV_POLICIES}
    for name in KV_POLICIES:
        assert KvPolicyConfig(name).make().name == name
    with pytest.raises(KvPolicyError, match=f"choose one of {', '.join(KV_POLICIES)}"):
        KvPolicyConfig("mru")
    with pytest.raises(KvPolicyError, match="has no parameter 'weight'"):
        KvPolicyConfig("ttl", weight=1)


@pytest.mark.parametrize(
    ("pause_s", "memory", "action"),
    [
        (1.4, MEMORY, Action.SPILL),  # keep 700, leave 750, spill 100
        (0.1, MEMORY, Action.KEEP),  # keep 50
        (0.2, MEMORY, Action.KEEP),  # keep 100: a tie goes to keeping
        (0.21, MEMORY, Action.SPILL),
        (1.4, MEMORY._replace(copy_token_s=math.inf), Action.KEEP),
        (1.5, MEMORY._replace(copy_token_s=math.inf), Action.KEEP),  # 750: a tie
        (1.6, MEMORY._replace(copy_token_s=math.inf), Action.LEAVE),
        (99.0, MEMORY._replace(copy_token_s=1e-2), Action.LEAVE),  # a slow copy wastes 10,000
        (0.4, MEMORY._replace(running_tokens=0), Action.SPILL),  # nothing idles during a copy
        (0.0, MEMORY._replace(running_tokens=0), Action.KEEP),
        (0.6, MEMORY._replace(running_tokens=0, copy_token_s=math.inf), Action.LEAVE),  # leave 250: its own tokens
        (99.0, MEMORY._replace(used_share=0.9), Action.KEEP),  # up to the watermark
    ],
)
def test_least_waste_by_hand(pause_s: float, memory: Memory, action: Action) -> None:
    """500 tokens, 1,000 running: equations 5 to 8 of Astraea, worked out by hand."""
    assert LeastWaste().decide(context(pause_s), memory, 0.0).action is action


def test_the_waste_is_in_tokens_times_seconds() -> None:
    """keep = T · C, leave = t_p · C · (B + C), spill = 2 · t_c · C · B."""
    assert waste(context(2.0), MEMORY, 0.0) == pytest.approx((1000.0, 750.0, 100.0))
    assert waste(context(2.0), MEMORY, 1.5) == pytest.approx((250.0, 750.0, 100.0))  # 0.5 s remain


def test_least_waste_holds_until_keeping_has_cost_as_much() -> None:
    """A tool that never returns, and an epoch that never comes, cost twice the best choice at most."""
    decision = LeastWaste().decide(context(0.1), MEMORY, 7.0)
    assert decision == (Action.KEEP, pytest.approx(7.2))  # 100 token seconds, of 500 tokens
    assert LeastWaste(1.0).decide(context(0.1), MEMORY, 7.0).until_s == 7.0 + MOST_HOLD_S


@pytest.mark.parametrize(("used_share", "ttl_s"), [(0.0, 10.0), (0.7, 10.0), (0.8, 7.5), (0.8999, 5.0025)])
def test_the_time_to_live_shrinks_under_pressure(used_share: float, ttl_s: float) -> None:
    """Q at 0.7 of the memory, and half of it just below 0.9 (SAGA, Algorithm 1)."""
    decision = Ttl().decide(context(10.0, used_s=100.0), MEMORY._replace(used_share=used_share), 100.0)
    assert decision == (Action.KEEP, pytest.approx(100.0 + ttl_s))


def test_the_time_to_live_ends() -> None:
    """After its time, and from 0.9 of the memory on, a context is left to the order of use."""
    low = MEMORY._replace(used_share=0.1)
    assert Ttl().decide(context(10.0), low, 10.0).action is Action.LEAVE
    assert Ttl().decide(context(10.0), MEMORY._replace(used_share=0.9), 0.0).action is Action.LEAVE
    assert Ttl().decide(context(1e6), low, 0.0).until_s == MOST_HOLD_S
    waiting = context(10.0)
    waiting.called_s = 5.0
    assert Ttl().decide(waiting, low, 50.0).action is Action.KEEP


def test_saga_holds_as_ttl_and_orders_as_wa_lru() -> None:
    """One policy has both of SAGA's rules, each with the result that it has alone."""
    low, policy = MEMORY._replace(used_share=0.8, copy_token_s=math.inf), Saga()
    held, left = context(10.0), context(1.0, 300, used_s=4.0)
    assert policy.decide(held, low, 5.0) == Ttl().decide(held, low, 5.0)
    assert policy.decide(held, low, 50.0).action is Action.LEAVE
    among = low.among([held, left])
    assert policy.worth(left, among, 8.0) == WaLru().worth(left, among, 8.0)
    assert policy.worth_of_nobody(3.0, among, 8.0) == WaLru().worth_of_nobody(3.0, among, 8.0)


def test_a_longest_time_of_nothing_holds_nothing() -> None:
    """It turns the time to live off. A waiting call's context is left then, too, so that `saga` spills it."""
    low, waiting, announced = MEMORY._replace(used_share=0.1), context(10.0), context(10.0)
    waiting.called_s = announced.soon_s = 1.0
    for each in (context(10.0), waiting, announced):
        assert Ttl(most_s=0.0).decide(each, low, 1.0) == LEAVE
        assert Saga(most_s=0.0).decide(each, low, 1.0).action is Action.SPILL


def test_saga_spills_what_it_does_not_hold() -> None:
    """What it fetches ahead has to come from somewhere: from host memory, if copies are faster than the model."""
    assert Saga().decide(context(10.0), MEMORY, 0.0).action is Action.SPILL  # above 0.9 of the memory
    assert Saga().decide(context(10.0), MEMORY._replace(copy_token_s=1e-2), 0.0).action is Action.LEAVE
    assert Saga().decide(context(10.0), MEMORY._replace(used_share=0.5), 0.0).action is Action.KEEP


@pytest.mark.parametrize("start_s", [0.0, 1e6])
def test_wa_lru_by_hand(start_s: float) -> None:
    """P_evict = 0.3 · 20 / 20 + 0.5 · (1 - 0.5) + 0.2 · 600 / 600 = 0.75 for the first context, and for the second one
    0.3 · 5 / 20 + 0.25 + 0.2 · 300 / 600 = 0.425, whatever the clock shows (SAGA, eqs. 1-5)."""
    first, second = context(1.0, 600, used_s=start_s), context(1.0, 300, used_s=start_s + 15.0)
    first.new_tokens, second.new_tokens = 600, 300
    memory = MEMORY.among([first, second])
    assert (memory.oldest_s, memory.largest_tokens) == (start_s, 600)
    assert WaLru().worth(first, memory, start_s + 20.0) == pytest.approx(-0.75)
    assert WaLru().worth(second, memory, start_s + 20.0) == pytest.approx(-0.425)
    assert WaLru().worth_of_nobody(start_s + 10.0, memory, start_s + 20.0) == pytest.approx(-0.4)


def test_next_use_weighs_time_chance_and_cost() -> None:
    """Half of the time left is worth as much as twice the chance; a copy on the host makes eviction cheap."""
    policy = NextUse()
    near, far, unlikely, copied = context(2.0), context(4.0), context(2.0), context(2.0)
    unlikely.chance, copied.on_host = 0.5, True
    worths = [policy.worth(each, MEMORY, 0.0) for each in (near, far, unlikely, copied)]
    assert worths == pytest.approx([5e-4, 2.5e-4, 2.5e-4, 5e-5])


def test_the_time_to_the_next_use_has_the_wait_in_it() -> None:
    """A call that has arrived waits for the rest of the usual wait; before, all of it comes after the tool."""
    samples = Samples()
    for _ in range(20):
        samples.observe(2.0)
    waiting = Context("p", "agent", 0.0, samples)
    waiting.waits.mean_s = waiting.waits.median_s = 3.0
    assert waiting.expected_s(MEMORY, 0.0) == pytest.approx(5.0)
    waiting.called_s = 2.0
    assert waiting.expected_s(MEMORY, 4.0) == pytest.approx(1.0)
    assert waiting.expected_s(MEMORY, 9.0) == 0.0
    assert NextUse().worth(waiting, MEMORY, 9.0) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("least-waste", {"watermark": 1.5}),
        ("least-waste", {"watermark": "high"}),
        ("ttl", {"quantile": 1.0}),
        ("ttl", {"low": 0.9, "high": 0.7}),
        ("ttl", {"most_s": math.nan}),
        ("wa-lru", {"size": -0.1}),
        ("saga", {"low": 0.95}),
        ("saga", {"reuse": 2.0}),
    ],
)
def test_a_parameter_out_of_range_is_refused(name: str, parameters: dict[str, float]) -> None:
    """Each parameter names its range."""
    with pytest.raises(KvPolicyError):
        KvPolicyConfig(name, **parameters)
