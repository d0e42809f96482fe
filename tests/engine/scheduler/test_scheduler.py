"""The scheduler plugin with vLLM's scheduler and KV cache manager, without a model."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.engine

Make = Callable[..., Any]
ATLAS = {"name": "atlas", "bounds_s": [2.0, 8.0], "beta": None}
FCFS = {"name": "fcfs"}
WIDE = {"name": "atlas", "bounds_s": [100.0, 200.0], "beta": None}  # bounds so high that no short test demotes a call


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Makes a harness. vLLM is not imported before that."""
    from scheduler_harness import SchedulerHarness

    return lambda weft=ATLAS, **options: SchedulerHarness(tmp_path, dict(weft), **options)


def spent(h: Any, call: str) -> dict[str, Any]:
    """A call's account without the tokens that its preemptions cost."""
    return {name: h.accounts[call][name] for name in ("service_s", "wait_s", "preemptions")}


def test_waiting_calls_run_in_the_order_of_their_programs_service(make: Make) -> None:
    """With one slot, the program that has attained less service runs first, whatever the order of arrival."""
    h = make(slots=1)
    h.add("long", program_id="long", service_s=10.0, max_tokens=2)
    h.add("middle", program_id="middle", service_s=5.0, max_tokens=2)
    h.add("short", program_id="short", service_s=0.0, max_tokens=2)
    h.run()
    assert h.finished == ["short", "middle", "long"]


def test_fcfs_keeps_the_order_of_arrival(make: Make) -> None:
    """The baseline ignores the service that programs have attained."""
    h = make(FCFS, slots=1)
    h.add("long", program_id="long", service_s=10.0)
    h.add("short", program_id="short", service_s=0.0)
    h.run()
    assert h.finished == ["long", "short"]


def test_a_higher_queue_preempts_and_the_victim_ends_with_the_same_tokens(make: Make) -> None:
    """A short program that arrives while two long calls hold the two slots runs next, and no call's output changes."""
    from scheduler_harness import expected_output

    h = make(slots=2)
    prompt = list(range(100, 140))
    h.add("a", prompt=prompt, max_tokens=20, program_id="a", service_s=5.0)
    h.add("b", prompt=prompt[::-1], max_tokens=20, program_id="b", service_s=5.0)
    for _ in range(6):
        h.step()
    h.add("short", max_tokens=3, program_id="c")
    assert "short" in h.step()
    h.run()
    assert h.finished[0] == "short"
    assert h.tokens["a"] == expected_output(prompt, 20)
    assert h.tokens["b"] == expected_output(prompt[::-1], 20)
    assert h.accounts["a"]["preemptions"] + h.accounts["b"]["preemptions"] == 1


def test_no_call_is_forced_out_for_one_that_vllm_holds_back(make: Make) -> None:
    """vLLM admits no prompt while other ranks compute none. Until it does, both long calls decode in each step."""
    h = make(slots=2)
    h.add("a", max_tokens=20, program_id="a", service_s=5.0)
    h.add("b", max_tokens=20, program_id="b", service_s=5.0)
    h.step()
    h.add("short", max_tokens=3, program_id="c")
    h.throttles = True
    assert [h.step() for _ in range(5)] == [{"a", "b"}] * 5
    h.throttles = False
    assert "short" in h.step()
    h.run()
    assert h.accounts["a"]["preemptions"] + h.accounts["b"]["preemptions"] == 1


def test_an_interval_between_prompts_costs_no_slot(make: Make) -> None:
    """With `--prefill-schedule-interval`, which acts without data parallelism from vLLM 0.33 on, each step fills both
    slots for as long as two calls are there."""
    h = make(slots=2, prefill_schedule_interval=8)
    h.add("a", max_tokens=20, program_id="a", service_s=5.0)
    h.add("b", max_tokens=20, program_id="b", service_s=5.0)
    h.step()
    h.add("short", max_tokens=3, program_id="c")
    steps = []
    while not h.finished:
        steps.append(h.step())
    assert all(len(step) == 2 for step in steps)


