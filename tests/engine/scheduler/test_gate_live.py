"""The gate, learned ranks and the end of programs on vLLM's real scheduler without a model."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from host_programs import prompt_of
from reranking import Shuffled

pytestmark = pytest.mark.engine

Make = Callable[..., Any]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Makes a harness; vLLM is imported only here."""
    from scheduler_harness import SchedulerHarness

    return lambda weft, **options: SchedulerHarness(tmp_path, dict(weft), **options)


def held(h: Any) -> list[str]:
    """The requests that the gate holds back."""
    return [call.key for call in h.scheduler.weft_policy.held]


def end(h: Any, *programs: str) -> dict[str, Any]:
    return h.scheduler({"type": "programs_ended", "program_ids": list(programs)})


@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize("swap_blocks", [0, 100])
@pytest.mark.parametrize("name", ["shuffled", "learned"])
@pytest.mark.parametrize("seed", range(2))
def test_random_programs_behind_the_gate_lose_and_change_nothing(
    make: Make, seed: int, name: str, swap_blocks: int, in_flight: int
) -> None:
    """Programs arrive, go on, end, are aborted and fall silent in any order, in a KV cache that holds a part of them.
    Every call ends with its undisturbed tokens, no block is lost, and the same seed gives the same schedule."""
    from scheduler_harness import expected_output

    def play() -> tuple[list[str], dict[str, Any], int]:
        rng = random.Random(seed)
        with Shuffled.registered(seed=seed, share=0.2):
            h = make(
                {"name": name, "gate": True},
                slots=3,
                blocks=40,
                in_flight=in_flight,
                prefix_caching=True,
                swap_blocks=swap_blocks,
            )
        contexts: dict[str, list[int]] = {}
        prompts: dict[str, list[int]] = {}
        counts: dict[str, int] = {}
        most_held = 0
        for number in range(60):
            program, call = f"p{rng.randrange(12)}", f"call-{number}"
            new = [rng.randrange(50, 900) for _ in range(rng.randrange(1, 90))]
            prompts[call] = ((contexts.get(program) or []) + new)[:400]
            counts[call] = rng.randrange(1, 30)
            contexts[program] = prompts[call] + expected_output(prompts[call], counts[call])
            h.add(call, prompt=prompts[call], max_tokens=counts[call], program_id=program, program_name=program[:2])
            for _ in range(rng.randrange(3)):
                h.step()  # checks integrity
            most_held = max(most_held, len(held(h)))
            if rng.random() < 0.1:
                h.abort(f"call-{rng.randrange(number + 1)}")
            if rng.random() < 0.2:
                end(h, program)
                contexts.pop(program)
        h.run()
        for call in h.finished:
            assert h.tokens[call] == expected_output(prompts[call], counts[call]), call
        pool = h.scheduler.kv_cache_manager.block_pool
        assert len(pool.free_block_queue.get_all_free_blocks()) == pool.get_num_free_blocks() == 39
        return h.finished, h.accounts, most_held

    first = play()
    if seed == 0:
        assert first == play()
    assert first[2] > 0, "the gate held calls back"


def test_a_request_that_is_held_back_is_counted_and_not_taken(make: Make) -> None:
    """vLLM sees no request that it could admit, reports it as waiting, and goes on to ask."""
    h = make({"name": "fcfs", "gate": True}, slots=3, blocks=20, prefix_caching=True, batched_tokens=512)
    h.add("a1", prompt=prompt_of(1, 200), max_tokens=4, program_id="a")
    h.add("b1", prompt=prompt_of(2, 200), max_tokens=4, program_id="b")
    assert held(h) == ["b1"]
    assert h.step() == {"a1"}
    assert not h.scheduler.waiting
    assert h.scheduler.get_request_counts() == (1, 1)
    assert [request.request_id for request in h.scheduler.waiting] == ["b1"]
    h.run()
    assert h.finished == ["a1", "b1"], "an idle program gives way, so nothing waits for its end"


def test_a_request_that_is_held_back_can_be_aborted(make: Make) -> None:
    """Nothing of it is left, and those behind it go on."""
    h = make({"name": "fcfs", "gate": True}, slots=3, blocks=20, prefix_caching=True, batched_tokens=512)
    for number, name in enumerate(("a1", "b1", "c1")):
        h.add(name, prompt=prompt_of(number, 200), max_tokens=4, program_id=name[0])
    assert held(h) == ["b1", "c1"]
    h.abort("b1")
    assert held(h) == ["c1"]
    end(h, "b")
    h.run()
    assert h.finished == ["a1", "c1"]


@pytest.mark.parametrize(("gate", "found"), [(True, 64), (False, 16)])
def test_the_blocks_of_an_ended_program_are_evicted_first(make: Make, gate: bool, found: int) -> None:
    """The open program is the one that was used longest ago, and vLLM alone would evict it. Behind the gate, the blocks
    of the program that has ended are taken, and the open one finds its context."""
    h = make({"name": "fcfs", "gate": gate}, slots=3, blocks=12, prefix_caching=True, batched_tokens=512)
    h.add("open1", prompt=prompt_of(1, 64), max_tokens=1, program_id="open")
    h.run()
    h.add("ended1", prompt=prompt_of(2, 64), max_tokens=1, program_id="ended")
    h.run()
    end(h, "ended")
    h.add("other", prompt=prompt_of(3, 96), max_tokens=1, program_id="other")
    h.run()
    h.add("open2", prompt=[*prompt_of(1, 64), 7, 8, 9], max_tokens=1, program_id="open")
    call = h.scheduler._entries["open2"].call
    h.run()
    assert call.cached_tokens == found


