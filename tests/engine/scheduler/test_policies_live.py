"""What the policy contract promises, on vLLM's real scheduler without a model."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from reranking import Shuffled

from weft.core.errors import PolicyError

pytestmark = pytest.mark.engine

Make = Callable[..., Any]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Makes a harness; vLLM is imported only here."""
    from scheduler_harness import SchedulerHarness

    return lambda weft, **options: SchedulerHarness(tmp_path, dict(weft), **options)


@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize("swap_blocks", [0, 100])
@pytest.mark.parametrize("seed", range(3))
def test_random_ranks_lose_and_change_nothing(make: Make, seed: int, swap_blocks: int, in_flight: int) -> None:
    """Under a policy that re-ranks waiting and running calls at random, every call ends with its undisturbed tokens,
    the queues stay whole at each step, and the same seed gives the same schedule."""
    from scheduler_harness import expected_output

    def play() -> tuple[list[str], dict[str, Any]]:
        rng = random.Random(seed)
        with Shuffled.registered(seed=seed, share=0.2):
            h = make(
                {"name": "shuffled"},
                slots=3,
                blocks=40,
                in_flight=in_flight,
                prefix_caching=True,
                swap_blocks=swap_blocks,
            )
        prompts, counts = {}, {}
        for number in range(25):
            name = f"call-{number}"
            prompts[name] = [rng.randrange(50, 900) for _ in range(rng.randrange(1, 90))]
            counts[name] = rng.randrange(1, 30)
            h.add(name, prompt=prompts[name], max_tokens=counts[name], program_id=f"p{rng.randrange(5)}")
            for _ in range(rng.randrange(3)):
                h.step()  # checks integrity
            if rng.random() < 0.1:
                h.abort(name)
        h.run()
        aborted = set(prompts) - set(h.finished)
        for name in set(prompts) - aborted:
            assert h.tokens[name] == expected_output(prompts[name], counts[name]), name
        return h.finished, h.accounts

    first = play()
    assert first == play()
    assert any(account["preemptions"] for account in first[1].values()), "the ranks made a difference"


def test_a_policy_sees_cached_and_total_prompt_tokens(make: Make) -> None:
    """The whole prompt is known on arrival; what the prefix cache holds of it, once the call has started."""
    h = make({"name": "fcfs"}, slots=1, prefix_caching=True, batched_tokens=256)
    prompt = list(range(100, 180))
    h.add("first", prompt=prompt, max_tokens=2, program_id="a")
    h.run()
    h.add(
        "second",
        prompt=[*prompt, 7, 8, 9],
        max_tokens=3,
        program_id="a",
        program_name="agent",
        tenant="acme",
        fingerprint="f",
    )
    call = h.scheduler._entries["second"].call
    assert (call.prompt_tokens, call.cached_tokens) == (83, 0)
    assert (call.program.name, call.program.tenant, call.program.calls) == ("agent", "acme", 2)
    assert call.program.fingerprint == "f"
    h.step()
    assert call.cached_tokens == 80
    h.run()


def test_calls_of_an_earlier_program_go_first_under_priority(make: Make) -> None:
    """First come, first served by program: a later call of an early program overtakes the waiting calls of programs
    that came after it, and no running call. All of it is one queue."""
    h = make({"name": "priority"}, slots=1)
    h.add("a1", program_id="a", max_tokens=4)
    for name in ("b1", "c1", "b2"):
        h.add(name, program_id=name[0], max_tokens=4)
    h.step()
    h.add("a2", program_id="a", max_tokens=4)
    assert h.scheduler.weft_policy.levels == 1
    h.run()
    assert h.finished == ["a1", "a2", "b1", "b2", "c1"]
    assert not any(account["preemptions"] for account in h.accounts.values())


def test_the_latest_program_is_preempted_first_under_priority(make: Make) -> None:
    """When KV blocks run out, the call of the latest program waits again, also if it is the oldest of the calls."""
    h = make({"name": "priority"}, slots=3, blocks=8)
    h.add("a1", program_id="a", max_tokens=1)
    h.add("b1", prompt=list(range(100, 140)), program_id="b", max_tokens=60)
    h.step()
    h.add("a2", prompt=list(range(200, 240)), program_id="a", max_tokens=60)
    h.run()
    assert h.finished[0] == "a1"
    assert {name for name, account in h.accounts.items() if account["preemptions"]} == {"b1"}


def test_programs_behind_the_gate_open_in_order_of_arrival_under_priority(make: Make) -> None:
    """The gate holds back the latest program, while a new call of the first one passes."""
    h = make({"name": "priority", "gate": True}, slots=4, blocks=12, prefix_caching=True)
    for name in ("a1", "b1", "c1"):
        h.add(name, prompt=[ord(name[0])] * 80, program_id=name[0], max_tokens=8)
    h.step()
    assert [call.key for call in h.scheduler.weft_policy.held] == ["c1"]
    h.add("a2", prompt=[ord("a")] * 85, program_id="a", max_tokens=8)
    h.run()
    assert h.finished == ["a1", "a2", "b1", "c1"]


def test_the_end_of_a_program_reaches_the_scheduler(make: Make) -> None:
    """A control message makes the scheduler forget an idle program, and says how many it knew."""
    h = make({"name": "atlas"})
    h.add("a1", program_id="a", max_tokens=2)
    h.run()
    message = {"type": "programs_ended", "program_ids": ["a", "unknown"]}
    assert h.scheduler(message) == {"ended": 1}
    assert h.scheduler(message) == {"ended": 0}
    h.add("a2", program_id="a", max_tokens=1)
    assert h.scheduler._entries["a2"].call.service_s == 0.0, "the same id later is a new program"
    h.run()


def test_a_request_can_end_its_program(make: Make) -> None:
    """Over HTTP the last call of a program carries its end."""
    h = make({"name": "atlas"})
    h.add("a1", program_id="a", max_tokens=2, program_end=1)
    h.run()
    assert h.scheduler({"type": "programs_ended", "program_ids": ["a"]}) == {"ended": 0}


@pytest.mark.parametrize(
    ("message", "answer"),
    [
        (None, {}),
        (7, {}),
        ({}, {}),
        ({"type": "other"}, {}),
        ({"type": "programs_ended"}, {"ended": 0}),
        ({"type": "aborted_calls", "calls": 7}, {"aborted": []}),
    ],
)
def test_a_strange_message_changes_nothing(make: Make, message: object, answer: dict[str, Any]) -> None:
    """An exception here would be the client's, but a message of a newer Weft must not even raise one."""
    assert make({"name": "fcfs"}).scheduler(message) == answer


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"name": "srpt"}, "policy 'srpt' needs what only a simulation knows"),
        ({"name": "atlas", "betta": 3}, "policy 'atlas' has no parameter 'betta'"),
        ({"name": "fcfs", "beta": 3}, "policy 'fcfs' has no parameter 'beta'"),
    ],
)
def test_a_wrong_configuration_is_refused(make: Make, config: dict[str, Any], said: str) -> None:
    """What `--additional-config` holds is checked like any other configuration."""
    with pytest.raises(PolicyError, match=said):
        make(config)
