"""KV policies on vLLM's real scheduler and KV cache manager, without a model."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from host_programs import end, happened, prompt_of, start_tool

from weft.core.errors import KvPolicyError
from weft.core.kv_cache.policies import KV_POLICIES
from weft.core.kv_cache.stats import KvStats
from weft.engine.wire.reports import read_answer

pytestmark = pytest.mark.engine

Make = Callable[..., Any]
ORDERING = [name for name in KV_POLICIES if name not in ("lru", "ended-first")]


@pytest.fixture(params=[0.0, 1e6], ids=["clock at 0", "clock at 1e6"])
def make(tmp_path: Path, request: pytest.FixtureRequest) -> Make:
    """Makes a harness with prefix caching, whose clock starts at 0 or shows that the machine has run for days; vLLM is
    imported only here."""
    from scheduler_harness import SchedulerHarness

    def made(kv_policy: object, *, weft_policy: str = "fcfs", gate: bool = False, **options: Any) -> SchedulerHarness:
        weft: dict[str, Any] = {"name": weft_policy, "gate": True} if gate else {"name": weft_policy}
        weft |= {} if kv_policy is None else {"kv_policy": kv_policy}
        chosen = {"prefix_caching": True, "batched_tokens": 512, "start_s": request.param, **options}
        return SchedulerHarness(tmp_path, weft, **chosen)

    return made


def call(h: Any, name: str, prompt: list[int], program: str, *, program_name: str = "") -> int:
    """Run a call alone. Returns the tokens that it found in the cache."""
    h.add(name, prompt=prompt, max_tokens=1, program_id=program, program_name=program_name or program)
    entry = h.scheduler._entries[name].call
    h.run()
    return int(entry.cached_tokens)


def check_free_list(h: Any) -> None:
    """vLLM's free list has every block that is not in use, once."""
    pool = h.scheduler.kv_cache_manager.block_pool
    free = [block.block_id for block in pool.free_block_queue.get_all_free_blocks()]
    assert len(free) == pool.get_num_free_blocks()
    assert sorted(free) == [block.block_id for block in pool.blocks if not block.ref_cnt and not block.is_null]


def test_the_soft_hold_is_off_unless_a_kv_policy_asks_for_it(make: Make) -> None:
    """`lru` leaves vLLM's order alone, and without a KV policy ended programs go first where the policy says so."""
    from weft.engine.kv_cache.order import EndedFirstOrder, KvOrder
    from weft.engine.kv_cache.soft_hold import SoftHold

    kinds = {each: type(make(each).scheduler._kv_order) for each in (None, *KV_POLICIES)}
    assert kinds.pop(None) is kinds.pop("lru") is KvOrder
    assert kinds.pop("ended-first") is EndedFirstOrder
    assert set(kinds.values()) == {SoftHold}
    assert type(make("next-use", prefix_caching=False).scheduler._kv_order) is KvOrder


@pytest.mark.parametrize(("policy", "found"), [("lru", 0), ("ended-first", 64), *((each, 64) for each in ORDERING)])
def test_blocks_of_an_ended_program_are_evicted_first(make: Make, policy: str, found: int) -> None:
    """The open program was used longest ago, and stock vLLM evicts it. With a KV policy the ended one's blocks go."""
    h = make(policy, slots=3, blocks=12)
    call(h, "open1", prompt_of(1, 64), "open")
    call(h, "ended1", prompt_of(2, 80), "ended")
    end(h, "ended")
    call(h, "other1", prompt_of(3, 104), "other")
    assert call(h, "open2", [*prompt_of(1, 64), 7, 8, 9], "open") == found