def test_scarce_kv_blocks_are_taken_from_calls_of_lower_queues(make: Make) -> None:
    """A short program finds a free slot but no KV block: the long call is preempted, and still ends with its tokens."""
    from scheduler_harness import expected_output

    h = make(slots=4, blocks=13, batched_tokens=256)
    prompt = list(range(100, 260))  # 10 of the 12 blocks that calls can use
    h.add("long", prompt=prompt, max_tokens=8, program_id="a", service_s=5.0)
    h.step()
    other = list(range(300, 380))
    h.add("short", prompt=other, max_tokens=3, program_id="b")
    assert h.step() == {"short"}
    h.run()
    assert h.finished == ["short", "long"]
    assert h.tokens == {"long": expected_output(prompt, 8), "short": expected_output(other, 3)}


def test_no_call_is_preempted_for_one_that_would_not_fit_even_then(make: Make) -> None:
    """Preempting the only call of a lower queue would free too few blocks, so it runs on."""
    h = make(WIDE, slots=4, blocks=13, batched_tokens=256)
    h.add("first", prompt=list(range(100, 190)), max_tokens=6, program_id="a")
    h.step()
    h.add("low", prompt=list(range(20)), max_tokens=6, program_id="b", service_s=150.0)
    h.step()
    h.add("big", prompt=list(range(300, 440)), max_tokens=2, program_id="c")
    assert h.step() == {"first", "low"}
    h.run()
    assert h.accounts["low"]["preemptions"] == 0


def test_when_blocks_run_out_inside_a_step_the_lowest_call_is_preempted(make: Make) -> None:
    """vLLM's own preemption takes the call of the lowest rank, not the latest arrival."""
    h = make(WIDE, slots=2, blocks=9, batched_tokens=256)
    h.add("low", prompt=list(range(100, 150)), max_tokens=40, program_id="a", service_s=150.0)
    h.step()
    h.add("high", prompt=list(range(300, 350)), max_tokens=40, program_id="b")
    h.run()
    assert h.accounts["high"]["preemptions"] == 0
    assert h.accounts["low"]["preemptions"] > 0


def test_deciding_every_few_steps_preempts_less_often_and_fills_slots_at_once(make: Make) -> None:
    """With a decision every fourth step, a short call waits for the decision, but a freed slot is filled at once."""
    h = make({**WIDE, "decide_every": 4}, slots=1)
    h.add("long", program_id="a", service_s=150.0, max_tokens=20)
    h.step()
    h.add("short", program_id="b", max_tokens=1)
    h.add("next", program_id="c", service_s=50.0, max_tokens=5)
    assert [h.step() for _ in range(5)] == [{"long"}, {"long"}, {"long"}, {"short"}, {"next"}]
    h.run()
    assert h.finished == ["short", "next", "long"]


@pytest.mark.parametrize("policy", [ATLAS, FCFS])
def test_a_call_of_the_same_queue_does_not_preempt(make: Make, policy: dict[str, Any]) -> None:
    """Calls of one queue run in the order of their arrival."""
    h = make(policy, slots=1)
    h.add("first", program_id="a", max_tokens=2)
    h.step()
    h.add("second", program_id="b", max_tokens=2)
    h.run()
    assert h.finished == ["first", "second"]
    assert h.accounts["first"]["preemptions"] == 0


def test_an_exhausted_quantum_demotes_a_running_call(make: Make) -> None:
    """After two seconds in Q_1 the call is demoted to Q_2, and a new program takes the slot."""
    h = make(slots=1)
    h.add("long", program_id="a", max_tokens=10)
    for _ in range(3):
        h.step()
    h.add("fresh", program_id="b", max_tokens=1)
    h.run()
    assert h.finished == ["fresh", "long"]


def test_service_and_wait_are_exact(make: Make) -> None:
    """With one slot and one second a step, the first call runs for 4 s; the second waits for 4 s and runs for 2 s."""
    h = make(FCFS, slots=1)
    h.add("a", program_id="a", max_tokens=4)
    h.add("b", program_id="b", max_tokens=2)
    h.run()
    assert spent(h, "a") == {"service_s": 4.0, "wait_s": 0.0, "preemptions": 0}
    assert spent(h, "b") == {"service_s": 2.0, "wait_s": 4.0, "preemptions": 0}


def test_wait_counts_the_time_spent_preempted(make: Make) -> None:
    """A preempted call waits again. Its service is the time of the steps that it was part of, with recomputation."""
    h = make(slots=1)
    h.add("a", program_id="a", max_tokens=4, service_s=5.0)
    h.step()
    h.add("b", program_id="b", max_tokens=2)
    h.run()
    assert spent(h, "a") == {"service_s": 4.0, "wait_s": 2.0, "preemptions": 1}


