"""Copies beside steps, on vLLM's real scheduler and KV cache manager, without a model: who waits for them, and who not.

The worker writes and reads when a test lets it, so a block that is used too soon changes the output.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from host_programs import Make, call, end, harness, prompt_of, start_tool

from weft.core.ids import CallId, ProgramId
from weft.engine.wire.control import TakeBack, encode_control

pytestmark = pytest.mark.engine

NEXT = [*prompt_of(1, 64), 7, 8, 9]  # the prompt of the program's next call


class Pace:
    """In place of a random generator: copies beside steps stand still until `goes` is set."""

    def __init__(self) -> None:
        self.goes = False

    def random(self) -> float:
        return 0.0 if self.goes else 1.0


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Makes a harness whose copies beside steps take time; vLLM is imported only when it is called."""
    return partial(harness, tmp_path, beside=0)


def spilled(make: Make, **options: Any) -> tuple[Any, Pace]:
    """A harness in which only host memory has the context of program "a", 64 tokens, whose tool runs."""
    h = make(blocks=16, **options)
    call(h, "a1", prompt_of(1, 64), "a")
    start_tool(h, "a", "search")
    call(h, "b1", prompt_of(2, 230), "b", max_tokens=1)
    end(h, "b")
    h.settle()
    reset_device(h)
    h.worker.copies_beside = pace = Pace()
    return h, pace


def begin(make: Make, **options: Any) -> tuple[Any, Pace]:
    """A harness in which call "b2" runs, and call "a2" has come, whose context of 64 tokens only host memory has."""
    h, pace = spilled(make, **options)
    h.add("b2", prompt=prompt_of(3, 20), max_tokens=40, program_id="c", program_name="c")
    h.step()
    h.add("a2", prompt=NEXT, max_tokens=3, program_id="a", program_name="a", call_id="a2")
    h.step()
    return h, pace


def reset_device(h: Any) -> None:
    """Have the device forget what it holds, but not host memory."""
    pool = h.scheduler.kv_cache_manager.block_pool
    pool.evict_blocks({block.block_id for block in pool.blocks if block.block_hash is not None})


def running(h: Any) -> set[str]:
    return {request.request_id for request in h.scheduler.running}


def contexts_on_host(h: Any) -> list[Any]:
    return list(h.scheduler._swap.tier.tree.contexts())


def finish(h: Any, pace: Pace, *, ends: int) -> None:
    """Let copies go on, and check the tokens of `b2`, and that nothing is left that an open program needs."""
    from scheduler_harness import expected_output

    pace.goes = True
    h.run()
    h.settle()
    assert len(h.finished) == 2 + ends
    assert h.tokens["b2"] == expected_output(prompt_of(3, 20), 40)
    end(h, "a", "c")
    h.settle()
    pool = h.scheduler.kv_cache_manager.block_pool
    assert pool.get_num_free_blocks() == len(pool.blocks) - 1
    assert not any(context.is_needed for context in contexts_on_host(h))


@pytest.mark.parametrize("in_flight", [1, 2])
def test_a_call_whose_context_is_copied_back_waits_and_others_run(make: Make, in_flight: int) -> None:
    """The other call gets a token in each step meanwhile. Then the call starts, and computes none of its context."""
    from scheduler_harness import expected_output

    h, pace = begin(make, in_flight=in_flight)
    for _ in range(5):
        assert h.step() == {"b2"}
    pace.goes = True
    for _ in range(in_flight + 2):  # the copy ends beside the first of them, and its report comes with the next one
        h.step()
    assert running(h) == {"a2", "b2"}
    finish(h, pace, ends=2)
    assert h.tokens["a2"] == expected_output(NEXT, 3)
    assert h.accounts["a2"]["recomputed_tokens"] == 0


def test_with_nothing_to_compute_meanwhile_the_step_waits(make: Make) -> None:
    """No call runs, so the call starts at once, and its step makes the copy."""
    h = make(blocks=16)
    call(h, "a1", prompt_of(1, 64), "a")
    start_tool(h, "a", "search")
    call(h, "b1", prompt_of(2, 230), "b")
    end(h, "b")
    h.settle()
    reset_device(h)
    h.worker.copies_beside = Pace()
    h.add("a2", prompt=NEXT, max_tokens=3, program_id="a", program_name="a")
    assert h.step() == {"a2"}


def test_a_call_that_waits_for_its_context_has_its_slot(make: Make) -> None:
    """Of two slots one is taken and one is kept for it, so that a third call does not start before it."""
    h, pace = begin(make, slots=2)
    h.add("late", prompt=prompt_of(9, 10), max_tokens=3, program_id="late", program_name="late")
    for _ in range(3):
        assert h.step() == {"b2"}
    pace.goes = True
    h.run()
    assert h.finished.index("a2") < h.finished.index("late")


def leave(h: Any) -> None:
    h.abort("a2")


def take_back(h: Any) -> None:
    answer = h.scheduler(encode_control(TakeBack(((ProgramId("a"), CallId("a2")),), 1, 10**6)))
    assert answer["taken"] == [["a", "a2"]]