@pytest.mark.parametrize(("policy", "found"), [("lru", 0), ("wa-lru", 64), ("next-use", 64)])
def test_a_context_that_is_expected_back_outlives_a_newer_one_that_is_not(make: Make, policy: str, found: int) -> None:
    """Agents come back, and one-shot programs never did. The agent's context is older, so stock vLLM evicts it."""
    h = make(policy, slots=3, blocks=14)
    agent: list[int] = prompt_of(1, 64)
    for number in range(8):
        call(h, f"once{number}", prompt_of(20 + number, 48), f"once{number}", program_name="once")
        end(h, f"once{number}")
        for turn in range(3):
            h.clock.advance(10.0)
            call(
                h,
                f"agent{number}-{turn}",
                [*prompt_of(40 + number, 16 * (turn + 1))],
                f"a{number}",
                program_name="agent",
            )
        end(h, f"a{number}")
    call(h, "agent1", agent, "agent", program_name="agent")
    call(h, "agent2", [*agent, 5], "agent", program_name="agent")
    call(h, "last", prompt_of(3, 80), "last", program_name="once")
    h.clock.advance(100.0)  # both have been idle for about as long, so the chance decides
    call(h, "other", prompt_of(4, 140), "other", program_name="once")
    assert call(h, "agent3", [*agent, 5, 6], "agent", program_name="agent") == found


@pytest.mark.parametrize("policy", ["wa-lru", "saga"])
def test_the_agent_that_was_used_this_instant_is_last_in_the_order(make: Make, policy: str) -> None:
    """Ten agents with contexts of one size were used a minute apart. Each was ranked when its call ended, and the live
    order is that of their last uses, at whatever time the clock began (SAGA, eqs. 1-5)."""
    h = make(policy, slots=3, blocks=60)
    for number in range(10):
        call(h, f"call{number}", prompt_of(number, 64), f"p{number}", program_name="agent")
        h.clock.advance(60.0)
    h.clock.advance(400.0)  # no hold lasts as long
    call(h, "now", [*prompt_of(0, 64), 5], "p0", program_name="agent")
    retention = h.scheduler._kv_order.retention
    retention.epoch(retention.memory._replace(used_share=0.95), h.clock())
    keys = retention.order.next_blocks(100, h.clock())
    order = dict.fromkeys(retention.tree.get(key).program.program_id for key in keys)
    assert list(order) == [f"p{number}" for number in (*range(1, 10), 0)]


@pytest.mark.parametrize(("policy", "found"), [("lru", 0), ("ttl", 64)])
def test_a_context_is_held_for_as_long_as_its_tool_takes(make: Make, policy: str, found: int) -> None:
    """The slow tool's context is older, and stock vLLM evicts it. The fast tool's time is over, so its context goes."""
    h = make(policy, slots=3, blocks=40)
    for number in range(25):
        for tool, pause_s in (("slow", 100.0), ("fast", 1.0)):
            program = f"{tool}{number}"
            call(h, f"{program}-1", prompt_of(10, 32), program)
            start_tool(h, program, tool)
            h.clock.advance(pause_s)
            call(h, f"{program}-2", [*prompt_of(10, 32), 7], program)
            end(h, program)
    h = _fill(h)
    call(h, "slow1", prompt_of(1, 64), "slow")
    start_tool(h, "slow", "slow")
    call(h, "fast1", prompt_of(2, 240), "fast")
    start_tool(h, "fast", "fast")
    h.clock.advance(20.0)
    call(h, "other1", prompt_of(3, 200), "other")
    call(h, "other2", prompt_of(4, 200), "other")
    assert call(h, "slow2", [*prompt_of(1, 64), 7], "slow") == found


def test_events_between_calls_reach_the_context(make: Make) -> None:
    """A tool begins and returns, and the next call is announced. Strange and unknown ones change nothing."""
    h = make("next-use", blocks=40)
    call(h, "a1", prompt_of(1, 64), "a")
    (context,) = h.scheduler._kv_order.retention.tree.contexts_of(h.scheduler._table.view("a"))
    started_s = h.clock()
    start_tool(h, "a", "search")
    assert (context.tool, context.since_s) == ("search", started_s)
    h.clock.advance(5.0)
    happened(h, "tool_ended", "a", "search", 4.5)
    assert (context.tool, context.since_s) == (None, started_s + 5.0)
    assert list(h.scheduler._kv_order.retention.tool_times.of("search")._latest) == [4.5]
    happened(h, "prefetch", "a")
    assert context.soon_s == started_s + 5.0
    for kind, program in (("prefetch", "unknown"), ("tool_ended", "a"), ("nonsense", "a")):
        happened(h, kind, program)


