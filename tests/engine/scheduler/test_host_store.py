"""Host memory between the calls of programs, on vLLM's real scheduler and KV cache manager, without a model.

The worker reads the whole context of each token from the KV cache, so a block with wrong content changes the output.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from weft.core.kv_cache.choice import CopySpeed
from weft.core.kv_cache.policies import KV_POLICIES

pytestmark = pytest.mark.engine

Make = Callable[..., Any]
KEEPING = [name for name in KV_POLICIES if name not in ("lru", "ended-first")]
FAST = CopySpeed(0.0, 1e12, 1e12)


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Makes a harness with a small KV cache, prefix caching, a KV policy and host memory whose speed is known."""
    from scheduler_harness import SchedulerHarness

    def made(kv_policy: str = "next-use", *, weft_policy: str = "fcfs", **options: Any) -> SchedulerHarness:
        weft = {"name": weft_policy, "kv_policy": kv_policy}
        h = SchedulerHarness(
            tmp_path,
            weft,
            **{"prefix_caching": True, "batched_tokens": 512, "swap_blocks": 200, "blocks": 12, "slots": 3, **options},
        )
        h.scheduler._swap.choice.observe_copy(FAST)
        return h

    return made


def prompt_of(number: int, tokens: int) -> list[int]:
    """A prompt that shares no prefix with others."""
    return [100 + number, *range(200, 199 + tokens)]


def end(h: Any, *programs: str) -> None:
    h.scheduler({"type": "programs_ended", "program_ids": list(programs)})


def happened(h: Any, kind: str, program: str, tool: str = "", took_s: float = 0.0) -> None:
    h.scheduler({"type": "program_events", "events": [[kind, program, tool, 1, took_s]]})


def start_tool(h: Any, program: str, tool: str) -> None:
    happened(h, "tool_started", program, tool)


def call(h: Any, name: str, prompt: list[int], program: str, *, max_tokens: int = 1) -> int:
    """Run a call alone and check its tokens. Returns the tokens of its prompt that it did not compute."""
    from scheduler_harness import expected_output

    h.add(name, prompt=prompt, max_tokens=max_tokens, program_id=program, program_name=program)
    entry = h.scheduler._entries[name].call
    h.run()
    assert h.tokens[name] == expected_output(prompt, max_tokens)
    return int(entry.cached_tokens)


@pytest.mark.parametrize("policy", KEEPING)
def test_what_the_device_loses_between_two_calls_is_loaded(make: Make, policy: str) -> None:
    """While a tool runs, another program fills the device. The next call loads its context instead of computing it."""
    h = make(policy)
    call(h, "a1", prompt_of(1, 64), "a")
    start_tool(h, "a", "search")
    call(h, "b1", prompt_of(2, 170), "b")
    assert call(h, "a2", [*prompt_of(1, 64), 7, 8, 9], "a") == 64
    counts = h.scheduler._swap.counts
    assert 0 < counts.loaded_tokens <= 64
    assert counts.spilled_tokens >= counts.loaded_tokens
    assert h.accounts["a2"]["recomputed_tokens"] == 0


@pytest.mark.parametrize("policy", KEEPING)
def test_without_host_memory_it_is_computed_again(make: Make, policy: str) -> None:
    """The same calls find nothing: the comparison for the test above."""
    from scheduler_harness import SchedulerHarness

    h = make(policy)
    h = SchedulerHarness(
        Path(h.folder), {"name": "fcfs", "kv_policy": policy}, prefix_caching=True, batched_tokens=512, blocks=12
    )
    call(h, "a1", prompt_of(1, 64), "a")
    call(h, "b1", prompt_of(2, 170), "b")
    assert call(h, "a2", [*prompt_of(1, 64), 7, 8, 9], "a") < 64


def lose_a_context(make: Make, learned: dict[str, float] | None = None, **options: Any) -> Any:
    """A harness whose host memory alone has the context of program "a", of 64 tokens, and whose device is free."""
    h = make(**options)
    for tool, pause_s in (learned or {}).items():
        for _ in range(30):
            h.scheduler._kv_order.retention.tool_times.observe(tool, pause_s)
    call(h, "a1", prompt_of(1, 64), "a")
    start_tool(h, "a", "search")
    call(h, "b1", prompt_of(2, 170), "b")
    end(h, "b")
    return h


def test_an_idle_engine_fetches_what_its_programs_need_next(make: Make) -> None:
    """The call finds all of its context on the device, though it was lost, and loads nothing itself."""
    h = lose_a_context(make)
    h.settle()
    assert h.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == 11, "a fetch holds no block for long"
    assert call(h, "a2", [*prompt_of(1, 64), 7, 8, 9], "a") == 64
    counts = h.scheduler._swap.counts
    assert counts.loaded_tokens == 0
    assert 0 < counts.fetched_tokens <= 64


def test_a_context_comes_back_just_before_its_tool_returns(make: Make) -> None:
    """The tool takes 20 s, as is known. The copy comes in the last seconds, while another call computes."""
    h = lose_a_context(make, learned={"search": 20.0})
    h.add("c1", prompt=prompt_of(3, 20), max_tokens=60, program_id="c")
    h.step_s = 0.5
    fetched = []
    for _ in range(44):
        h.step()
        fetched.append(h.scheduler._swap.counts.fetched_tokens)
    assert fetched[24] == 0
    assert fetched[-1] > 0
    assert call(h, "a2", [*prompt_of(1, 64), 7, 8, 9], "a") == 64