def test_an_account_says_when_a_preempted_call_waited(make: Make) -> None:
    """Seconds from its arrival on, and how long. A call that waits at first only needs no such list."""
    h = make(slots=1)
    h.add("a", program_id="a", max_tokens=4, service_s=5.0)
    h.step()
    h.add("b", program_id="b", max_tokens=2)
    h.run()
    assert h.accounts["a"]["waits"] == [[1.0, 2.0]]
    assert "waits" not in h.accounts["b"]


def test_overlapping_steps_are_charged_once(make: Make) -> None:
    """With two steps in flight (asynchronous scheduling) a call is charged the time that passed, not twice as much."""
    h = make(FCFS, slots=1, in_flight=2)
    h.add("a", program_id="a", max_tokens=6)
    steps = h.run()
    assert h.accounts["a"]["service_s"] == pytest.approx(h.clock() - 0.0, abs=1.0)
    assert h.accounts["a"]["service_s"] <= steps


def test_samples_of_one_call_share_an_account(make: Make) -> None:
    """With n > 1 each sample is a request of its own, but the call is charged once for each step."""
    h = make(FCFS, slots=2)
    h.add("0_x", program_id="a", call_id="x", max_tokens=3)
    h.add("1_x", program_id="a", call_id="x", max_tokens=5)
    h.run()
    assert spent(h, "1_x") == {"service_s": 5.0, "wait_s": 0.0, "preemptions": 0}


@pytest.mark.parametrize("step_s", [0.5, 3.0])
@pytest.mark.parametrize("in_flight", [1, 2])
def test_service_in_tokens_does_not_hang_on_the_batch(make: Make, step_s: float, in_flight: int) -> None:
    """Each prompt and output token counts once, however long the steps take and however often it is recomputed."""
    h = make({**ATLAS, "token_s": 0.25}, slots=1, in_flight=in_flight, batched_tokens=16)
    h.step_s = step_s
    h.add("long", prompt=list(range(100, 140)), max_tokens=8, program_id="a", service_s=5.0)
    for _ in range(6):
        h.step()
    h.add("short", max_tokens=3, program_id="b")
    h.run()
    assert h.finished == ["short", "long"]
    assert h.accounts["long"]["preemptions"] == 1
    # The last token is delivered but not computed. A step in flight beyond it may compute one more token.
    assert h.accounts["long"]["service_s"] in {0.25 * (40 + 7), 0.25 * (40 + 8)}
    assert h.accounts["short"]["service_s"] in {0.25 * (3 + 2), 0.25 * (3 + 3)}


def test_cached_tokens_are_no_service_in_tokens(make: Make) -> None:
    """Tokens found in the prefix cache are not computed, and so not charged."""
    h = make({**FCFS, "token_s": 1.0}, prefix_caching=True)
    prompt = list(range(100, 148))
    h.add("first", prompt=prompt, max_tokens=2, program_id="a")
    h.run()
    h.add("second", prompt=prompt, max_tokens=2, program_id="b")
    h.run()
    assert h.accounts["first"]["service_s"] == 49.0
    assert h.accounts["second"]["service_s"] == 17.0  # the last of three blocks is computed again for its output


def test_bounds_found_from_calls_reach_the_scheduler(make: Make) -> None:
    """After enough calls of 2 s the first bound is 2 s, so a program with 3 s ranks below a new one."""
    h = make({"name": "atlas", "bounds_s": "auto", "beta": None}, slots=2)
    for n in range(32):
        h.add(f"call-{n}", max_tokens=2)
    h.run()
    assert h.scheduler.weft_policy.bounds_s[:2] == (2.0, 4.0)
    h.add("old", program_id="a", service_s=3.0)
    h.add("new", program_id="b")
    ranks = {name: entry.call.rank.level for name, entry in h.scheduler._entries.items()}
    assert ranks == {"old": 1, "new": 0}
    h.run()