def test_a_request_says_the_same_for_its_program(make: Make) -> None:
    """A client of a server names the tool that it has run and the one that it runs next, or announces its next call."""
    h = make("next-use", blocks=40)
    h.add("a1", prompt=prompt_of(1, 64), max_tokens=1, program_id="a", tool_started="search", prefetch=1)
    h.run()
    retention = h.scheduler._kv_order.retention
    (context,) = retention.tree.contexts_of(h.scheduler._table.view("a"))
    assert (context.tool, context.soon_s) == ("search", context.used_s)
    h.clock.advance(5.0)
    call_again = [*prompt_of(1, 64), 7]
    h.add("a2", prompt=call_again, max_tokens=1, program_id="a")
    h.run()
    h.clock.advance(3.0)
    h.add("a3", prompt=[*call_again, 7], max_tokens=1, program_id="a", tool_ended="run")
    h.run()
    assert [round(*retention.tool_times.of(tool)._latest, 1) for tool in ("search", "run")] == [5.0, 3.0]


def stats(h: Any) -> KvStats:
    found = read_answer(KvStats, h.scheduler({"type": "take_kv_stats"}))
    assert found is not None
    return found


@pytest.mark.parametrize("policy", ["lru", "ended-first", "ttl"])
def test_a_call_tells_what_it_found_and_what_it_computes_again(make: Make, policy: str) -> None:
    """What an earlier call of its program had computed, in full blocks, and what is not there any more. What another
    program had computed is no loss of its own, nor is the last token, which vLLM computes in any case."""
    h = make(policy, slots=3, blocks=12)
    agent = prompt_of(1, 64)
    call(h, "a1", agent, "a")
    call(h, "a2", [*agent, *range(5, 25)], "a")
    assert h.accounts["a2"]["recomputed_tokens"] == 0
    call(h, "b1", prompt_of(2, 170), "b")
    call(h, "a3", [*agent, *range(5, 30)], "a")
    found = h.scheduler._entries  # no call is left
    assert not found
    kept = stats(h)
    assert kept.policy == policy
    assert h.accounts["a3"]["recomputed_tokens"] == kept.recomputed_tokens > 0
    assert kept.found_tokens == 64 + 80 - kept.recomputed_tokens
    call(h, "c1", prompt_of(2, 64), "c")
    assert h.accounts["c1"]["recomputed_tokens"] == 0
    assert (kept.fetched_tokens, kept.spilled_tokens, kept.host_capacity_bytes) == (0, 0, 0)
    end(h, "a", "b", "c")
    assert not h.scheduler._kv_accounts._before._chains


def test_the_figures_tell_what_is_held_and_how_long_tools_take(make: Make) -> None:
    """A policy that holds contexts says so, and what it has learned of each tool."""
    h = make("ttl", blocks=40)
    for number in range(3):
        call(h, f"a{number}", prompt_of(number, 64), f"p{number}")
    start_tool(h, "p0", "search")
    happened(h, "tool_ended", "p0", "search", 2.0)
    found = stats(h)
    assert (found.held_blocks, found.programs_held) == (3 * 4, 3)
    (search,) = (tool for tool in found.tools if tool.name == "search")
    assert search.samples == 1
    assert 0 < search.mean_s < search.q95_s


def _fill(h: Any) -> Any:
    """Fill the cache with the context of a program that has ended."""
    call(h, "fill", prompt_of(9, 500), "fill")
    end(h, "fill")
    return h