def test_a_fetch_keeps_no_call_waiting(make: Make) -> None:
    """A call arrives that needs every block. It starts in the next step, whatever is being fetched."""
    h = lose_a_context(make)
    h.step()
    h.add("big", prompt=prompt_of(5, 170), max_tokens=2, program_id="big")
    h.step()
    assert "big" in {request.request_id for request in h.scheduler.running}
    h.run()


def test_a_fetch_that_fails_is_not_found(make: Make) -> None:
    """No block that was not copied is found by its hash: the call computes its context again."""
    h = lose_a_context(make)
    h.worker.fails = lambda: True
    h.settle()
    h.worker.fails = lambda: False
    assert call(h, "a2", [*prompt_of(1, 64), 7, 8, 9], "a") < 64
    assert h.worker.failures > 0


def test_a_reset_lets_go_of_what_is_being_fetched(make: Make) -> None:
    """vLLM empties its prefix cache only if no block is in use."""
    h = lose_a_context(make, in_flight=2)
    h.step()
    assert h.scheduler.reset_prefix_cache()
    h.settle()
    assert call(h, "a2", [*prompt_of(1, 64), 7, 8, 9], "a") == 0


def play(make: Make, seed: int, **options: Any) -> Any:
    """Programs with several calls, tools between them, aborts and resets, in memories that are too small for them.
    Every call's tokens are checked."""
    from scheduler_harness import expected_output

    rng = random.Random(seed)
    fails, resets = options.pop("fails", 0.0), options.pop("resets", False)
    h = make(**{"blocks": 16, "swap_blocks": 40, "batched_tokens": 48, **options})
    h.worker.fails = lambda: rng.random() < fails
    contexts: dict[str, list[int]] = {}
    calls: dict[str, tuple[str, list[int], int]] = {}  # under way, with program, prompt and number of tokens
    started = 0
    while started < 60 or calls:
        for name in [name for name in calls if name in h.finished]:
            program, prompt, count = calls.pop(name)
            assert h.tokens[name] == expected_output(prompt, count), name
            contexts[program] = prompt + h.tokens[name]
            if rng.random() < 0.15 or len(contexts[program]) > 150:
                end(h, program)
                del contexts[program]
            elif rng.random() < 0.7:
                start_tool(h, program, rng.choice(("search", "python")))
        if started < 60 and len(calls) < 5 and rng.random() < 0.6:
            busy = {program for program, _, _ in calls.values()}
            idle = sorted(contexts.keys() - busy)
            if idle and rng.random() < 0.7:
                program = rng.choice(idle)
                prompt = contexts[program] + [rng.randrange(50, 900) for _ in range(rng.randrange(1, 20))]
            else:
                program = f"p{started}"
                prompt = [5] * rng.choice((0, 20)) + [rng.randrange(50, 900) for _ in range(rng.randrange(10, 90))]
                contexts.setdefault(program, [])
            started += 1
            name, count = f"call-{started}", rng.randrange(1, 20)
            calls[name] = program, prompt, count
            h.add(name, prompt=prompt, max_tokens=count, program_id=program, program_name=program[:1])
        if calls and rng.random() < 0.02:
            name = rng.choice(sorted(calls))
            if name not in h.finished:
                h.abort(name)
                program = calls.pop(name)[0]
                del contexts[program]
                end(h, program)
        if resets and rng.random() < 0.02:
            h.drain()
            h.scheduler.reset_prefix_cache(reset_running_requests=True)
            assert h.scheduler._swap.stats().used == 0
        h.step()
    for program in contexts:
        end(h, program)
    h.settle()
    assert h.scheduler._swap.stats().used == 0, "what no open program needs is freed"
    assert h.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == 15
    return h


@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize("policy", KEEPING)
def test_no_token_changes_however_small_the_memories_are(make: Make, policy: str, in_flight: int) -> None:
    """With every rule on, under a scheduler that preempts, all calls yield what they yield alone. Most contexts are
    evicted between two calls, and host memory is too small for all of them."""
    loaded = 0
    for seed in range(4):
        h = play(make, seed, kv_policy=policy, weft_policy="atlas", in_flight=in_flight)
        loaded += h.scheduler._swap.counts.loaded_tokens
    assert loaded > 0


@pytest.mark.parametrize("in_flight", [1, 2])
def test_no_token_changes_where_copies_fail(make: Make, in_flight: int) -> None:
    """Each tenth copy of a block fails, out or in. What was not copied is computed again."""
    failures = 0
    for seed in range(6):
        h = play(make, seed, weft_policy="atlas", in_flight=in_flight, fails=0.1)
        failures += h.worker.failures
    assert failures > 10


@pytest.mark.parametrize("in_flight", [1, 2])
def test_nothing_survives_a_reset_of_the_prefix_cache(make: Make, in_flight: int) -> None:
    """vLLM resets it when the weights change. No copy in host memory outlives that, and no call fails."""
    for seed in range(6):
        play(make, seed, in_flight=in_flight, resets=True)
