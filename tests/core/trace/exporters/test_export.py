"""Exports that are imported again: what a format can say comes back."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.core.errors import TraceError
from weft.core.trace.exporters import EXPORTERS, NotExported
from weft.core.trace.format import Measured, TraceCall, TraceProgram, ordered, write
from weft.core.trace.importers import TraceImport
from weft.core.trace.prefixes import block_hashes, with_block_hashes

Weft = Callable[..., tuple[int, str, str]]
BLOCK = 4


def exported(name: str, programs: Sequence[TraceProgram]) -> tuple[list[TraceProgram], NotExported]:
    """The programs after an export and an import."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        left = EXPORTERS[name](programs, out)
        return list(TraceImport([out])), left


def timed(calls: Sequence[TraceCall], durations_s: Sequence[float]) -> list[TraceCall]:
    """The calls with the times at which they are made if they take so long."""
    ends_s: dict[str, float] = {}
    found = []
    for call, duration_s in zip(calls, durations_s, strict=False):
        at_s = max((ends_s[parent] for parent in call.parents), default=0.0) + call.gap_s
        ends_s[call.call_id] = at_s + duration_s
        found.append(replace(call, at_s=round(at_s, 6)))
    return found


gaps = st.integers(0, 8000).map(lambda ms: ms / 1000)


@st.composite
def finished(draw: st.DrawFn, calls: list[TraceCall]) -> TraceProgram:
    """A program of these calls: with times or without, with ids of blocks or with lengths of prefixes. No two prompts
    have the same length, so that calls can be told apart."""
    calls = [
        replace(call, prompt_tokens=32 * draw(st.integers(0, 6)) + number, output_tokens=draw(st.integers(1, 30)))
        for number, call in enumerate(calls)
    ]
    if draw(st.booleans()):
        calls = timed(calls, [draw(gaps) + 0.001 for _ in calls])
    program = TraceProgram("p:1", tuple(calls), arrival_s=draw(gaps))
    lengths = {call.call_id: (call.prompt_tokens, call.output_tokens) for call in calls}
    if draw(st.booleans()):
        shared = {
            call.call_id: draw(st.integers(0, min(call.prompt_tokens, sum(lengths[call.parents[0]]))))
            if call.parents
            else 0
            for call in calls
        }
        return replace(program, calls=tuple(replace(call, shared_prefix_tokens=shared[call.call_id]) for call in calls))
    chains: dict[str, list[int]] = {}
    for number, call in enumerate(calls):
        blocks = call.prompt_tokens // BLOCK
        before = chains[call.parents[0]] if call.parents else []
        kept = draw(st.integers(0, min(len(before), blocks)))
        chains[call.call_id] = before[:kept] + [10_000 * number + each for each in range(blocks - kept)]
    return with_block_hashes(program, chains, BLOCK)


@st.composite
def graphs(draw: st.DrawFn) -> TraceProgram:
    """Any program. Its first call is one of the program itself, and is made first."""
    calls = [TraceCall("c0", (), 1, gap_s=draw(gaps))]
    for number in range(1, draw(st.integers(1, 9))):
        parents = draw(st.lists(st.sampled_from([call.call_id for call in calls]), max_size=3, unique=True))
        agent = draw(st.sampled_from([None, "a", "b"]))
        gap_s = draw(gaps) + (0 if parents else calls[0].gap_s)
        calls.append(TraceCall(f"c{number}", tuple(parents), 1, gap_s=gap_s, agent=agent))
    return draw(finished(calls))


@st.composite
def sessions(draw: st.DrawFn) -> TraceProgram:
    """A chain with sub-agents, some of which the next call waits for."""
    calls: list[TraceCall] = []

    def add(*parents: str, agent: str | None = None) -> str:
        tool = draw(st.sampled_from(["human", "tool"])) if parents and agent is None else None
        call = TraceCall(f"x{len(calls)}", parents, 1, gap_s=draw(gaps) if parents else 0.0, agent=agent, tool=tool)
        calls.append(call)
        return call.call_id

    before = add()
    for _ in range(draw(st.integers(0, 3))):
        joined = [before]
        for agent in draw(st.lists(st.sampled_from(["a", "b"]), max_size=2)):
            last = add(before, agent=agent)
            for _ in range(draw(st.integers(0, 2))):
                last = add(last, agent=agent)
            joined += [last] * draw(st.booleans())
        before = add(*joined)
    return draw(finished(calls))


