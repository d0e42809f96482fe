"""Generated workloads have the statistics of Autellix §6.1, and arrivals have the requested distribution."""

from __future__ import annotations

import itertools
import random
import statistics

import pytest

from weft.core.sim import SimulationError, TraceProgram
from weft.core.trace.format import dump, parse
from weft.core.trace.workloads import WORKLOADS, LongTail, bursty, generate, poisson, prefill_tokens


def made(workload: str, programs: int, seed: int = 0) -> list[TraceProgram]:
    return generate(workload, programs, poisson(random.Random(seed), 1.0), random.Random(seed))


@pytest.mark.parametrize(
    ("workload", "calls", "most", "decode", "prefill"),
    [
        ("chat", 6.66, 80, 277, 256),
        ("tools", 10.75, 70, 34.14, 735.06),
        ("search", 159.7, None, 72.6, 467.2),
    ],
)
def test_the_published_statistics(workload: str, calls: float, most: int | None, decode: float, prefill: float) -> None:
    """Calls a program, and output and prefill tokens a call, are within 4 % of the paper's means."""
    trace = made(workload, 400 if workload == "search" else 4000)
    counts = [len(program.calls) for program in trace]
    assert statistics.mean(counts) == pytest.approx(calls, rel=0.04)
    if most is not None:
        assert 0.8 * most < max(counts) <= most
    total = sum(counts)
    decoded = sum(call.output_tokens for program in trace for call in program.calls)
    assert decoded / total == pytest.approx(decode, rel=0.04)
    assert sum(prefill_tokens(program.calls) for program in trace) / total == pytest.approx(prefill, rel=0.04)


def test_search_has_parallel_rounds() -> None:
    """After one call come rounds of five, each after the whole previous round; a prompt begins as its first parent."""
    for program in made("search", 20):
        first, *later = program.calls
        assert first.parents == ()
        before = {first.call_id}
        by_id = {call.call_id: call for call in program.calls}
        for index in range(0, len(later), 5):
            branches = later[index : index + 5]
            assert len(branches) == 5
            for call in branches:
                assert before <= set(call.parents) <= before | {first.call_id}
                node = by_id[call.parents[0]]
                assert call.shared_prefix_tokens == node.prompt_tokens + node.output_tokens < call.prompt_tokens
            before = {call.call_id for call in branches}


def test_conversations_grow() -> None:
    """A call of a chat or a tool loop has all earlier calls of the program in its prompt."""
    for program in (*made("chat", 20), *made("tools", 20)):
        for before, call in itertools.pairwise(program.calls):
            assert call.parents == (before.call_id,)
            assert call.shared_prefix_tokens == before.prompt_tokens + before.output_tokens


def test_mixed_draws_programs() -> None:
    """A third of the programs is of each kind."""
    names = [program.name for program in made("mixed", 900)]
    assert {name: pytest.approx(300, abs=60) for name in ("chat", "tools", "search")} == {
        name: names.count(name) for name in ("chat", "tools", "search")
    }


@pytest.mark.parametrize("workload", WORKLOADS)
def test_a_seed_makes_one_trace(workload: str) -> None:
    """The same seed makes the same trace, another seed makes another trace, and both are valid."""
    assert made(workload, 5) == made(workload, 5) != made(workload, 5, seed=1)
    assert [parse(dump(program), "here") for program in made(workload, 5)] == made(workload, 5)


@pytest.mark.parametrize(("arrivals", "variation"), [(poisson, 1.0), (bursty, 4.0)])
def test_arrivals(arrivals: type, variation: float) -> None:
    """Arrivals have the given rate; the standard deviation of the gaps is 1 or 4 times their mean."""
    times = list(itertools.islice(arrivals(random.Random(3), 2.0), 40_000))
    gaps = [b - a for a, b in itertools.pairwise(times)]
    assert times == sorted(times)
    assert statistics.mean(gaps) == pytest.approx(0.5, rel=0.1)
    assert statistics.stdev(gaps) / statistics.mean(gaps) == pytest.approx(variation, rel=0.1)


def test_a_long_tail() -> None:
    """The numbers are between 1 and the largest, with the requested mean, and more than half are below the mean."""
    tail, rng = LongTail(6.66, 80, 1.0), random.Random(1)
    drawn = [tail.draw(rng) for _ in range(20_000)]
    assert (min(drawn), max(drawn)) == (1, pytest.approx(78, abs=2))
    assert statistics.mean(drawn) == pytest.approx(6.66, rel=0.02)
    assert statistics.median(drawn) < 6


def test_invalid_arguments_are_refused() -> None:
    """The workload, the number of programs, the rate, the variation and the mean are checked."""
    for workload, programs in (("chess", 1), ("chat", 0)):
        with pytest.raises(SimulationError, match="at least one of chat, tools, search, mixed"):
            generate(workload, programs, poisson(random.Random(0), 1.0), random.Random(0))
    for rate, variation in ((0.0, 1.0), (1.0, 0.0), (float("inf"), 1.0)):
        with pytest.raises(SimulationError, match="give finite numbers above 0"):
            next(bursty(random.Random(0), rate, variation))
    with pytest.raises(SimulationError, match="must lie between"):
        LongTail(50.0, 80, 1.0)
