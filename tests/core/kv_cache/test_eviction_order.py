"""The order of eviction: what goes first, and a machine that compares it with a reference of plain lists."""

from __future__ import annotations

import math
import random
from collections.abc import Hashable
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from weft.core.kv_cache.policies import (
    KV_POLICIES,
    MOST_HOLD_S,
    MOST_SOON_S,
    Action,
    Context,
    Decision,
    KvPolicy,
    KvPolicyConfig,
    Memory,
)
from weft.core.kv_cache.retention import CallAnnounced, ProgramGone, Retention, RunningCall, ToolEnded, ToolStarted

MEMORY = Memory(0.5, 100, 1e-3)


def retention(policy: str | KvPolicy = "ended-first") -> Retention:
    return Retention(KvPolicyConfig(policy).make() if isinstance(policy, str) else policy, 16, MEMORY)


def play(kept: Retention, program: str, chain: str, at_s: float) -> None:
    """A call that takes no time. Each letter of the chain is a block; its key is all letters up to it."""
    keys = prefixes(chain)
    kept.call_arrived(program, keys, at_s)
    kept.call_ended(kept.call_began(program, program, keys, at_s), at_s)


def prefixes(chain: str) -> list[str]:
    return [chain[: number + 1] for number in range(len(chain))]


class Counting(KvPolicy):
    """Counts how often it is asked."""

    def __init__(self) -> None:
        self.asked = 0

    def worth(self, context: Context, memory: Memory, now_s: float) -> float:
        self.asked += 1
        return context.used_s


def test_nothing_is_ranked_before_somebody_asks() -> None:
    """Where nothing has to be evicted, events cost no ranking, and what is kept of them does not grow."""
    policy = Counting()
    kept = retention(policy)
    for turn in range(1000):
        play(kept, "p", "abc", float(turn))
        kept.epoch(MEMORY, float(turn))
    assert (policy.asked, len(kept.order._unranked)) == (0, 1)
    assert kept.order.next_blocks(1, 1000.0) == ["abc"]
    assert policy.asked > 0


def evicted(kept: Retention, now_s: float) -> list[Hashable]:
    """Everything, in the order in which it is evicted."""
    expected = kept.order.next_blocks(10**6, now_s)
    keys = []
    while (block := kept.order.evict(now_s)) is not None:
        keys.append(block.key)
    if kept.policy.name in ("lru", "ended-first"):
        assert keys == expected
    assert not kept.tree.pinned
    assert len(kept.tree) == 0
    return keys


def test_the_longest_unused_context_goes_first_from_its_end() -> None:
    """As stock vLLM does; what two contexts share goes when both are gone."""
    kept = retention("lru")
    play(kept, "p", "abc", 1.0)
    play(kept, "q", "abX", 2.0)
    play(kept, "r", "z", 1.5)
    assert evicted(kept, 3.0) == ["abc", "z", "abX", "ab", "a"]


def test_ended_programs_go_first_but_not_what_open_ones_share() -> None:
    """A block is as good as the best of its owners."""
    kept = retention()
    play(kept, "old", "oo", 1.0)
    play(kept, "p", "sp", 2.0)
    play(kept, "q", "sq", 3.0)
    kept.happened("q", ProgramGone(), 4.0)
    assert evicted(kept, 5.0) == ["sq", "oo", "o", "sp", "s"]


def test_of_waiting_calls_that_of_the_last_turn_loses_its_context_first() -> None:
    """The queue's order says when a call runs, and not the time when it arrived: a policy may have let it fall back."""
    kept = retention("next-use")
    for program, at_s in (("p", 1.0), ("q", 2.0), ("r", 3.0)):
        play(kept, program, program, at_s)
        kept.call_arrived(program, [program], at_s + 1.0)
    running = kept.call_began("s", "s", ["s"], 6.0, waited_s=4.0)
    kept.call_ended(kept.call_began("t", "t", ["t"], 8.0, waited_s=4.0), 8.0)  # a turn takes some time
    kept.observe_queue([(program, 0) for program in "rupqp"], 9.0)
    kept.epoch(MEMORY, 9.0)
    order = [key for key in kept.order.next_blocks(9, 9.0) if key in {"p", "q", "r"}]
    assert order == ["q", "p", "r"]
    kept.call_aborted(running, 9.0)