def test_a_program_is_charged_by_its_critical_path_while_its_calls_run(make: Make) -> None:
    """Calls that end on this engine raise the program's service at once, also for calls that bring an older value."""
    h = make(slots=2)
    h.add("a1", program_id="a", max_tokens=3)
    h.add("a2", program_id="a", max_tokens=12)
    for _ in range(4):
        h.step()
    h.add("a3", program_id="a", max_tokens=1)
    entry = h.scheduler._entries["a3"]
    assert entry.call.program.attained.service_s == 3.0
    assert entry.call.rank.level == 1
    h.run()
    assert h.scheduler._table._programs == {}


def test_requests_without_ids_are_programs_of_their_own(make: Make) -> None:
    """The requests of a client that knows nothing of programs each start in Q_1."""
    h = make(slots=1)
    h.add("a", max_tokens=2)
    h.add("b", max_tokens=2)
    h.run()
    assert h.finished == ["a", "b"]


def test_the_session_stands_in_for_a_missing_program(make: Make) -> None:
    """Requests that bring only a session_id belong to one program, which stands for the session."""
    h = make(slots=2)
    h.add("a", session_id="s", max_tokens=2)
    h.add("b", session_id="s", max_tokens=2)
    assert h.scheduler._entries["a"].call.program is h.scheduler._entries["b"].call.program
    h.run()


def test_a_program_without_numbers_is_remembered_between_its_calls(make: Make) -> None:
    """For a client that sends only ids, the scheduler itself adds up the service of the program's earlier calls."""
    h = make(slots=1)
    h.add("a1", program_id="a", max_tokens=5)
    h.run()
    h.add("a2", program_id="a", max_tokens=2)
    h.add("b1", program_id="b", max_tokens=2)
    assert h.scheduler._entries["a2"].call.service_s == 5.0
    h.run()
    assert h.finished == ["a1", "b1", "a2"]


def test_requests_without_ids_are_not_remembered(make: Make) -> None:
    """Programs that stand for one request never return, so the scheduler does not remember them."""
    h = make()
    for n in range(5):
        h.add(f"r{n}", max_tokens=1)
    h.run()
    assert len(h.scheduler._table._idle) == 0


def test_a_call_whose_input_comes_in_pieces_goes_on_among_others(make: Make) -> None:
    """With streaming input a call pauses between its inputs and keeps its KV; other calls are charged as usual."""
    h = make(slots=2)
    h.add("voice", program_id="a", max_tokens=3, resumable=True)
    h.add("text", program_id="b", max_tokens=6)
    for _ in range(4):
        h.step()
    assert len(h.tokens["voice"]) == 3
    h.add("voice", prompt=[31, 32, 33], program_id="a", max_tokens=4, resumable=True)
    h.add("late", program_id="c", max_tokens=2)
    for _ in range(12):
        h.step()
    assert len(h.tokens["voice"]) == 7
    assert {"text", "late"} <= set(h.finished)
    assert h.accounts["text"]["service_s"] >= 6.0
    h.add("voice", program_id="a", resumable=False)
    h.run()
    assert (h.scheduler._table._programs, h.scheduler._entries) == ({}, {})


@pytest.mark.parametrize("policy", ["fcfs", "auto"])
def test_a_call_is_charged_for_each_step_whatever_happens_beside_it(make: Make, policy: str) -> None:
    """Some policies are told of most steps only when a call leaves. Its account has them all."""
    h = make({"name": policy}, slots=3)
    h.add("long", program_id="a", max_tokens=30)
    h.add("short", program_id="b", max_tokens=5)
    for _ in range(8):
        h.step()
    h.add("late", program_id="c", max_tokens=12)
    h.add("gone", program_id="d", max_tokens=40)
    for _ in range(4):
        h.step()
    h.abort("gone")
    h.run()
    assert {name: h.accounts[name]["service_s"] for name in ("long", "short", "late")} == {
        "long": 30.0,
        "short": 5.0,
        "late": 12.0,
    }
    assert h.scheduler._charges._decoding == {}


def test_programs_may_choose_the_same_call_id(make: Make) -> None:
    """Clients choose the ids: two programs that use the same call id keep accounts of their own, and both end."""
    h = make(slots=2)
    h.add("a1", program_id="a", call_id="x", max_tokens=2)
    h.add("b1", program_id="b", call_id="x", max_tokens=5)
    h.run()
    assert (h.accounts["a1"]["service_s"], h.accounts["b1"]["service_s"]) == (2.0, 5.0)
    assert (h.scheduler._table._programs, h.scheduler._table._ledgers) == ({}, {})