@pytest.mark.parametrize("leaves", [leave, take_back])
def test_a_call_may_leave_while_it_waits(make: Make, leaves: Callable[[Any], None]) -> None:
    """The blocks stay taken until the copy has ended, because it writes them, and are free then."""
    h, pace = begin(make)
    blocks = h.worker.fetching
    assert blocks
    leaves(h)
    h.step()
    pool = h.scheduler.kv_cache_manager.block_pool
    assert all(pool.blocks[block].ref_cnt for block in blocks)
    finish(h, pace, ends=1)


def test_a_reset_does_not_wait_for_a_copy_but_the_next_step_does(make: Make) -> None:
    """The blocks are free at once, as a reset needs it. Before a step can write to them, the copy is done."""
    from scheduler_harness import expected_output

    h, pace = begin(make)
    blocks = h.worker.fetching
    assert blocks
    h.drain()
    assert h.scheduler.reset_prefix_cache(reset_running_requests=True)
    h.step()
    assert not set(blocks) & set(h.worker.fetching)
    finish(h, pace, ends=2)
    assert h.tokens["a2"] == expected_output(NEXT, 3)


def test_a_copy_that_fails_is_computed_again(make: Make) -> None:
    """The call starts when the copy has ended, and finds nothing of what did not arrive."""
    from scheduler_harness import expected_output

    h, pace = begin(make)
    h.worker.fails = lambda: True
    pace.goes = True
    h.step()
    h.worker.fails = lambda: False
    finish(h, pace, ends=2)
    assert h.tokens["a2"] == expected_output(NEXT, 3)
    assert h.accounts["a2"]["recomputed_tokens"] > 0


def test_what_an_ended_program_has_left_serves_another(make: Make) -> None:
    """It is copied out when nothing else is, so the same prompt finds it though the device has lost it."""
    h = make(blocks=16)
    call(h, "a1", prompt_of(1, 64), "a")
    end(h, "a")
    call(h, "b1", prompt_of(2, 20), "b", max_tokens=4)
    h.settle()
    reset_device(h)
    assert [context.program.program_id for context in contexts_on_host(h)] == ["a"]
    assert call(h, "c1", NEXT, "c") == 64


def test_a_call_that_others_force_out_is_copied_back_beside_them(make: Make) -> None:
    """Of a preempted call the full blocks come so, and the step that it starts with copies the rest of the last one."""
    from scheduler_harness import expected_output

    h = make(blocks=24)
    h.worker.copies_beside = pace = Pace()
    for name in ("x", "y"):
        h.add(name, prompt=prompt_of(len(name) + ord(name), 40), max_tokens=30, program_id=name, program_name=name)
    for _ in range(6):
        h.step()
    request = next(each for each in h.scheduler.running if each.request_id == "y")
    h.scheduler.force_out(request)
    reset_device_of(h, request)
    h.step()
    for _ in range(3):
        assert h.step() == {"x"}
    pace.goes = True
    h.run()
    for name in ("x", "y"):
        assert h.tokens[name] == expected_output(prompt_of(len(name) + ord(name), 40), 30)
    assert h.accounts["y"]["swapped_tokens"] == 45
    assert h.accounts["y"]["recomputed_tokens"] == 0


def reset_device_of(h: Any, request: Any) -> None:
    """Have vLLM forget the blocks of a request that waits."""
    pool = h.scheduler.kv_cache_manager.block_pool
    found = [pool.get_cached_block(key, [0]) for key in request.block_hashes]
    pool.evict_blocks({block.block_id for blocks in found if blocks for block in blocks})


def test_a_prompt_is_copied_out_while_its_call_runs(make: Make) -> None:
    """So hardly anything is left to copy when the call ends. The context that it leaves takes over these blocks."""
    h = make(blocks=16)
    h.worker.copies_beside = pace = Pace()
    pace.goes = True
    h.add("long", prompt=prompt_of(1, 200), max_tokens=20, program_id="a", program_name="a")
    for _ in range(6):
        h.step()
    assert running(h) == {"long"}
    assert h.scheduler._swap.ready(h.scheduler.requests["long"].block_hashes) == 200 // 16
    h.run()
    h.settle()
    (context,) = contexts_on_host(h)
    assert (context.program.program_id, context.host_tokens) == ("a", 208)
    end(h, "a")
    h.settle()
    assert not any(context.is_needed for context in contexts_on_host(h))


def test_a_prompt_takes_no_room_from_what_a_program_may_need(make: Make) -> None:
    """Host memory has room for the context of one program, whose tool runs. The prompt of a running call stays out."""
    h, pace = spilled(make, swap_blocks=5)
    pace.goes = True
    h.add("long", prompt=prompt_of(3, 100), max_tokens=20, program_id="c", program_name="c")
    for _ in range(6):
        h.step()
    assert running(h) == {"long"}
    assert {context.program.program_id: context.host_tokens for context in contexts_on_host(h)}["a"] == 64
    assert h.scheduler._swap.ready(h.scheduler.requests["long"].block_hashes) <= 1