def test_a_call_that_waits_in_a_later_queue_loses_its_context_to_one_that_will_start_at_once() -> None:
    """Least-served-first lets calls of long programs wait, though they are next in their own queue. A program of the
    first queue whose tool runs needs its context sooner."""
    kept = retention("next-use")
    for second in range(10):  # short programs start at once, a long one after 60 s
        kept.call_ended(kept.call_began(f"s{second}", "agent", [f"s{second}"], second, waited_s=0.0), second)
    kept.call_ended(kept.call_began("long", "agent", ["long"], 10.0, waited_s=60.0, level=3), 10.0)
    kept.call_ended(kept.call_began("short", "agent", ["short"], 10.0, waited_s=0.0), 10.0)
    kept.call_arrived("long", ["long"], 11.0)
    kept.observe_queue([("long", 3)], 11.0)
    kept.epoch(MEMORY, 11.0)
    order = kept.order.next_blocks(20, 11.0)
    assert order.index("long") < order.index("short")


def test_a_turn_is_not_before_that_of_the_calls_ahead() -> None:
    """Each queue has its own pace, but the queue's order holds over all of them."""
    kept = retention("next-use")
    for number, level in enumerate((1, 2)):  # calls of the second queue have waited, those of the third have not yet
        program = f"p{level}"
        waited_s = 50.0 if level == 1 else 0.0
        running = kept.call_began(program, "agent", [program], number, waited_s=waited_s, level=level)
        kept.call_ended(running, number)
        kept.call_arrived(program, [program], 2.0)
    kept.observe_queue([("p1", 1), ("p2", 2)], 3.0)
    kept.epoch(MEMORY, 3.0)
    p1, p2 = (kept.tree.contexts_of(program)[0] for program in ("p1", "p2"))
    assert p1.turn_s == p2.turn_s == 53.0


def test_a_prefix_that_programs_share_outlives_them() -> None:
    """A system prompt is used again by the next program, so it waits for its turn when no open program has it."""
    kept = retention()
    play(kept, "p", "sp", 2.0)
    play(kept, "q", "sq", 3.0)
    play(kept, "open", "o", 2.5)
    kept.happened("p", ProgramGone(), 4.0)
    kept.happened("q", ProgramGone(), 4.0)
    assert evicted(kept, 5.0) == ["sp", "sq", "o", "s"]


def test_a_prefix_that_was_used_again_outlives_what_came_behind_it() -> None:
    """The end of an ended program's context goes first, and its beginning when its own last use is the oldest."""
    kept = retention()
    play(kept, "p", "ab", 1.0)
    play(kept, "q", "c", 2.0)
    play(kept, "p", "a", 3.0)
    for program in "pq":
        kept.happened(program, ProgramGone(), 4.0)
    assert kept.order.next_blocks(3, 4.0) == ["ab", "c", "a"]


def test_what_runs_is_not_evicted() -> None:
    """Blocks in use are no victims, with everything before them."""
    kept = retention()
    running = kept.call_began("p", "p", prefixes("abc"), 0.0)
    play(kept, "q", "aq", 1.0)
    assert kept.order.next_blocks(9, 2.0) == ["aq"]
    assert kept.order.evict(2.0) is not None
    assert kept.order.evict(2.0) is None
    assert kept.tree.pinned == 3
    kept.call_grew(running, prefixes("abcd"), 3.0)
    assert kept.tree.pinned == 4
    kept.call_aborted(running, 4.0)
    assert kept.tree.pinned == 0


class _Held(KvPolicy):
    """Holds the context of the program "held" until 10 s, and says that of "spilled" is on the host."""

    name = "held"
    decides = True

    def decide(self, context: Context, memory: Memory, now_s: float) -> Decision:
        context.on_host = context.program == "spilled"
        if context.on_host:
            return Decision(Action.SPILL)
        return Decision(Action.KEEP, 10.0) if context.program == "held" else Decision(Action.LEAVE)