def test_the_context_of_a_call_that_waits_is_evicted_last(make: Make) -> None:
    """A call that has arrived needs its context soon, while another call fills the cache before it."""
    found = {}
    for policy in ("lru", "next-use"):
        h = make(policy, slots=1, blocks=15)
        call(h, "a1", prompt_of(1, 64), "a")
        call(h, "b1", prompt_of(2, 64), "b")
        h.add("c1", prompt=prompt_of(3, 150), max_tokens=2, program_id="c")
        h.add("a2", prompt=[*prompt_of(1, 64), 7], max_tokens=1, program_id="a")
        waiting = h.scheduler._entries["a2"].call
        h.run()
        found[policy] = waiting.cached_tokens
    assert found == {"lru": 0, "next-use": 64}


def test_the_next_use_of_a_waiting_calls_context_is_its_turn(make: Make) -> None:
    """The program that has had less service starts first, though its call came last."""
    h = make("next-use", slots=1, blocks=40, weft_policy="atlas")
    call(h, "a1", prompt_of(1, 64), "a")
    call(h, "b1", prompt_of(2, 64), "b")
    for name in "vwxyz":  # so that calls are seen to wait in both queues
        h.add(name, prompt=[7, 8, 9], max_tokens=5, program_id=name, service_s=1000.0 if name in "yz" else 0.0)
    h.run()
    h.add("c1", prompt=prompt_of(3, 64), max_tokens=9, program_id="c")
    h.step()
    h.add("a2", prompt=[*prompt_of(1, 64), 7], max_tokens=1, program_id="a", service_s=1000.0)
    h.add("b2", prompt=[*prompt_of(2, 64), 7], max_tokens=1, program_id="b")
    views = {name: h.scheduler._entries[f"{name}2"].call.program for name in "ab"}
    h.step()
    tree = h.scheduler._kv_order.retention.tree
    turns = {name: context.turn_s for name, view in views.items() for context in tree.contexts_of(view)}
    assert turns["b"] < turns["a"]


def test_each_queue_of_the_scheduling_policy_has_its_own_waits(make: Make) -> None:
    """Calls of the first queue start at once, and those of the last one wait. The next call of a program is expected to
    wait as its queue does."""
    h = make("next-use", slots=1, blocks=40, weft_policy="atlas")
    h.add("short1", prompt=prompt_of(1, 64), max_tokens=1, program_id="short")
    h.add("long1", prompt=prompt_of(2, 64), max_tokens=1, program_id="long", service_s=1000.0)
    views = {name: h.scheduler._entries[f"{name}1"].call.program for name in ("short", "long")}
    last = h.scheduler._entries["long1"].call.rank.level
    h.run()
    tree = h.scheduler._kv_order.retention.tree
    levels = {name: context.level for name, view in views.items() for context in tree.contexts_of(view)}
    assert levels == {"short": 0, "long": last}
    h.add("other", prompt=prompt_of(3, 64), max_tokens=9, program_id="other")
    h.step()
    h.add("short2", prompt=[*prompt_of(1, 64), 7], max_tokens=1, program_id="short", service_s=1000.0)
    h.step()
    assert tree.contexts_of(views["short"])[0].level == last


def test_a_call_that_the_gate_holds_back_comes_after_those_that_wait(make: Make) -> None:
    """Its program is shut out until there is room. So its context is needed after theirs, whenever it arrived."""
    h = make("next-use", gate=True, slots=1, blocks=24)
    call(h, "a1", prompt_of(1, 64), "a")
    h.add("b1", prompt=prompt_of(2, 300), max_tokens=9, program_id="b")
    h.step()
    h.add("a2", prompt=[*prompt_of(1, 64), *range(300, 340)], max_tokens=1, program_id="a")
    view = h.scheduler._entries["a2"].call.program
    h.step()
    assert [each.key for each in h.scheduler.weft_policy.held] == ["a2"]
    (context,) = h.scheduler._kv_order.retention.tree.contexts_of(view)
    assert context.turn_s is not None


@pytest.mark.parametrize("policy", ORDERING)
def test_a_reset_of_the_prefix_cache_forgets_everything(make: Make, policy: str) -> None:
    """After a reset no context is found, none is known, and programs go on."""
    h = make(policy, blocks=40)
    call(h, "a1", prompt_of(1, 64), "a")
    assert h.scheduler.reset_prefix_cache()
    assert len(h.scheduler._kv_order.retention.tree) == 0
    assert call(h, "a2", [*prompt_of(1, 64), 7], "a") == 0
    assert call(h, "a3", [*prompt_of(1, 64), 7, 8], "a") == 64
    check_free_list(h)


