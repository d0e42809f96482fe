"""Programs whose calls share prefixes by the hashes of their blocks."""

from __future__ import annotations

import json
from array import array
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.core.errors import TraceError
from weft.core.trace.format import TraceCall, TraceProgram, dump, parse
from weft.core.trace.prefixes import block_hashes, with_block_hashes

BLOCK = 4


@st.composite
def programs_with_chains(draw: st.DrawFn) -> tuple[TraceProgram, dict[str, list[int]]]:
    """A program, and for each of its calls the ids of the whole blocks of its prompt.

    An id is one of a node in a tree, so equal ids mean equal prefixes. A prompt follows any earlier path in the tree.
    """
    paths: list[list[int]] = [[]]
    count = 0
    calls: list[TraceCall] = []
    chains: dict[str, list[int]] = {}
    for number in range(draw(st.integers(1, 6))):
        path = draw(st.sampled_from(paths))
        path = path[: draw(st.integers(0, len(path)))]
        new = draw(st.integers(0, 4))
        path = [*path, *range(count, count + new)]
        count += new
        paths.append(path)
        parents = draw(st.sets(st.sampled_from([call.call_id for call in calls]), max_size=2)) if calls else set()
        prompt_tokens = len(path) * BLOCK + draw(st.integers(0, BLOCK - 1))
        call = TraceCall(f"c{number}", tuple(sorted(parents)), draw(st.integers(1, 12)), prompt_tokens)
        calls.append(call)
        chains[call.call_id] = path
    return TraceProgram("A", tuple(calls)), chains


@given(programs_with_chains())
def test_the_ids_of_every_prompt_are_kept(case: tuple[TraceProgram, dict[str, list[int]]]) -> None:
    """The ids of a call begin with those of its prompt, and go no further than its output. A file keeps them."""
    program, chains = case
    program = with_block_hashes(program, chains, BLOCK)
    found = block_hashes(program)
    for call in program.calls:
        assert found[call.call_id][: len(chains[call.call_id])].tolist() == chains[call.call_id]
        assert len(found[call.call_id]) * BLOCK <= call.prompt_tokens + call.output_tokens
    assert parse(dump(program), "here") == program


def test_an_output_has_the_blocks_that_the_next_prompt_repeats() -> None:
    """The second prompt has the first one, its output, and a block of its own."""
    calls = (TraceCall("a", (), 9, 8), TraceCall("b", ("a",), 1, 21))
    program = with_block_hashes(TraceProgram("A", calls), {"a": [1, 2], "b": [1, 2, 3, 4, 5]}, BLOCK)
    first, second = program.calls
    assert first.hash_ids.tolist() == [1, 2, 3, 4]
    assert (second.shared_prefix_tokens, second.hash_ids.tolist()) == (16, [5])


def test_a_prompt_that_was_cut_does_not_repeat_the_output() -> None:
    """The second prompt differs in the first one's second block, so nothing is known of the first one's output."""
    calls = (TraceCall("a", (), 9, 8), TraceCall("b", ("a",), 1, 21))
    program = with_block_hashes(TraceProgram("A", calls), {"a": [1, 2], "b": [1, 7, 3, 4, 5]}, BLOCK)
    first, second = program.calls
    assert first.hash_ids.tolist() == [1, 2]
    assert (second.shared_prefix_tokens, second.hash_ids.tolist()) == (4, [7, 3, 4, 5])


def test_a_fingerprint_is_the_first_block() -> None:
    """Programs whose prompts begin with the same block have the same fingerprint."""
    call = TraceCall("a", (), 1, 8, hash_ids=array("q", [7, 8]))
    assert TraceProgram("A", (call,), block_tokens=BLOCK).fingerprint == "block 7"


@pytest.mark.parametrize(
    ("program", "call", "message"),
    [
        ({}, {"hash_ids": [1]}, "block_tokens"),
        ({"block_tokens": 0}, {}, "block_tokens is 0"),
        ({"block_tokens": 4}, {"hash_ids": [-1]}, "whole numbers from 0"),
        ({"block_tokens": 4}, {"hash_ids": [2**63]}, "whole numbers from 0"),
        ({"block_tokens": 4}, {"hash_ids": [True]}, "whole numbers from 0"),
        ({"block_tokens": 4}, {"hash_ids": "1"}, "whole numbers from 0"),
        ({"block_tokens": 4}, {"hash_ids": [1, 2, 3]}, "prompt and output have only 2"),
        ({"block_tokens": 4}, {"shared_prefix_tokens": 4}, "shares by its hash_ids"),
        ({"end_known": "no"}, {}, "give true or false"),
        ({}, {"at_s": -1}, "at_s is -1"),
        ({}, {"agent": 5}, "agent"),
    ],
)
def test_what_does_not_fit_is_refused(program: dict[str, Any], call: dict[str, Any], message: str) -> None:
    """The error names the line and the key."""
    row = {"program": "A", "calls": [{"id": "x", "prompt_tokens": 8, "output_tokens": 1} | call]} | program
    with pytest.raises(TraceError, match=rf"here.*{message}"):
        parse(json.dumps(row), "here")