def test_a_hold_is_an_order_and_ends() -> None:
    """What is held goes last, but it goes: nothing can be held up for ever. After its time it is left."""
    for now_s, order in ((9.0, ["s", "l", "h"]), (10.0, ["s", "h", "l"])):
        kept = retention(_Held())
        play(kept, "held", "h", 1.0)
        play(kept, "left", "l", 2.0)
        play(kept, "spilled", "s", 3.0)
        assert kept.held_tokens == 16
        assert evicted(kept, now_s) == order


def test_recency_alone_makes_wa_lru_lru() -> None:
    """Weights 1, 0, 0 give the order of LRU among open programs."""
    orders = []
    for policy in (KvPolicyConfig("wa-lru", recency=1.0, reuse=0.0, size=0.0), KvPolicyConfig("ended-first")):
        kept = retention(policy.make())
        for at_s, chain in enumerate(("abc", "abd", "x", "xyz", "abcc", "q")):
            play(kept, f"p{at_s}", chain, float(at_s))
        orders.append(evicted(kept, 9.0))
    assert orders[0] == orders[1]


@pytest.mark.parametrize("start_s", [0.0, 1e6])
@pytest.mark.parametrize("policy", ["wa-lru", "saga"])
def test_contexts_that_were_ranked_at_different_times_are_compared_at_one(policy: str, start_s: float) -> None:
    """The context of this instant is evicted last, although the others were ranked when the longest idle time was less.
    The clock's start does not matter: an engine's clock counts from the start of the machine."""
    kept = retention(KvPolicyConfig(policy).make())
    kept.observe_memory(Memory(0.95, 100, 1e-3))  # nothing is held
    for number in range(10):
        play(kept, f"p{number}", chr(ord("a") + number), start_s + 60.0 * number)
        kept.order.next_blocks(1, start_s + 60.0 * number)  # ranks the new one
    now_s = start_s + 60.0 * 9 + 1.0
    assert kept.order.next_blocks(10, now_s) == list("abcdefghij")


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("policy", KV_POLICIES)
def test_the_start_of_the_clock_does_not_change_what_is_evicted(policy: str, seed: int) -> None:
    """The same calls, tools and ends have the same victims on a clock that starts at 0 and on one that is at 1e6 s."""
    assert victims_of(policy, seed, 0.0) == victims_of(policy, seed, 1e6)


def victims_of(policy: str, seed: int, start_s: float) -> list[list[Hashable]]:
    """What is evicted while programs come and go, on a clock that starts at this time."""
    kept, rng, now_s, found = retention(policy), random.Random(seed), start_s, []
    for _ in range(300):
        now_s += rng.choice((0.25, 1.0, 8.0, 64.0))  # exact in binary at both starts
        program = rng.choice("pqrstuvw")
        what = rng.random()
        if what < 0.6:
            play(kept, program, rng.choice("xyz") + program + "abcd"[: rng.randrange(5)], now_s)
        elif what < 0.7:
            kept.happened(program, ToolStarted(rng.choice(("slow", "quick")), 1), now_s)
        elif what < 0.8:
            kept.happened(program, ToolEnded(1), now_s)
        elif what < 0.85:
            kept.happened(program, ProgramGone(), now_s)
        elif what < 0.9:
            kept.epoch(Memory(rng.choice((0.5, 0.8, 0.95)), 100, 1e-3), now_s)
        else:
            announced = kept.order.next_blocks(3, now_s)
            first = kept.order.evict(now_s)
            assert announced[:1] == ([first.key] if first is not None else [])
            found.append(announced)
        kept.check_integrity()
    return found


