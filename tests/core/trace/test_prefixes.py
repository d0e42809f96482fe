"""Shared prefixes of prompts, found by hashes of blocks of tokens."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from weft.core.trace.prefixes import BLOCK_TOKENS, TokenChain

tokens = st.lists(st.integers(0, 3), max_size=80)


def common(first: list[int], second: list[int]) -> int:
    """Return the length of the common prefix, token by token."""
    pairs = list(zip(first, second, strict=False))
    return next((number for number, (one, other) in enumerate(pairs) if one != other), len(pairs))


@given(tokens, st.lists(tokens, max_size=4), tokens, st.integers(0, 400))
def test_the_shared_prefix_is_exact_or_rounded_down_to_a_block(
    prompt: list[int], outputs: list[list[int]], rest: list[int], keep: int
) -> None:
    """It is exact for a prompt that goes on where the prompt or the output before it ends, and for one that differs in
    the last block of either. Otherwise the tokens of the last block that differs are missing."""
    before = TokenChain(prompt)
    for output in outputs:
        before.extend(output)
    everything = prompt + [token for output in outputs for token in output]
    other = everything[:keep] + rest
    shared, found = common(everything, other), before.shared_tokens(TokenChain(other), other)
    block = shared // BLOCK_TOKENS
    ends = (end for end in (len(prompt), len(everything)) if end // BLOCK_TOKENS == block)
    assert found == max(block * BLOCK_TOKENS, *(min(shared, end) for end in ends), 0)
    assert before.of_prompt().shared_tokens(TokenChain(other), other) <= found


def test_a_chain_is_small() -> None:
    """A block of 16 tokens takes 8 bytes."""
    assert len(TokenChain(range(1000))) == 62