def test_a_prefix_that_an_open_program_shares_stays(make: Make) -> None:
    """The blocks that an ended program shares with an open one are evicted in vLLM's order."""
    h = make({"name": "fcfs", "gate": True}, slots=3, blocks=12, prefix_caching=True, batched_tokens=512)
    shared = prompt_of(1, 64)
    h.add("open1", prompt=[*shared, 7], max_tokens=1, program_id="open")
    h.add("ended1", prompt=[*shared, 8, *range(40)], max_tokens=1, program_id="ended")
    h.run()
    end(h, "ended")
    h.add("other", prompt=prompt_of(3, 90), max_tokens=1, program_id="other")
    h.run()
    h.add("open2", prompt=[*shared, 7, 8], max_tokens=1, program_id="open")
    call = h.scheduler._entries["open2"].call
    h.run()
    assert call.cached_tokens == 64


def test_a_prefix_that_many_programs_share_is_nobodys(make: Make) -> None:
    """A prompt with which many programs begin outlives them all, because the next program begins with it, too."""
    h = make({"name": "fcfs", "gate": True}, slots=3, blocks=12, prefix_caching=True, batched_tokens=512)
    shared = prompt_of(1, 64)
    for number in range(20):
        h.add(f"c{number}", prompt=[*shared, number], max_tokens=1, program_id=f"p{number}")
        h.run()
    end(h, *(f"p{number}" for number in range(20)))
    h.add("other", prompt=prompt_of(3, 90), max_tokens=1, program_id="other")
    h.run()
    h.add("next", prompt=[*shared, 99], max_tokens=1, program_id="next")
    call = h.scheduler._entries["next"].call
    h.run()
    assert call.cached_tokens == 64


def test_a_program_that_falls_silent_is_forgotten(make: Make) -> None:
    """Behind a server nobody may say that a program has ended. After ten minutes without a request it is forgotten,
    and it does not count as one that ended."""
    h = make({"name": "learned"})
    policy = h.scheduler.weft_policy
    h.add("a1", program_id="a", program_name="n", max_tokens=2)
    h.run()
    h.clock.advance(599.0)
    h.add("b1", program_id="b", program_name="n", max_tokens=2)
    h.run()
    assert [program.view.program_id for program in policy.book.programs.values()] == ["a", "b"]
    h.clock.advance(2.0)
    h.add("c1", program_id="c", program_name="n", max_tokens=2)
    live = list(policy.book.programs.values())
    assert [program.view.program_id for program in live] == ["b", "c"]
    assert (live[0].ranked_by.ended, list(live[0].ranked_by.forgotten)) == (0, [pytest.approx(2, abs=1)])
    h.run()


@pytest.mark.parametrize(("kind", "ended"), [("program_ids", 1), ("abandoned", 0)])
def test_an_abandoned_program_is_no_sample(make: Make, kind: str, ended: int) -> None:
    """A program that a time-out ends leaves, and its class learns of no end."""
    h = make({"name": "learned"})
    for program in ("a", "b"):
        h.add(f"{program}1", program_id=program, program_name="n", max_tokens=2)
    h.run()
    assert h.scheduler({"type": "programs_ended", kind: ["a"]}) == {"ended": 1}
    (live,) = h.scheduler.weft_policy.book.programs.values()
    assert (live.view.program_id, live.ranked_by.ended) == ("b", ended)


def test_the_scheduler_measures_what_steps_cost(make: Make) -> None:
    """After 64 steps the policy knows that a step takes a second, whatever is computed in it."""
    h = make({"name": "learned"}, batched_tokens=1024)
    for number in range(12):
        h.add(f"c{number}", prompt=[7] * (10 + 40 * number), max_tokens=20, program_id=f"p{number}")
    h.run()
    costs = h.scheduler.weft_policy.costs
    assert (costs.fixed_s, costs.slots) == (pytest.approx(1.0), 2)
    assert costs.prompt_weight == pytest.approx(0.0, abs=1e-6)


def test_the_scheduler_counts_a_calls_work(make: Make) -> None:
    """The prompt tokens that were computed, those in the prefix cache left out, and the output tokens."""
    h = make({"name": "learned"}, slots=1, prefix_caching=True, batched_tokens=32)
    prompt = list(range(100, 180))
    h.add("first", prompt=prompt, max_tokens=3, program_id="a")
    first = h.scheduler._entries["first"].call
    h.run()
    assert (first.computed_tokens, first.output_tokens) == (80, 3)
    h.add("second", prompt=[*prompt, 7, 8, 9], max_tokens=4, program_id="a")
    second = h.scheduler._entries["second"].call
    h.run()
    assert (second.computed_tokens, second.output_tokens) == (3, 4)


def test_what_its_program_computes_again_is_no_work_of_a_call(make: Make) -> None:
    """Another program has evicted the context, so the engine computes it again. The call's work is its new tokens."""
    h = make({"name": "learned"}, slots=1, prefix_caching=True, batched_tokens=64, blocks=13)
    prompt = list(range(100, 180))
    for key, tokens, program in (("a1", prompt, "a"), ("b1", list(range(300, 470)), "b")):
        h.add(key, prompt=tokens, max_tokens=3, program_id=program)
        h.run()
    h.add("a2", prompt=[*prompt, 7, 8, 9], max_tokens=4, program_id="a")
    second = h.scheduler._entries["a2"].call
    h.run()
    assert h.accounts["a2"]["recomputed_tokens"] > 0
    assert (second.computed_tokens, second.output_tokens) == (3, 4)