def test_all_contexts_are_compared_with_what_is_cached_now() -> None:
    """The longest idle time and the largest size are those of the contexts that are there. One that was larger, and has
    gone, does not make the sizes of the others count for less."""
    kept = retention(KvPolicyConfig("wa-lru", recency=0.0, reuse=0.0, size=1.0).make())
    play(kept, "huge", "hugehugehuge", 1.0)
    play(kept, "p", "abc", 2.0)
    play(kept, "q", "x", 3.0)
    ranks = []
    for now_s in (4.0, 5.0):
        kept.order.next_blocks(1, now_s)
        ranks.append(kept.order.peek(now_s))
        kept.happened("huge", ProgramGone(), now_s)
        while (block := kept.order.peek(now_s + 0.5)) is not None and block[1].program == "huge":
            kept.order.evict(now_s + 0.5)
    assert [(rank.worth, block.key) for rank, block in filter(None, ranks)] == [(-1.0, "hugehugehuge"), (-1.0, "abc")]


def test_a_waiting_call_keeps_its_context() -> None:
    """Once the call has arrived its context is used next, whatever the tools do. A cancellation takes that back."""
    kept = retention("next-use")
    play(kept, "p", "aa", 1.0)
    play(kept, "q", "bb", 2.0)
    kept.call_arrived("p", prefixes("aaa"), 3.0)
    kept.epoch(MEMORY, 3.0)
    assert kept.order.next_blocks(2, 3.0) == ["bb", "b"]
    kept.call_cancelled("p", prefixes("aaa"), 3.0)
    kept.epoch(MEMORY, 3.0)
    assert kept.order.next_blocks(2, 3.0) == ["aa", "a"]


def test_a_preempted_call_keeps_what_it_has() -> None:
    """It waits, and its program is open, so its blocks do not go with those of programs that have ended."""
    kept = retention("next-use")
    play(kept, "q", "b", 1.0)
    running = kept.call_began("p", "p", ["a"], 1.0)
    aborted = kept.call_began("r", "r", ["c"], 1.0)
    kept.call_preempted(running, 2.0)
    kept.call_aborted(aborted, 2.0)
    assert kept.order.next_blocks(3, 2.0) == ["c", "b", "a"]


def test_the_tool_decides_once_its_name_is_known() -> None:
    """A context before a slow tool goes before one whose tool is quick, though it was used later."""
    kept = retention("next-use")
    for _ in range(20):
        kept.tool_times.observe("slow", 100.0)
        kept.tool_times.observe("quick", 1.0)
    play(kept, "p", "a", 1.0)
    play(kept, "q", "b", 2.0)
    kept.happened("p", ToolStarted("quick"), 2.0)
    kept.happened("q", ToolStarted("slow"), 2.0)
    assert evicted(kept, 2.0) == ["b", "a"]


def known(kept: Retention, **means_s: float) -> None:
    """Tools whose times are known."""
    for tool, mean_s in means_s.items():
        for _ in range(20):
            kept.tool_times.observe(tool, mean_s)


def test_a_tool_that_has_returned_is_not_waited_for_any_more() -> None:
    """Its context is needed sooner than one whose tool runs. Its time is known, though no call has followed."""
    kept = retention("next-use")
    known(kept, slow=100.0, quick=10.0)
    play(kept, "p", "a", 1.0)
    play(kept, "q", "b", 2.0)
    kept.happened("p", ToolStarted("slow", 1), 2.0)
    kept.happened("q", ToolStarted("quick", 2), 2.0)
    assert kept.order.next_blocks(2, 3.0) == ["a", "b"]
    kept.happened("p", ToolEnded(1, 1.0), 3.0)
    assert kept.order.next_blocks(2, 3.0) == ["b", "a"]
    assert len(kept.tool_times.of("slow")) == 21


def test_a_message_of_a_tool_that_comes_twice_changes_nothing() -> None:
    """Nor does the end of a tool that is not known to run, of a program that is not known, or of none."""
    kept = retention("next-use")
    play(kept, "p", "a", 1.0)
    kept.happened("p", ToolStarted("slow", 1), 2.0)
    kept.happened("p", ToolStarted("slow", 1), 9.0)
    (context,) = kept.tree.contexts_of("p")
    assert (context.tool, context.since_s) == ("slow", 2.0)
    for run in (1, 1, 7):
        kept.happened("p", ToolEnded(run, 8.0), 10.0)
    kept.happened("unknown", ToolEnded(1), 10.0)
    kept.happened("unknown", ToolStarted("slow"), 10.0)
    assert len(kept.tool_times.of("slow")) == 1


