"""The tokens of a step go to calls in rank order, although vLLM serves running calls before waiting ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.engine

ATLAS = {"name": "atlas", "bounds_s": [100.0, 200.0], "beta": None}
Make = Callable[..., Any]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Makes a harness with steps of 64 tokens. vLLM is not imported before that."""
    from scheduler_harness import SchedulerHarness

    def made(**options: Any) -> Any:
        policy = ATLAS | options.pop("policy", {})
        return SchedulerHarness(tmp_path, policy, **{"slots": 4, "blocks": 200, "batched_tokens": 64, **options})

    return made


def step(h: Any) -> dict[str, int]:
    """Run one step.

    Returns:
        The tokens of each request in it.
    """
    found: dict[str, int] = {}
    scheduler, schedule = h.scheduler, type(h.scheduler).schedule

    def noted(*arguments: Any) -> Any:
        output = schedule(scheduler, *arguments)
        found.update(output.num_scheduled_tokens)
        return output

    scheduler.schedule = noted
    h.step()
    del scheduler.schedule
    return found


@pytest.mark.parametrize("in_flight", [1, 2])
def test_a_short_call_does_not_wait_behind_a_long_prompt(make: Make, in_flight: int) -> None:
    """A call of Q1 gets its three tokens in the next step, and the prompt of Q3 that runs gets the other 61.

    vLLM alone gives the whole step to the running prompt, and the call waits until the prompt is computed, nine steps.
    """
    h = make(in_flight=in_flight)
    h.add("long", prompt=list(range(300, 940)), max_tokens=2, program_id="long", service_s=250.0)
    assert step(h) == {"long": 64}
    h.add("short", prompt=[1, 2, 3], max_tokens=4, program_id="short")
    assert step(h) == {"short": 3, "long": 61}
    assert step(h)["long"] == 63
    h.run()
    assert h.accounts["short"]["wait_s"] == 0.0
    assert h.accounts["long"]["preemptions"] == 0


def test_a_call_of_the_same_queue_waits_for_the_prompt_before_it(make: Make) -> None:
    """Inside a queue the order is first come, first served, also for the tokens of a step."""
    h = make()
    h.add("long", prompt=list(range(300, 620)), max_tokens=2, program_id="long")
    step(h)
    h.add("short", prompt=[1, 2, 3], max_tokens=2, program_id="short")
    assert [set(step(h)) for _ in range(4)] == [{"long"}] * 4
    assert set(step(h)) == {"long", "short"}


def test_a_prompt_that_gets_no_tokens_waits_in_the_batch(make: Make) -> None:
    """A prompt of better rank takes whole steps. The other keeps what it has computed, and its account has a wait."""
    h = make()
    h.add("low", prompt=list(range(300, 620)), max_tokens=2, program_id="low", service_s=250.0)
    assert step(h) == {"low": 64}
    h.add("high", prompt=list(range(700, 892)), max_tokens=2, program_id="high")
    assert [step(h) for _ in range(3)] == [{"high": 64}] * 3
    assert h.scheduler.requests["low"].num_computed_tokens == 64
    assert step(h) == {"high": 1, "low": 63}
    h.run()
    assert (h.accounts["low"]["wait_s"], h.accounts["low"]["preemptions"]) == (3.0, 0)
    assert h.accounts["low"]["service_s"] == 1.0 + 5.0 + 1.0
    assert h.accounts["high"]["wait_s"] == 0.0


def test_a_call_that_decodes_gets_its_token_before_prompts_of_better_rank(make: Make) -> None:
    """A prompt of Q1 does not stop the calls that decode; each needs one token only."""
    h = make()
    h.add("low", max_tokens=20, program_id="low", service_s=250.0)
    step(h)
    h.add("high", prompt=list(range(300, 620)), max_tokens=2, program_id="high")
    assert [step(h) for _ in range(4)] == [{"low": 1, "high": 63}] * 4


def test_a_prompt_that_gets_no_tokens_starves_as_a_waiting_call_does(make: Make) -> None:
    """Calls of Q1 keep coming and use up each step. After beta times its service the prompt goes to Q1 itself."""
    h = make(policy={"beta": 0.04, "bounds_s": [100.0, 200.0]}, slots=8)
    h.add("low", prompt=list(range(300, 500)), max_tokens=1, program_id="low", service_s=250.0)
    step(h)
    for number in range(12):
        h.add(f"q1-{number}", prompt=[*range(700, 763), number], max_tokens=1, program_id=f"p{number}")
        assert step(h) == {f"q1-{number}": 64}
    # After 11 steps 11 >= 0.04 * (250 + 1), and the prompt is in Q1, behind the call that had arrived before.
    h.add("q1-12", prompt=[*range(700, 763), 99], max_tokens=1, program_id="p12")
    assert step(h) == {"low": 64}
    h.run()
    assert h.accounts["low"]["preemptions"] == 0


def test_a_step_is_used_fully_while_prompts_are_left(make: Make) -> None:
    """The running prompt gets what the calls of better rank do not need."""
    h = make(slots=8, prefix_caching=True)
    h.add("long", prompt=list(range(100, 900)), max_tokens=2, program_id="long", service_s=250.0)
    step(h)
    for number in range(6):
        prompt = [*range(900, 900 + 16 * number), number]
        h.add(f"new-{number}", prompt=prompt, max_tokens=3, program_id=f"p{number}")
        assert sum(step(h).values()) == 64


def test_no_prompt_yields_for_a_call_that_vllm_turns_away(make: Make) -> None:
    """vLLM may not admit a call although there is room for it. From then on the call takes no tokens from others."""
    h = make()
    h.add("long", prompt=list(range(300, 940)), max_tokens=2, program_id="long", service_s=250.0)
    step(h)
    h.add("short", prompt=[1, 2, 3], max_tokens=4, program_id="short")
    h.scheduler._ec_transfer_pending = lambda request, _tokens: request.request_id == "short"
    assert [step(h) for _ in range(3)] == [{"long": 61}, {"long": 64}, {"long": 64}]
    h.add("other", prompt=[4, 5], max_tokens=4, program_id="other")
    assert step(h) == {"other": 2, "long": 62}
    del h.scheduler._ec_transfer_pending
    assert step(h) == {"other": 1, "short": 3, "long": 60}
    h.run()


def test_vllm_divides_the_step_itself_under_a_threshold(make: Make) -> None:
    """With `long_prefill_token_threshold` a running prompt is limited by vLLM, and by nothing else."""
    h = make(long_prefill_token_threshold=48)
    for name in ("long", "longer"):
        h.add(name, prompt=list(range(300, 700)), max_tokens=2, program_id=name, service_s=250.0)
    step(h)
    h.add("high", prompt=list(range(700, 800)), max_tokens=2, program_id="high")
    assert step(h) == {"long": 48, "longer": 16}
    h.run()
    assert h.accounts["high"]["preemptions"] == 0