@pytest.mark.parametrize(
    "extra",
    [
        {"program_id": 7, "service_s": "much", "wait_s": -3, "parents": "x"},
        {"program_id": "", "call_id": None, "service_s": float("nan"), "parents": [1, 2]},
        {"service_s": float("inf"), "total_service_s": -1.0, "wait_s": True},
    ],
)
def test_malformed_ids_never_end_the_engine(make: Make, extra: dict[str, Any]) -> None:
    """A malformed value is ignored in the scheduler's process, where an exception would end every call."""
    h = make()
    h.add("a", **extra)
    h.run()
    assert h.finished == ["a"]


@pytest.mark.parametrize("when", ["waiting", "running", "preempted"])
def test_an_aborted_call_leaves_nothing_behind(make: Make, when: str) -> None:
    """Aborting a call removes it from every queue, and the other calls go on."""
    h = make(slots=1)
    h.add("victim", program_id="a", max_tokens=30, service_s=5.0)
    if when != "waiting":
        h.step()
    h.add("other", program_id="b", max_tokens=3, service_s=9.0 if when == "running" else 0.0)
    if when == "preempted":
        h.step()
        assert h.accounts["victim"]["service_s"] == 1.0
    h.abort("victim")
    h.run()
    assert h.finished == ["other"]
    s = h.scheduler
    assert (s._entries, s._table._programs, s._table._ledgers, len(s.weft_policy.waiting)) == ({}, {}, {}, 0)
    assert s.kv_cache_manager.block_pool.get_num_free_blocks() == 199  # vLLM keeps one as its null block


@pytest.mark.parametrize("policy", ["fcfs", "mlfq", "plas", "atlas", "rr"])
@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize("prefix_caching", [False, True])
@pytest.mark.parametrize(("swap_blocks", "seed"), [(0, 0), (8, 0), (100, 1)])
def test_random_programs_lose_and_change_nothing(  # noqa: PLR0917  one argument a parametrization
    make: Make, policy: str, in_flight: int, prefix_caching: bool, swap_blocks: int, seed: int
) -> None:
    """With random arrivals, lengths, services and priorities, and scarce KV on the device and in host memory, every
    call ends with its undisturbed tokens, no state is left over, and the same seed gives the same schedule."""
    from scheduler_harness import expected_output

    parameters: dict[str, dict[str, Any]] = {"fcfs": {}, "rr": {"quanta_s": [2.0]}}

    def play() -> tuple[list[str], dict[str, Any], int, int]:
        rng = random.Random(seed)
        h = make(
            {"name": policy} | parameters.get(policy, {"bounds_s": [2.0, 8.0], "beta": 3.0}),
            slots=3,
            blocks=24,
            in_flight=in_flight,
            prefix_caching=prefix_caching,
            batched_tokens=48,
            swap_blocks=swap_blocks,
        )
        prompts: dict[str, list[int]] = {}
        counts: dict[str, int] = {}
        for n in range(40):
            name = f"call-{n}"
            prompts[name] = [5] * rng.randrange(20) + [rng.randrange(50, 900) for _ in range(rng.randrange(1, 90))]
            counts[name] = rng.randrange(1, 40)
            h.add(
                name,
                prompt=prompts[name],
                max_tokens=counts[name],
                program_id=f"p{rng.randrange(12)}",
                service_s=rng.choice([0.0, 0.0, 3.0, 20.0]),
            )
            for _ in range(rng.randrange(6)):
                h.step()
        h.run()
        assert sorted(h.finished) == sorted(prompts)
        for name, prompt in prompts.items():
            assert h.tokens[name] == expected_output(prompt, counts[name]), name
        assert h.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == 23
        preemptions, swapped = (sum(x[what] for x in h.accounts.values()) for what in ("preemptions", "swapped_tokens"))
        return h.finished, h.accounts, preemptions, swapped

    first = play()
    assert first[2] > 0 or policy == "fcfs", "this workload is meant to preempt"
    assert (first[3] > 0) == (first[2] > 0 and swap_blocks > 0)
    if swap_blocks == 8:  # copies are planned as well
        assert play() == first