def test_of_tools_side_by_side_the_one_that_takes_longest_counts() -> None:
    """The next call needs the results of all."""
    kept = retention("next-use")
    known(kept, slow=100.0, quick=1.0)
    play(kept, "p", "a", 1.0)
    (context,) = kept.tree.contexts_of("p")
    tools = []
    for run, tool in enumerate(("quick", "slow", "quick")):
        kept.happened("p", ToolStarted(tool, run), 2.0)
        tools.append(context.tool)
    for run in (0, 1, 2):
        kept.happened("p", ToolEnded(run), 3.0)
        tools.append(context.tool)
    assert tools == ["quick", "slow", "slow", "slow", "quick", None]


def test_tools_whose_ends_are_lost_are_forgotten() -> None:
    """They are waited for no longer than any tool, and a program has no more than 64 of them."""
    kept = retention("ttl")
    play(kept, "p", "a", 1.0)
    (context,) = kept.tree.contexts_of("p")
    for run in range(1000):
        kept.happened("p", ToolStarted(f"lost {run}", run), 2.0)
    assert len(kept._programs["p"].tools) == 64
    kept.happened("p", ToolStarted("new", "new"), 2.0 + MOST_HOLD_S + 1)
    assert list(kept._programs["p"].tools) == ["new"]
    kept.epoch(kept.memory, 3.0 + 3 * MOST_HOLD_S)
    assert context.decision.action is Action.LEAVE


@pytest.mark.parametrize("policy", ["next-use", "ttl"])
def test_an_announced_call_keeps_its_context_for_a_while(policy: str) -> None:
    """The program says that its call comes soon, although its tool takes long. It is believed for 30 s."""
    kept = retention(policy)
    known(kept, slow=1000.0, quick=10.0)
    play(kept, "p", "a", 1.0)
    play(kept, "q", "b", 2.0)
    kept.observe_memory(Memory(0.85, 100, 1e-3))
    kept.happened("p", ToolStarted("slow" if policy == "next-use" else "quick", 1), 2.0)
    kept.happened("q", ToolStarted("quick", 1), 2.0)
    kept.happened("p", CallAnnounced(), 20.0)
    kept.happened("unknown", CallAnnounced(), 20.0)
    assert kept.order.next_blocks(2, 20.0) == ["b", "a"], "before the next epoch"
    kept.epoch(kept.memory, 21.0)
    assert kept.order.next_blocks(2, 21.0) == ["b", "a"]
    kept.epoch(kept.memory, 20.0 + MOST_SOON_S)
    assert kept.order.next_blocks(2, 20.0 + MOST_SOON_S) == ["a", "b"]


def test_a_call_may_name_the_tool_before_it() -> None:
    """Where nobody tells of tools while they run, their times are learned with the call that follows."""
    kept = retention("next-use")
    play(kept, "p", "a", 1.0)
    kept.call_arrived("p", ["a"], 6.0, tool="search")
    assert len(kept.tool_times.of("search")) == 1


def test_parts_of_an_epoch_are_a_whole_one() -> None:
    """An engine goes through contexts and leaves a few in each step. What has gone meanwhile is left out."""
    whole, parts = retention("ttl"), retention("ttl")
    for kept in (whole, parts):
        known(kept, slow=10.0)
        for number, program in enumerate("pqr"):
            play(kept, program, program.upper(), 1.0 + number)
            kept.happened(program, ToolStarted("slow", 1), 1.0 + number)
    later = Memory(0.8, 100, 1e-3)
    items = parts.to_revisit()
    for kept in (whole, parts):
        kept.happened("q", ProgramGone(), 9.0)
        kept.block_evicted("Q")
    whole.epoch(later, 9.0)
    parts.observe_memory(later)
    for each in items:
        parts.revisit(each, 9.0)
    assert parts.held_tokens == whole.held_tokens > 0
    assert parts.order.next_blocks(9, 9.0) == whole.order.next_blocks(9, 9.0)
    parts.check_integrity()


