"""Generated workloads have the statistics of Autellix §6.1, and arrivals have the requested distribution."""

from __future__ import annotations

import itertools
import random
import statistics
from collections import Counter

import pytest

from weft.core.sim import SimulationError, TraceProgram
from weft.core.trace.format import dump, parse
from weft.core.trace.workloads import TOOL_TIMES_S, WORKLOADS, LongTail, bursty, generate, poisson, tool_time_s


def made(workload: str, programs: int, seed: int = 0) -> list[TraceProgram]:
    return generate(workload, programs, poisson(random.Random(seed), 1.0), random.Random(seed))


def prefill_tokens(program: TraceProgram) -> int:
    """The prompt tokens of a program's calls that its earlier calls do not have."""
    return sum(call.prompt_tokens - (call.shared_prefix_tokens if call.parents else 0) for call in program.calls)


@pytest.mark.parametrize(
    ("workload", "calls", "most", "decode", "prefill"),
    [("chat", 6.66, 80, 277, 256), ("tools", 10.75, 70, 34.14, 735.06), ("search", 159.7, None, 72.6, 467.2)],
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
    assert sum(prefill_tokens(program) for program in trace) / total == pytest.approx(prefill, rel=0.04)


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


@pytest.mark.parametrize("tool", TOOL_TIMES_S)
def test_tool_times_have_the_published_quantiles(tool: str) -> None:
    """SAGA's Table 1 gives three quantiles of each tool; the times grow between them and end at the last."""
    assert [tool_time_s(tool, part) for part in (0.5, 0.95, 0.99)] == pytest.approx(TOOL_TIMES_S[tool])
    times = [tool_time_s(tool, part / 1000) for part in range(1001)]
    assert times == sorted(times)
    assert times[-1] == pytest.approx(TOOL_TIMES_S[tool][2])


def test_ten_tenants_have_their_published_rates_and_steps() -> None:
    """Three heavy, four medium and three light tenants send programs of 100, 30 and 10 calls at rates of 16, 8, 4."""
    trace = made("tenants", 4000)
    counts = Counter(program.tenant for program in trace)
    assert len(counts) == 10
    for kind, steps, rate in (("heavy", 100, 16), ("medium", 30, 8), ("light", 10, 4)):
        of = [program for program in trace if program.name == kind]
        assert statistics.mean(len(program.calls) for program in of) == pytest.approx(steps, rel=0.04)
        tenants = {program.tenant for program in of}
        assert len(tenants) == (4 if kind == "medium" else 3)
        assert len(of) / len(tenants) == pytest.approx(4000 * rate / 92, rel=0.1)


def test_contexts_of_coding_agents_grow() -> None:
    """SWE-bench: 37 calls on average and at most 150, from 2,000 tokens to contexts that 131,072 tokens hold."""
    trace = made("swe", 1500)
    lengths = [len(program.calls) for program in trace]
    assert statistics.mean(lengths) == pytest.approx(37, rel=0.05)
    assert max(lengths) <= 150
    assert all(2000 <= program.calls[0].prompt_tokens <= 4000 for program in trace)
    ends = [program.calls[-1].prompt_tokens + program.calls[-1].output_tokens for program in trace]
    assert 100_000 < max(ends) <= 131_072
    assert 25_000 < statistics.mean(ends) < 45_000


def test_a_page_replaces_the_page_before() -> None:
    """WebArena: 18 calls on average; what a call shares with the one before ends where that one's page began."""
    trace = made("web", 1500)
    assert statistics.mean(len(program.calls) for program in trace) == pytest.approx(18, rel=0.05)
    prompts = [call.prompt_tokens for program in trace for call in program.calls]
    assert 4000 < statistics.mean(prompts) < 8000
    for program in trace:
        for before, call in itertools.pairwise(program.calls):
            assert call.shared_prefix_tokens <= before.prompt_tokens - 2500


def test_six_classes_are_intercepted() -> None:
    """Programs have 5.17 calls on average, and wait for a tool of their class, as long as Astraea says."""
    trace = made("intercepted", 6000)
    assert len({program.name for program in trace}) == 6
    assert statistics.mean(len(program.calls) for program in trace) == pytest.approx(5.17, rel=0.04)
    for kind, mean_s in (("arithmetic", 9e-5), ("chatbot", 28.6), ("image", 20.03)):
        gaps = [call.gap_s for program in trace if program.name == kind for call in program.calls if call.tool]
        assert statistics.mean(gaps) == pytest.approx(mean_s, rel=0.06)
    assert all((call.tool is None) == (not call.parents) for program in trace for call in program.calls)