@pytest.mark.parametrize("in_flight", [1, 2])
def test_a_swapped_call_goes_on_where_it_was(make: Make, in_flight: int) -> None:
    """A call that is preempted during its prompt and during its output computes again only the tokens that were in
    flight. Without the swap it computes all its tokens again."""
    kept, lost = (long_call_preempted_twice(make, swap_blocks, in_flight) for swap_blocks in (100, 0))
    assert kept["preemptions"] == lost["preemptions"] == 2
    assert min(kept["swapped_tokens"], lost["recomputed_tokens"]) > 256
    assert (kept["recomputed_tokens"], lost["swapped_tokens"]) == (0, 0)


def long_call_preempted_twice(make: Make, swap_blocks: int, in_flight: int) -> dict[str, Any]:
    """The account of a call with 250 prompt and 40 output tokens, which is preempted twice."""
    from scheduler_harness import expected_output

    h = make(WIDE, slots=1, in_flight=in_flight, swap_blocks=swap_blocks)
    prompt = list(range(300, 550))
    h.add("long", prompt=prompt, max_tokens=40, program_id="long", service_s=150.0)
    for name, steps in (("first", 2), ("second", 20)):
        for _ in range(steps):
            h.step()
        h.add(name, max_tokens=3, program_id=name)
    h.run()
    assert h.tokens["long"] == expected_output(prompt, 40)
    account: dict[str, Any] = h.accounts["long"]
    return account


def long_call_then_short(make: Make, steps: int, max_tokens: int = 10, **options: Any) -> Any:
    """A harness with one slot, in which a call of 100 tokens has run for `steps` steps when a short program arrives."""
    h = make(WIDE, slots=1, swap_blocks=100, **options)
    h.add("long", prompt=list(range(100, 200)), max_tokens=max_tokens, program_id="long", service_s=150.0)
    for _ in range(steps):
        h.step()
    h.add("short", max_tokens=2, program_id="short")
    return h


def test_calls_below_the_threshold_are_computed_again(make: Make) -> None:
    """A call with fewer than `min_tokens` tokens is not swapped but computed again."""
    for min_tokens, swaps in ((40, True), (120, False)):
        h = long_call_then_short(make, 4, min_tokens=min_tokens)
        h.run()
        assert (h.accounts["long"]["swapped_tokens"] > 0) == swaps
        assert (h.accounts["long"]["recomputed_tokens"] > 0) == (not swaps)


def test_a_prefix_that_is_still_cached_is_not_loaded(make: Make) -> None:
    """On resumption only the blocks that the device's prefix cache has lost are loaded from host memory."""
    h = long_call_then_short(make, 10, max_tokens=20, prefix_caching=True)
    h.run()
    assert (h.accounts["long"]["preemptions"], h.accounts["long"]["recomputed_tokens"]) == (1, 0)
    assert 0 < h.accounts["long"]["swapped_tokens"] <= 16


def test_resetting_the_prefix_cache_voids_the_copies(make: Make) -> None:
    """vLLM resets the prefix cache when the weights change, and the copies in host memory are then just as invalid."""
    h = long_call_then_short(make, 4)
    h.step()
    assert h.scheduler._swap.stats().used > 0
    h.scheduler.reset_prefix_cache(reset_running_requests=True)
    assert h.scheduler._swap.stats().used == 0
    h.run()
    assert h.accounts["long"]["swapped_tokens"] == 0


def test_bad_configuration_is_a_typed_error_at_construction(make: Make) -> None:
    """An unknown policy, or bounds that fall, are reported before the first request arrives."""
    from weft.core.errors import PolicyError

    with pytest.raises(PolicyError, match="unknown policy"):
        make({"name": "lottery"})
    with pytest.raises(PolicyError, match="increasing"):
        make({"name": "atlas", "bounds_s": [3.0, 1.0]})
    with pytest.raises(PolicyError, match="beta"):
        make({"name": "plas", "beta": 0})
    with pytest.raises(PolicyError, match="queues"):
        make({"name": "plas", "queues": 4})
    with pytest.raises(PolicyError, match="decide_every"):
        make({"name": "plas", "decide_every": 0})
    with pytest.raises(PolicyError, match="token_s"):
        make({"name": "plas", "token_s": -1})
    with pytest.raises(PolicyError, match="auto"):
        make({"name": "plas", "bounds_s": "wide"})