def test_a_decision_that_changes_in_a_part_of_an_epoch_changes_the_order() -> None:
    """The KV cache was so full that nothing was held. With room, the context whose tool still runs is."""
    kept = retention("ttl")
    known(kept, slow=100.0, quick=1.0)
    kept.observe_memory(Memory(0.95, 100, 1e-3))
    for number, (program, tool) in enumerate((("p", "slow"), ("q", "quick"))):
        play(kept, program, program, 1.0 + number)
        kept.happened(program, ToolStarted(tool, 1), 1.0 + number)
    assert kept.order.next_blocks(2, 3.0) == ["p", "q"]
    kept.observe_memory(Memory(0.1, 100, 1e-3))
    for each in kept.to_revisit():
        kept.revisit(each, 9.0)
    assert kept.order.next_blocks(2, 9.0) == ["q", "p"]


class OrderMachine(RuleBasedStateMachine):
    """Calls begin, grow, end and are preempted, programs end, and blocks are evicted. The reference keeps each context
    as a list of blocks, and looks for the victim among all blocks."""

    kept: Retention
    policy: str

    @initialize(policy=st.sampled_from(["lru", "ended-first"]))
    def make(self, policy: str) -> None:
        self.policy = policy
        self.kept = retention(policy)
        self.now_s = 0.0
        self.cached: dict[str, tuple[float, set[str]]] = {}  # when a block was last used, and the programs that did
        self.contexts: list[tuple[str, str, float]] = []  # program, chain, when its call ended
        self.running: list[tuple[RunningCall, str, str]] = []  # program, chain
        self.open: set[str] = set()

    def use(self, program: str, chain: str) -> None:
        for key in prefixes(chain):
            self.cached.setdefault(key, (self.now_s, set()))[1].add(program)

    def touch(self, chain: str) -> None:
        for key in prefixes(chain):
            self.cached[key] = (self.now_s, self.cached[key][1])

    @rule(program=st.sampled_from("pqrs"), chain=st.text("ab", min_size=1, max_size=5))
    def begin(self, program: str, chain: str) -> None:
        self.now_s += 1
        self.kept.call_arrived(program, prefixes(chain), self.now_s)
        self.running.append((self.kept.call_began(program, program, prefixes(chain), self.now_s), program, chain))
        self.open.add(program)
        self.use(program, chain)
        self.touch(chain)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), more=st.text("ab", max_size=2), leaves_context=st.booleans())
    def end(self, data: Any, more: str, leaves_context: bool) -> None:
        self.now_s += 1
        number = data.draw(st.integers(0, len(self.running) - 1))
        call, program, chain = self.running.pop(number)
        self.kept.call_grew(call, prefixes(chain + more), self.now_s)
        self.use(program, chain + more)
        self.touch(chain + more)
        if not leaves_context:
            self.kept.call_aborted(call, self.now_s)
            return
        self.kept.call_ended(call, self.now_s)
        if program in self.open:
            self.contexts = [
                each
                for each in self.contexts
                if each[0] != program or not (chain + more).startswith(self.left_of(each))
            ]
            self.contexts.append((program, chain + more, self.now_s))

    @rule(program=st.sampled_from("pqrs"))
    def end_program(self, program: str) -> None:
        self.now_s += 1
        self.kept.happened(program, ProgramGone(), self.now_s)
        self.open.discard(program)
        self.contexts = [each for each in self.contexts if each[0] != program]

    def left_of(self, context: tuple[str, str, float]) -> str:
        """What is cached of a context; none of its blocks: nothing, which every chain starts with."""
        return max((key for key in prefixes(context[1]) if key in self.cached), key=len, default="")

    def cut_contexts(self) -> None:
        """What was evicted is no part of a context any more, also if a later call computes it again."""
        self.contexts = [(each[0], left, each[2]) for each in self.contexts if (left := self.left_of(each))]

    def victim(self) -> str | None:
        """The block of the lowest rank, by the definitions: a block is as good as its best owner."""
        found: tuple[tuple[int, float, int], str] | None = None
        for key, (used_s, programs) in self.cached.items():
            behind = [other for other in self.cached if other.startswith(key) and other != key]
            if behind or any(chain.startswith(key) for _, _, chain in self.running):
                continue
            ends = [used for _, chain, used in self.contexts if chain.startswith(key)]
            if ends:
                rank = (2, max(ends), -len(key))
            else:
                rank = (2 if len(programs) > 1 or self.policy == "lru" else 0, used_s, -len(key))
            if found is None or rank < found[0]:
                found = rank, key
        return found[1] if found else None

    @rule(count=st.integers(1, 4))
    def evict(self, count: int) -> None:
        """The reference's victims, one after the other, are those that were announced."""
        announced = self.kept.order.next_blocks(count, self.now_s)
        evicted = []
        for _ in range(count):
            victim = self.victim()
            block = self.kept.order.evict(self.now_s)
            assert (block.key if block else None) == victim
            if victim is not None:
                del self.cached[victim]
                evicted.append(victim)
        assert announced == evicted
        self.cut_contexts()

    @precondition(lambda self: self.cached)
    @rule(data=st.data())
    def lose(self, data: Any) -> None:
        """The engine gives a block away that was not next, and what is behind it is lost."""
        key = data.draw(st.sampled_from(sorted(self.cached)))
        self.kept.block_evicted(key)
        if not any(chain.startswith(key) for _, _, chain in self.running):
            self.cached = {other: what for other, what in self.cached.items() if not other.startswith(key)}
            self.cut_contexts()

    @rule()
    def reset(self) -> None:
        self.kept.reset()
        self.cached = {
            key: what for key, what in self.cached.items() if any(chain.startswith(key) for _, _, chain in self.running)
        }
        self.cut_contexts()

    @invariant()
    def same(self) -> None:
        """The same blocks, and the counts agree."""
        if hasattr(self, "cached"):
            assert len(self.kept.tree) == len(self.cached)
            assert all(key in self.kept.tree for key in self.cached)
            self.kept.tree.check_integrity()
            self.kept.check_integrity()


