"""The replay of programs on a fake engine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from bench_data import FORK, PROMPTS, FakeEngine

from weft.bench.clock import STEP_S
from weft.bench.engines import lockstep
from weft.bench.replay import Replay
from weft.bench.results.records import Outcome
from weft.bench.rounds import unloaded_steps
from weft.bench.settings import BenchSettings
from weft.core.sim import TraceCall, TraceProgram
from weft.core.trace.format import path_tokens


def test_critical_path_and_unloaded_steps() -> None:
    """The longest chain of the fork has 8 output tokens, and takes 10 steps with its tool."""
    assert path_tokens(FORK.calls) == 8
    assert unloaded_steps(BenchSettings("chat"), [FORK]) == {"fork": 10}


def test_a_replay_sends_calls_when_they_are_due() -> None:
    """The fork arrives at step 4. Its first call takes 3 steps; the second call follows at once, the third after two
    steps, and the last when both have ended."""
    engine = FakeEngine()
    programs = [replace(FORK, arrival_s=4 * STEP_S)]
    replay = Replay(engine, programs, {"fork": 10}, PROMPTS)
    counts = list(replay.steps())
    assert replay.outcomes == [Outcome("fork", "fork", 10, 5.0, 10, 8, 10)]
    assert [call.request_id for call in engine.sent] == ["0-a", "0-b", "0-c", "0-d"]
    assert (engine.clock.steps, counts[-1]) == (4 + 10, 1)


def test_latency_in_seconds_begins_when_the_program_was_due() -> None:
    """A program that is due during a step waits for the step's end, and this wait is part of its latency."""
    engine = FakeEngine(counts_steps=False)
    calls = (TraceCall("a", (), output_tokens=2, prompt_tokens=1),)
    programs = [TraceProgram("first", calls, 0.0), TraceProgram("second", calls, 0.2)]
    replay = Replay(engine, programs, {"first": 2, "second": 2}, PROMPTS)
    assert list(replay.steps())
    assert [(each.program, each.steps, each.seconds) for each in replay.outcomes] == [
        ("first", 2, 1.0),
        ("second", 2, 1.3),
    ]


def test_arrival_ranks_are_the_order_of_arrival() -> None:
    """All calls of a program have its rank, which does not depend on its position in the file."""
    engine = FakeEngine()
    programs = [replace(FORK, program="late", arrival_s=2 * STEP_S), replace(FORK, program="early")]
    list(Replay(engine, programs, {"late": 9, "early": 9}, PROMPTS).steps())
    assert {(call.request_id[0], call.arrival_rank) for call in engine.sent} == {("1", 0), ("0", 1)}


def test_lockstep_alternates_between_replays() -> None:
    """Each replay makes one step, then each the next, until all have ended. Every program that ends is reported."""
    steps = []

    def replay(name: str, counts: list[int]) -> Iterator[int]:
        for count in counts:
            steps.append(name)
            yield count

    assert len(list(lockstep([replay("a", [0, 1, 3]), replay("b", [2])]))) == 3 + 2
    assert steps == ["a", "b", "a", "a"]
