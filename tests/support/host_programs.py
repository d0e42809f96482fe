"""Programs with several calls on a scheduler without a model that has host memory, as tests play them."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from weft.core.kv_cache.config import CopySpeed
from weft.core.kv_cache.policies import KV_POLICIES

Make = Callable[..., Any]
KEEPING = [name for name in KV_POLICIES if name not in ("lru", "ended-first")]  # policies that host memory follows


def harness(folder: Path, kv_policy: str = "next-use", *, weft_policy: str = "fcfs", **options: Any) -> Any:
    """A harness with a small KV cache, prefix caching, a KV policy and host memory whose speed is known."""
    from scheduler_harness import SchedulerHarness

    h = SchedulerHarness(
        folder,
        {"name": weft_policy, "kv_policy": kv_policy},
        **{"prefix_caching": True, "batched_tokens": 512, "swap_blocks": 200, "blocks": 12, "slots": 3, **options},
    )
    h.scheduler._swap.choice.observe_copy(CopySpeed(0.0, 1e12, 1e12))
    return h


def prompt_of(number: int, tokens: int) -> list[int]:
    """A prompt that shares no prefix with others."""
    return [100 + number, *range(200, 199 + tokens)]


def end(h: Any, *programs: str) -> None:
    h.scheduler({"type": "programs_ended", "program_ids": list(programs)})


def happened(h: Any, kind: str, program: str, tool: str = "", took_s: float = 0.0) -> None:
    h.scheduler({"type": "program_events", "events": [[kind, program, tool, 1, took_s]]})


def start_tool(h: Any, program: str, tool: str) -> None:
    happened(h, "tool_started", program, tool)


def call(h: Any, name: str, prompt: list[int], program: str, *, max_tokens: int = 1, **options: Any) -> int:
    """Run a call alone and check its tokens. Returns the tokens of its prompt that it did not compute."""
    from scheduler_harness import expected_output

    h.add(name, prompt=prompt, max_tokens=max_tokens, program_id=program, program_name=program, **options)
    entry = h.scheduler._entries[name].call
    h.run()
    assert h.tokens[name] == expected_output(prompt, max_tokens)
    return int(entry.cached_tokens)


def reset(h: Any) -> None:
    """Reset the prefix cache as vLLM does when the weights change."""
    h.drain()
    h.scheduler.reset_prefix_cache(reset_running_requests=True)
    assert h.scheduler._swap.stats().used == 0


def play(make: Make, seed: int, **options: Any) -> Any:
    """Programs with several calls, tools between them, aborts and resets, in memories that are too small for them. Some
    have a cache salt or an adapter of their own. Steps are fast and slow. Every call's tokens are checked."""
    from scheduler_harness import expected_output

    rng, pace = random.Random(seed), random.Random(seed)
    fails, resets = options.pop("fails", 0.0), options.pop("resets", False)
    h = make(**{"blocks": 16, "swap_blocks": 40, "batched_tokens": 48, **options})
    h.worker.fails = lambda: rng.random() < fails
    contexts: dict[str, list[int]] = {}
    isolated: dict[str, dict[str, str]] = {}  # salts and adapters, by program
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
                isolated[program] = rng.choice(({}, {}, {"cache_salt": "x"}, {"adapter": "y"}))
            started += 1
            name, count = f"call-{started}", rng.randrange(1, 20)
            calls[name] = program, prompt, count
            who = {"program_id": program, "program_name": program[:1]}
            h.add(name, prompt=prompt, max_tokens=count, **isolated[program], **who)
        if calls and rng.random() < 0.02:
            name = rng.choice(sorted(calls))
            if name not in h.finished:
                h.abort(name)
                program = calls.pop(name)[0]
                del contexts[program]
                end(h, program)
        if resets and rng.random() < 0.02:
            reset(h)
        h.step_s, h.asks_meanwhile = pace.choice((0.02, 0.02, 1.0)), pace.random() < 0.9
        h.step()
    for program in contexts:
        end(h, program)
    h.settle()
    assert h.scheduler._swap.stats().used == 0 or (
        h.scheduler._swap.copies_beside
        and not any(context.is_needed for context in h.scheduler._swap.tier.tree.contexts())
    ), "what no open program needs is freed, or left for others where copies run beside steps"
    assert h.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == 15
    return h