def blocks_of(program: TraceProgram, block_tokens: int) -> dict[int, list[int]]:
    """The blocks of prompts by the prompts' lengths, numbered in the order of the calls' lengths."""
    if program.block_tokens is None:
        return {}
    chains, numbers = block_hashes(program), dict[int, int]()
    prompts = sorted(program.calls, key=lambda call: call.prompt_tokens)
    return {
        call.prompt_tokens: [
            numbers.setdefault(each, len(numbers))
            for each in chains[call.call_id][: call.prompt_tokens // block_tokens]
        ]
        for call in prompts
    }


def said(program: TraceProgram) -> dict[int, Any]:
    """What of the calls both formats can say, by the lengths of their prompts."""
    lengths = {call.call_id: call.prompt_tokens for call in program.calls}
    return {
        call.prompt_tokens: (
            call.output_tokens,
            {lengths[each] for each in call.parents},
            call.agent,
            approx(call.gap_s),
        )
        for call in program.calls
    }


def approx(seconds: float | None) -> Any:
    return None if seconds is None else pytest.approx(seconds, abs=1e-5)


def rounded(program: TraceProgram) -> TraceProgram:
    """The same program without what floats lose."""
    calls = (
        replace(call, gap_s=round(call.gap_s, 4), at_s=None if call.at_s is None else round(call.at_s, 4))
        for call in program.calls
    )
    return replace(program, calls=tuple(calls), arrival_s=round(program.arrival_s, 4))


@given(graphs())
def test_any_program_comes_back_from_agentic_mooncake(program: TraceProgram) -> None:
    """With its calls, their parents, gaps, sub-agents and blocks. The first call is the program's arrival."""
    ((found,), left) = exported("agentic-mooncake", [program])
    assert left.programs == []
    first = program.calls[0]
    assert found.program == program.program
    assert found.arrival_s == approx(program.arrival_s + (first.gap_s if first.at_s is None else first.at_s))
    expected = replace(
        program,
        calls=tuple(call if call.parents else replace(call, gap_s=call.gap_s - first.gap_s) for call in program.calls),
    )
    assert said(found) == said(expected)
    assert {call.call_id for call in found.calls} == {call.call_id for call in program.calls}
    if program.block_tokens is not None:
        assert blocks_of(found, BLOCK) == blocks_of(program, BLOCK)
    begins = {call.call_id: call.at_s for call in found.calls}
    for call in program.calls[1:]:
        if call.at_s:
            assert begins[call.call_id] == approx(call.at_s - (first.at_s or 0.0)) or begins[call.call_id] is None


@given(graphs())
def test_what_came_from_agentic_mooncake_stays_as_it_is(program: TraceProgram) -> None:
    """A second export and import changes nothing."""
    (once, _) = exported("agentic-mooncake", [program])
    (twice, _) = exported("agentic-mooncake", once)
    assert list(map(rounded, once)) == list(map(rounded, twice))


@given(sessions())
def test_a_chain_with_sub_agents_comes_back_from_weka(program: TraceProgram) -> None:
    """With its calls, their parents, gaps, sub-agents and blocks. Arrivals and ids of calls do not."""
    ((found,), left) = exported("weka", [program])
    assert left.programs == []
    assert said(found) == said(program)
    if program.block_tokens is not None:
        assert blocks_of(found, BLOCK) == blocks_of(program, BLOCK)
    if program.calls[0].at_s is not None:
        times = {call.prompt_tokens: approx(call.at_s) for call in program.calls}
        assert {call.prompt_tokens: call.at_s for call in found.calls} == times
    tools = {call.prompt_tokens: call.tool for call in program.calls if call.agent is None}
    assert {call.prompt_tokens: call.tool for call in found.calls if call.agent is None} == tools


@given(sessions())
def test_what_came_from_weka_stays_as_it_is(program: TraceProgram) -> None:
    """A second export and import changes nothing, in either format."""
    (once, _) = exported("weka", [program])
    for name in EXPORTERS:
        (twice, _) = exported(name, once)
        assert said(twice[0]) == said(once[0])
    (twice, _) = exported("weka", once)
    assert list(map(rounded, once)) == list(map(rounded, twice))


@given(st.lists(graphs(), min_size=1, max_size=3))
def test_weka_says_a_program_or_why_not(programs: list[TraceProgram]) -> None:
    """Nothing is written that is not what the program was."""
    programs = [replace(program, program=f"p{number}") for number, program in enumerate(programs)]
    chain = TraceProgram("chain", (TraceCall("c0", (), 1, 3),))
    found, left = exported("weka", [chain, *programs])
    assert found.pop(0).program == "chain"
    assert len(found) + len(left.programs) == len(programs)
    by_id = {program.program: program for program in programs}
    for program in found:
        parents = {prompt: row[1] for prompt, row in said(by_id[program.program]).items()}
        assert {prompt: row[1] for prompt, row in said(program).items()} == parents


CALLS = (
    TraceCall("a", (), 3, 130, tool=None, prompt="text"),
    TraceCall("b", ("a",), 3, 140, gap_s=1.0, tool="search", shared_prefix_tokens=130, agent="Explore"),
    TraceCall("c", ("a", "b"), 3, 150, gap_s=2.0, tool="human", shared_prefix_tokens=133),
)
PROGRAM = TraceProgram("p", CALLS, 5.0, name="agent", tenant="acme", deadline_s=9.0, end_known=False)


@pytest.mark.parametrize("name", EXPORTERS)
def test_what_a_format_cannot_say_is_told(name: str) -> None:
    """With how often it was there."""
    _, left = exported(name, [PROGRAM, replace(PROGRAM, program="q")])
    lost = {"names of programs": 2, "tenants": 2, "deadlines": 2, "unknown ends": 2, "texts of prompts": 2}
    lost |= {"tools": 4} if name == "agentic-mooncake" else {"arrivals": 2, "names of tools": 2}
    assert {what: number for what, number in left.lost.items() if number} == lost


@pytest.mark.parametrize(
    ("calls", "why"),
    [
        (
            (CALLS[0], replace(CALLS[2], parents=())),
            "call 'c' begins after nothing and not after one of the main agent",
        ),
        ((replace(CALLS[0], agent="Plan"),), "call 'a' is of the sub-agent 'Plan' and begins the program"),
        ((*CALLS[:2], replace(CALLS[1], call_id="d", parents=("b",), agent="Plan")), "call 'd' begins after 'b'"),
        ((*CALLS[:2], TraceCall("d", ("a",), 1), replace(CALLS[2], parents=("d", "b"))), "call 'c' waits for 'd, b'"),
    ],
)
def test_a_program_that_weka_cannot_say_is_left_out(calls: tuple[TraceCall, ...], why: str) -> None:
    """The first one is told with the reason. If none is left, that is an error."""
    strange = replace(PROGRAM, program="strange", calls=calls)
    found, left = exported("weka", [PROGRAM, strange])
    assert [program.program for program in found] == ["p"]
    assert why in left.programs[0]
    with pytest.raises(TraceError, match=r"no program can be said in this format\. Program 'strange': call"):
        exported("weka", [strange])


def test_a_recording_has_the_times_that_an_engine_measured() -> None:
    """A call takes as long as it took."""
    calls = [
        replace(call, measured=Measured("0", 10.0 * number, 10.0 * number + 4)) for number, call in enumerate(CALLS)
    ]
    ((found,), _) = exported("weka", [replace(PROGRAM, calls=tuple(calls))])
    assert [(call.at_s, call.gap_s) for call in found.calls] == [(0.0, 0.0), (10.0, 6.0), (20.0, 6.0)]
    ((found,), _) = exported("agentic-mooncake", [replace(PROGRAM, calls=tuple(calls))])
    assert [(call.at_s, call.gap_s) for call in found.calls] == [(0.0, 0.0), (10.0, 1.0), (20.0, 2.0)]


def test_the_rows_are_what_dynamo_reads(tmp_path: Path) -> None:
    """One header, one request that begins a play, an id for each begun block, and ids of requests that are unique."""
    calls = (*CALLS, TraceCall("d", (), 2, 64, gap_s=3.0))
    out = tmp_path / "out.jsonl"
    EXPORTERS["agentic-mooncake"]([PROGRAM, replace(PROGRAM, program="q", calls=calls)], out)
    header, *rows = map(json.loads, out.read_text().splitlines())
    assert header | {"source": None} == {
        "schema": "dynamo.agentic_mooncake", "version": 2, "block_size": 64, "hash_id_scope": "local", "source": None,
    }  # fmt: skip
    assert len(header["source"]["digest"]) == 64
    assert len({row["request_id"] for row in rows}) == 7
    assert [row["request_id"] for row in rows if not row["dependencies"]] == ["p:a", "q:a"]
    assert all(len(row["hash_ids"]) == -(-row["input_length"] // 64) for row in rows)
    dependencies = {row["request_id"]: [tuple(each.values()) for each in row["dependencies"]] for row in rows[3:]}
    assert dependencies == {
        "q:a": [],
        "q:b": [("q:a", "completion", 1000.0, "spawn")],
        "q:c": [("q:a", "completion", 2000.0, "sequence"), ("q:b", "completion", 2000.0, "join")],
        "q:d": [("q:a", "dispatch", 3000.0, "spawn")],
    }
    assert {row["request_id"]: row["session_id"] for row in rows[3:]} == {
        "q:a": "q", "q:b": "q:Explore#1", "q:c": "q", "q:d": "q:#2",
    }  # fmt: skip


def test_blocks_of_several_sizes_are_refused(tmp_path: Path) -> None:
    """Rows have one header for all. A Weka session has its own size."""
    programs = [replace(PROGRAM, program=f"p{size}", calls=CALLS[:1], block_tokens=size) for size in (16, 64)]
    with pytest.raises(TraceError, match="the programs have blocks of 16 and 64 tokens"):
        EXPORTERS["agentic-mooncake"](programs, tmp_path / "out.jsonl")
    assert {program.block_tokens for program in exported("weka", programs)[0]} == {16, 64}


# -- the command


def test_the_command_says_what_is_lost(weft: Weft, tmp_path: Path) -> None:
    """And which programs are left out."""
    strange = replace(PROGRAM, program="strange", calls=(CALLS[0], replace(CALLS[2], parents=())))
    write([PROGRAM, strange], tmp_path / "trace.jsonl")
    out = tmp_path / "out"
    code, printed, err = weft("trace", "export", tmp_path / "trace.jsonl", "--format", "weka", "--out", out)
    assert (code, err) == (0, "")
    first, lost, left_out = printed.splitlines()
    assert first == f"{out}: 1 program"
    assert lost.startswith("lost, because weka cannot say it: names of programs (1), tenants (1)")
    assert left_out.startswith("left out: 1 program; the first one: Program 'strange': call 'c' begins after nothing")
    assert [path.name for path in out.iterdir()] == ["00000-p.json"]


@pytest.mark.parametrize("name", EXPORTERS)
def test_an_export_that_fails_writes_nothing(name: str, weft: Weft, tmp_path: Path) -> None:
    """What was there stays, and no other file is left."""
    write([PROGRAM], tmp_path / "trace.jsonl")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "old").write_text("old")
    code, printed, err = weft("trace", "export", tmp_path / "trace.jsonl", "--format", name, "--out", tmp_path / "full")
    assert (code, printed, err.count("\n")) == (1, "", 1)
    code, _, err = weft(
        "trace", "export", tmp_path / "trace.jsonl", "--format", name, "--out", tmp_path / "none" / "out"
    )
    assert (code, err.count("\n")) == (1, 1)
    assert "cannot be written" in err
    assert {path.name for path in tmp_path.iterdir()} == {"full", "trace.jsonl"}
    assert (tmp_path / "full" / "old").read_text() == "old"


def test_calls_of_any_order_are_put_after_their_parents() -> None:
    """A trace may have them in any order."""
    assert [call.call_id for call in ordered(reversed(CALLS), "here")] == ["a", "b", "c"]
    found, _ = exported("weka", [replace(PROGRAM, calls=CALLS[::-1])])
    assert said(found[0]) == said(PROGRAM)