@pytest.mark.parametrize(("swap_blocks", "in_flight"), [(0, 1), (0, 2), (100, 2)])  # tests/fuzz plays host memory
@pytest.mark.parametrize("policy", ORDERING)
def test_random_programs_in_a_tiny_cache_lose_and_change_nothing(
    make: Make, policy: str, swap_blocks: int, in_flight: int
) -> None:
    """Programs arrive, go on, branch, end, are aborted and preempted in any order, and the cache is reset. Every call
    ends with its undisturbed tokens, the free list stays a permutation, and nothing is kept of programs that ended."""
    from scheduler_harness import expected_output

    h = make(policy, slots=4, blocks=40, in_flight=in_flight, swap_blocks=swap_blocks, batched_tokens=64)
    rng = random.Random(int(h.clock() > 0))  # other programs at each start of the clock
    contexts: dict[str, list[int]] = {}
    prompts: dict[str, list[int]] = {}
    counts: dict[str, int] = {}
    for number in range(90):
        program, name = f"p{rng.randrange(10)}", f"call-{number}"
        start = contexts.get(program) or list(range(60, 60 + 16 * rng.randrange(3)))
        new = [rng.randrange(50, 900) for _ in range(rng.randrange(1, 90))]
        prompts[name] = (start[: rng.choice((40, 400))] + new)[:400]
        counts[name] = rng.randrange(1, 30)
        contexts[program] = prompts[name] + expected_output(prompts[name], counts[name])
        h.add(name, prompt=prompts[name], max_tokens=counts[name], program_id=program, program_name=program[:2])
        for _ in range(rng.randrange(6)):
            h.step()  # checks integrity
            check_free_list(h)
        if rng.random() < 0.2:
            h.abort(f"call-{rng.randrange(number + 1)}")
            h.scheduler.check_integrity()
        if rng.random() < 0.2 and h.scheduler.running:
            h.scheduler.force_out(rng.choice(h.scheduler.running))
        if rng.random() < 0.3:
            start_tool(h, program, rng.choice(("search", "run")))
        if rng.random() < 0.1:
            h.scheduler.reset_prefix_cache(reset_running_requests=swap_blocks == 0 and rng.random() < 0.3)
            h.scheduler.check_integrity()
        if rng.random() < 0.2:
            end(h, program)
            contexts.pop(program)
    h.run()
    for name in h.finished:
        assert h.tokens[name] == expected_output(prompts[name], counts[name]), name
    check_free_list(h)
    order = h.scheduler._kv_order
    end(h, *(f"p{number}" for number in range(10)))
    h.scheduler.check_integrity()
    assert not order._running
    assert not order._waiting_since_s
    assert not order.retention.tree.programs
    assert len(order._cached) + len(order._spare) <= 2 * 39


def test_a_step_moves_no_more_blocks_than_it_can_take(make: Make) -> None:
    """With hundreds of cached blocks a step of 64 tokens moves a few, and a step that takes none moves none."""
    h = make("next-use", slots=4, blocks=1000, batched_tokens=64)
    for number in range(30):
        call(h, f"c{number}", prompt_of(number, 480), f"p{number}")
    order = h.scheduler._kv_order
    assert len(order._cached) > 750
    h.add("one", prompt=prompt_of(70, 480), max_tokens=200, program_id="one")
    moves = [order.moves]
    while h.scheduler.has_unfinished_requests():
        h.step()
        moves.append(order.moves)
    per_step = [after - before for before, after in itertools.pairwise(moves)]
    assert max(per_step) <= 32
    assert sum(count > 0 for count in per_step) < len(per_step) / 4


