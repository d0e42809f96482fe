"""Contexts that the device has lost, as long as host memory has them."""

from __future__ import annotations

from weft.core.kv_cache.host_tier import HostTier
from weft.core.kv_cache.policies import Context, KvPolicyConfig, Memory
from weft.core.kv_cache.retention import ProgramGone, TieredRetention, ToolStarted

MEMORY = Memory(0.0, 0, 1e-3, copy_token_s=1e-5)
CHAIN = ["a0", "a1", "a2"]


def tiered() -> TieredRetention:
    policy = KvPolicyConfig("next-use").make()
    return TieredRetention(policy, 16, MEMORY, HostTier(policy, 16, MEMORY, lambda slot: None))


def lose(retention: TieredRetention, program: str, chain: list[str], at_s: float) -> Context:
    """A call that took a second leaves a context of three blocks, which only host memory has."""
    context = retention.call_ended(retention.call_began(program, "agent", chain, at_s - 1.0), at_s)
    assert context is not None
    end = retention.host.put(context, chain, at_s)
    first = len(retention.host.slots)
    retention.host.slots.update({key: first + number for number, key in enumerate(chain)})
    retention.host.unpin(end)
    retention.block_evicted(chain[0])
    assert (context.tokens, context.host_tokens) == (0, 48)
    retention.check_integrity()
    return context


def lost_context() -> TieredRetention:
    """Program "p" has lost the context of its call on the device."""
    retention = tiered()
    lose(retention, "p", CHAIN, 1.0)
    return retention


def test_a_call_that_continues_a_lost_context_needs_it() -> None:
    """It is found by its beginning in host memory."""
    retention = lost_context()
    retention.call_arrived("p", [*CHAIN, "a3"], 3.0)
    assert [context.called_s for context in retention.contexts_of("p")] == [3.0]


def test_what_an_ended_program_has_left_goes_before_what_is_needed() -> None:
    """Another program may repeat it, so it stays in host memory as long as nobody needs the room."""
    retention = lost_context()
    needed = retention.call_ended(retention.call_began("q", "agent", ["b0"], 2.0), 2.5)
    assert needed is not None
    end = retention.host.put(needed, ["b0"], 2.5)
    retention.host.slots["b0"] = 3
    retention.host.unpin(end)
    retention.keeps_ended = True
    retention.happened("p", ProgramGone(), 3.0)
    assert retention.host.held(CHAIN) == len(CHAIN)
    assert retention.contexts_anywhere() == [needed]
    assert retention.host.evict(1, retention.host.rank_of(needed, 4.0), 4.0) == 1
    assert (retention.host.held(CHAIN), retention.host.held(["b0"])) == (2, 1)
    retention.check_integrity()


def test_a_copy_back_may_end_after_its_program() -> None:
    """Its blocks are found, and are in no context of an open program."""
    retention = lost_context()
    (context,) = retention.contexts_of("p")
    retention.keeps_ended = True
    retention.happened("p", ProgramGone(), 2.0)
    retention.fetched(context, CHAIN, 3.0)
    assert retention.order.next_blocks(3, 4.0) == CHAIN[::-1]
    retention.check_integrity()


def test_what_ended_programs_have_left_is_copied_only_where_copies_delay_nobody() -> None:
    """Otherwise steps would wait for what perhaps nobody uses."""
    retention = tiered()
    for keeps_ended, left in ((False, []), (True, [CHAIN])):
        retention.call_ended(retention.call_began("p", "agent", CHAIN, 0.0), 1.0)
        retention.keeps_ended = keeps_ended
        retention.happened("p", ProgramGone(), 2.0)
        assert list(retention.left.values()) == left


def test_a_call_with_another_prompt_does_not_need_a_lost_context() -> None:
    """It begins a branch of its own. To fetch the context for it would be in vain."""
    retention = lost_context()
    retention.call_arrived("p", ["b0", "b1"], 3.0)
    assert [context.called_s for context in retention.contexts_of("p")] == [None]


def test_a_call_that_shares_only_the_beginning_does_not_need_what_was_left_behind() -> None:
    """After a compaction the device may have no more of the old context than the beginning, which both share. The end
    is in host memory yet, and no call comes for it: a context that is called is fetched before all others."""
    retention = lost_context()
    (context,) = retention.contexts_of("p")
    retention.fetched(context, CHAIN[:1], 2.0)
    assert (context.tokens, context.host_tokens) == (16, 48)
    retention.call_arrived("p", [CHAIN[0], "b1", "b2"], 3.0)
    assert context.called_s is None
    retention.call_arrived("p", [*CHAIN, "a3"], 4.0)
    assert context.called_s == 4.0


def test_time_changes_what_host_memory_gives_up_next() -> None:
    """A slow tool is about to return. One that mostly took two seconds has run for 90, so nobody knows when it will."""
    retention = tiered()
    for tool, took_s in (("slow", 100.0), ("quick", 2.0)):
        for _ in range(20):
            retention.tool_times.observe(tool, took_s)
    for program, tool in (("p", "slow"), ("q", "quick")):
        lose(retention, program, [f"{program}{number}" for number in range(3)], 1.0)
        retention.happened(program, ToolStarted(tool, 1), 1.0)
    next_ones = []
    for now_s in (2.0, 90.0):
        for each in retention.to_revisit():
            retention.revisit(each, now_s)
        _, block = retention.host.order.peek(now_s) or (None, None)
        next_ones.append(block and block.key)
    assert next_ones == ["p2", "q2"]