TestOrderMachine = OrderMachine.TestCase


def test_a_spill_goes_first_once_it_is_copied() -> None:
    """Before a worker has confirmed the copy, evicting would lose the context."""
    kept = retention("least-waste")
    full = Memory(0.95, 10_000, 1e-3, 1e-6)
    kept.observe_memory(full)
    for _ in range(20):
        kept.tool_times.observe("slow", 100.0)
    play(kept, "p", "ab", 1.0)
    play(kept, "q", "c", 0.5)
    kept.happened("p", ToolStarted("slow"), 1.0)
    kept.happened("q", ToolStarted("slow"), 1.0)
    kept.epoch(full, 1.5)
    first, second = kept.contexts_anywhere()
    assert [kept.chain_of(each) for each in (first, second)] == [["a", "ab"], ["c"]]
    assert first.decision.action is second.decision.action is Action.SPILL
    assert kept.order.next_blocks(1, 1.5) == ["c"]
    kept.copied(first)
    assert kept.order.next_blocks(3, 2.0) == ["ab", "a", "c"]
    assert (first.on_host, second.on_host) == (True, False)


@pytest.mark.parametrize("policy", KV_POLICIES)
def test_whatever_is_held_an_allocation_finds_blocks(policy: str) -> None:
    """A hundred programs wait for tools that never return, and hold everything; a hundred more need room. Each block is
    evicted when it is asked for, and nothing is left behind when the programs end."""
    kept = retention(policy)
    for number in range(100):
        play(kept, f"p{number}", f"{chr(200 + number)}abc", 1.0)
        kept.happened(f"p{number}", ToolStarted("never"), 1.0)
    for step in range(20):
        kept.epoch(Memory(0.5 + step / 40, 50, 1e-4, 1e-5), 2.0 + step)
        assert all(kept.order.evict(2.0 + step) for _ in range(20))
        kept.check_integrity()
    assert len(kept.tree) == 0
    for number in range(100):
        kept.happened(f"p{number}", ProgramGone(), 99.0)
    assert kept.held_tokens == 0
    assert kept.order.next_blocks(1, math.inf) == []