def test_a_program_that_ends_moves_nothing_if_the_front_is_of_use_to_nobody(make: Make) -> None:
    """The next blocks to go belong to nobody already, so more of that kind make no better order."""
    h = make("next-use", blocks=200)
    for number in range(31):
        call(h, f"call{number}", prompt_of(number, 96), f"p{number}")
    end(h, *(f"p{number}" for number in range(20)))
    call(h, "next", prompt_of(40, 20), "next")
    order = h.scheduler._kv_order
    before = order.moves
    end(h, "p20")
    h.add("last", prompt=prompt_of(41, 20), max_tokens=1, program_id="last")
    h.step()
    assert order.moves == before > 0


def moves_in_steps(h: Any, steps: int) -> tuple[int, int]:
    """The blocks that `schedule()` moves in so many steps, and those that are moved while the steps run."""
    order, schedule, waited = h.scheduler._kv_order, h.scheduler.schedule, [0]

    def counted(*arguments: Any) -> Any:
        before = order.moves
        output = schedule(*arguments)
        waited[0] += order.moves - before
        return output

    before, h.scheduler.schedule = order.moves, counted
    for _ in range(steps):
        h.step()
    h.scheduler.schedule = schedule
    return waited[0], order.moves - before - waited[0]


@pytest.mark.parametrize("swap_blocks", [0, 200])
def test_the_order_is_made_while_steps_run(make: Make, swap_blocks: int) -> None:
    """No step waits for it: `schedule()` moves nothing. Where vLLM does not say that a step runs, it has to."""
    h = make("next-use", slots=4, blocks=100, swap_blocks=swap_blocks)
    for number in range(20):
        call(h, f"c{number}", prompt_of(number, 160), f"p{number}")
    for number in range(4):
        h.add(f"d{number}", prompt=prompt_of(30 + number, 16), max_tokens=400, program_id=f"d{number}")
    h.step_s = 0.02
    h.step()
    assert (counts := moves_in_steps(h, 100))[0] == 0 < counts[1]
    h.asks_meanwhile = False
    assert (counts := moves_in_steps(h, 100))[1] == 0 < counts[0]
    check_free_list(h)


def test_nothing_is_moved_while_unused_blocks_come_first(make: Make) -> None:
    """An engine whose KV cache was never full has nothing to put in order."""
    h = make("next-use", slots=4, blocks=400)
    for number in range(5):
        call(h, f"c{number}", prompt_of(number, 160), f"p{number}")
    h.add("one", prompt=prompt_of(70, 160), max_tokens=200, program_id="one")
    h.run()
    assert h.scheduler._kv_order.moves == 0


@pytest.mark.parametrize("kv_policy", ["next_use", 7, {"quantile": 0.9}, {"name": "ttl", "quantile": 2}, ["ttl"]])
def test_a_bad_kv_policy_is_refused_at_the_start(make: Make, kv_policy: object) -> None:
    """A scheduler of its own reads it from `additional_config`, and an engine refuses it before it starts anything."""
    import weft

    with pytest.raises(KvPolicyError):
        make(kv_policy)
    with pytest.raises(KvPolicyError):
        weft.Engine(kv_policy=kv_policy)  # type: ignore[arg-type]
    with pytest.raises(KvPolicyError):
        weft.AsyncMultiLLMEngine(kv_policy=kv_policy)  # type: ignore[arg-type]


def test_a_kv_policy_may_have_parameters(make: Make) -> None:
    """As JSON, as an engine's configuration carries it."""
    h = make({"name": "ttl", "quantile": 0.5})
    assert h.scheduler._kv_order.retention.policy.quantile == 0.5


def test_blocks_that_another_policys_programs_left_are_evicted_first(make: Make) -> None:
    """A new scheduling policy forgets all programs, so nobody asks for what they have cached."""
    h = make("next-use", blocks=12)
    call(h, "a1", prompt_of(1, 64), "a")
    h.scheduler.use_policy(h.scheduler._policy.make())
    call(h, "b1", prompt_of(2, 64), "b")
    call(h, "c1", prompt_of(3, 80), "c")
    assert call(h, "b2", [*prompt_of(2, 64), 7], "b") == 64
