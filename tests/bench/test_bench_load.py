"""The programs of a round and their prompts: scaled, truncated, at a rate, with shared prefixes."""

from __future__ import annotations

from array import array
from pathlib import Path

import pytest
from bench_data import FORK, PROMPTS

from weft.bench.clock import STEP_S
from weft.bench.load import AS_RECORDED, CLOSED, Scaling, make_round, scale_programs
from weft.core.errors import BenchError
from weft.core.sim import TraceCall, TraceProgram
from weft.core.trace.format import write


def test_prompts_share_prefixes_as_the_trace_says() -> None:
    """A child's prompt begins with its first parent's prompt and output. The prompts of programs of one name begin
    alike. All other tokens differ."""
    child = PROMPTS.make(FORK, FORK.calls[1], list(range(13)))
    assert (child[:13], len(child)) == (list(range(13)), 14)
    root = TraceCall("a", (), output_tokens=1, prompt_tokens=30, shared_prefix_tokens=20)
    one = PROMPTS.make(TraceProgram("one", (root,), name="x"), root, [])
    other = PROMPTS.make(TraceProgram("other", (root,), name="x"), root, [])
    assert one[:20] == other[:20]
    assert one[20:] != other[20:]
    assert PROMPTS.make(TraceProgram("one", (root,), name="x"), root, []) == one
    assert PROMPTS.make(TraceProgram("one", (root,), name="y"), root, [])[:20] != one[:20]


def test_scaling_keeps_shared_prefixes() -> None:
    """All lengths and times become a tenth, but at least one token. A child that shares its parent's whole 165 tokens
    still shares the whole parent, which is 17 tokens now, although a tenth of 165 is 16."""
    calls = (
        TraceCall("a", (), output_tokens=36, prompt_tokens=129, shared_prefix_tokens=63),
        TraceCall("b", ("a",), output_tokens=2, prompt_tokens=168, shared_prefix_tokens=165, gap_s=100 * STEP_S),
        TraceCall("c", ("a",), output_tokens=2, prompt_tokens=164, shared_prefix_tokens=100),
    )
    (program,) = scale_programs([TraceProgram("p", calls, 1.0)], Scaling(0.1, 1000, whole_steps=True)).programs
    sizes = [(call.prompt_tokens, call.shared_prefix_tokens, call.output_tokens) for call in program.calls]
    assert sizes == [(13, 6, 4), (18, 17, 1), (16, 10, 1)]
    assert (program.calls[1].gap_s, program.arrival_s) == (10 * STEP_S, 13 * STEP_S)


def test_scaled_programs_share_what_their_prompts_share() -> None:
    """A simulator that read the hash ids of a recorded session would find what its scaled prompts do not share."""
    ids = array("q", range(8))
    calls = (TraceCall("a", (), 1, 128, hash_ids=ids), TraceCall("b", ("a",), 1, 512, hash_ids=ids))
    (program,) = scale_programs(
        [TraceProgram("p", calls, block_tokens=64)], Scaling(0.5, 999, whole_steps=True)
    ).programs
    assert program.block_tokens is None
    assert not any(call.hash_ids for call in program.calls)


def test_calls_that_do_not_fit_are_truncated_and_counted() -> None:
    """The prompt loses its end, and its shared prefix is at most the rest. A call that fits does not change."""
    calls = (
        TraceCall("a", (), output_tokens=20, prompt_tokens=60),
        TraceCall("b", ("a",), output_tokens=30, prompt_tokens=90, shared_prefix_tokens=80),
        TraceCall("c", (), output_tokens=500, prompt_tokens=5),
    )
    found = scale_programs([TraceProgram("p", calls)], Scaling(1.0, 100, whole_steps=False))
    sizes = [(call.prompt_tokens, call.shared_prefix_tokens, call.output_tokens) for call in found.programs[0].calls]
    assert (sizes, found.truncated_calls) == ([(60, 0, 20), (70, 70, 30), (1, 0, 99)], 2)


def test_a_round_has_the_same_programs_at_every_rate() -> None:
    """At twice the rate, programs arrive in half the time; in a closed batch, all at once. Another round has other
    programs."""
    scaling = Scaling(1.0, 10**6, whole_steps=False)
    slow, fast, at_once, other = (
        make_round("chat", load, number, scaling, programs=5, seed=0).programs
        for load, number in (("1", 0), ("2", 0), (CLOSED, 0), ("1", 1))
    )
    assert [program.calls for program in slow] == [program.calls for program in fast]
    assert [program.arrival_s for program in fast] == pytest.approx([program.arrival_s / 2 for program in slow])
    assert {program.arrival_s for program in at_once} == {0.0}
    assert slow[0].calls != other[0].calls


def test_rates_stretch_the_arrivals_of_a_file(tmp_path: Path) -> None:
    """Three programs in 4 s are 0.5 per second; at 1 per second they take 2 s. Programs that arrive at once have no
    rate."""
    path = tmp_path / "trace.jsonl"
    calls = (TraceCall("a", (), output_tokens=1),)
    write([TraceProgram(name, calls, at_s) for name, at_s in (("c", 7.0), ("a", 3.0), ("b", 4.0))], path)
    scaling = Scaling(1.0, 100, whole_steps=False)

    def arrivals(load: str) -> list[float]:
        return [program.arrival_s for program in make_round(str(path), load, 0, scaling, programs=9, seed=0).programs]

    assert (arrivals(AS_RECORDED), arrivals("1"), arrivals(CLOSED)) == ([0, 1, 4], [0, 0.5, 2], [0, 0, 0])
    write([TraceProgram(name, calls) for name in "ab"], path)
    with pytest.raises(BenchError, match="all arrive at once"):
        arrivals("1")
