"""Finds how many first tokens two calls have in common. Only hashes of blocks are kept, and no tokens."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from weft.core.trace.format import TraceProgram, in_order

BLOCK_TOKENS: Final = 16  # as in vLLM's prefix cache on a GPU


class TokenChain:
    """A prompt and its output as a hash for each whole block. A block's hash covers all tokens before it as well.

    The hashes are those of Python's `hash`, 8 bytes for 16 tokens. They mean nothing to another process.
    """

    def __init__(self, prompt: Sequence[int]) -> None:
        self._hashes = array("q")
        self._tail = array("i")  # the tokens after the last whole block
        self.extend(prompt)
        self._ends = [(len(self._hashes), self._tail)]  # the prompt's end: whole blocks, and the tokens after them

    def __len__(self) -> int:
        """The number of whole blocks."""
        return len(self._hashes)

    def extend(self, tokens: Iterable[int]) -> None:
        """Add tokens of the output."""
        data = self._tail + array("i", tokens)
        key = self._hashes[-1] if self._hashes else 0
        whole = len(data) - len(data) % BLOCK_TOKENS
        for begin in range(0, whole, BLOCK_TOKENS):
            key = hash((key, data[begin : begin + BLOCK_TOKENS].tobytes()))
            self._hashes.append(key)
        self._tail = data[whole:]

    def shared_tokens(self, prompt: TokenChain, tokens: Sequence[int]) -> int:
        """Return how many first tokens of another prompt are the first ones here.

        The number is exact if the other prompt continues this prompt or its output, or differs in the block in which
        this prompt or its output ends. Otherwise it is rounded down to whole blocks.
        """
        blocks = common_prefix(self._hashes, prompt._hashes)
        begin = blocks * BLOCK_TOKENS
        ends = (tail for end, tail in (*self._ends, (len(self._hashes), self._tail)) if end == blocks)
        return begin + max((_same(tail, tokens[begin : begin + BLOCK_TOKENS]) for tail in ends), default=0)

    def of_prompt(self) -> TokenChain:
        """Return the chain of the prompt alone."""
        chain = TokenChain(())
        whole, chain._tail = self._ends[0]
        chain._hashes = self._hashes[:whole]
        return chain


def common_prefix(first: Sequence[Any], second: Sequence[Any]) -> int:
    """Return how many first items of two sequences of one type are the same."""
    low, high = 0, min(len(first), len(second)) if first[:1] == second[:1] else 0
    while low < high:
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _same(tail: array[int], tokens: Sequence[int]) -> int:
    """Return how many first tokens of a tail are the same as those of a prompt."""
    pairs = zip(tail, tokens, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


# -- the blocks of a program's calls by their hash ids: what a trace file leaves out, and how it comes to that


def block_hashes(program: TraceProgram) -> dict[str, array[int]]:
    """Return the ids of all known blocks of each call from its first one on. Calls on a cycle are left out."""
    chains: dict[str, array[int]] = {}
    for call in in_order(program.calls):
        shared = call.shared_prefix_tokens // (program.block_tokens or 1)
        before = chains[call.parents[0]][:shared] if call.parents else array("q")
        chains[call.call_id] = before + call.hash_ids
    return chains


def with_block_hashes(program: TraceProgram, chains: Mapping[str, Sequence[int]], block_tokens: int) -> TraceProgram:
    """Return a program whose calls share prefixes as the ids of their blocks say.

    A call's output is taken to be what the next call repeats: the first one after it whose prompt begins with all whole
    blocks of this call's prompt, and has tokens enough for the output too.

    Args:
        program: the program. Its calls' `shared_prefix_tokens` and `hash_ids` are replaced.
        chains: for each call, the ids of the whole blocks of its prompt, from its first one on. Two calls of the
            program or of the file that have the same id have the same tokens up to the end of this block.
    """
    prompts = {call.call_id: array("q", chains[call.call_id]) for call in program.calls}
    followers: dict[str, list[array[int]]] = {}
    for call in program.calls:
        if call.parents:
            followers.setdefault(call.parents[0], []).append(prompts[call.call_id])
    contexts: dict[str, array[int]] = {}
    for call in program.calls:
        contexts[call.call_id] = prompt = prompts[call.call_id]
        total = (call.prompt_tokens + call.output_tokens) // block_tokens
        for after in followers.get(call.call_id, ()):
            if len(after) >= total and common_prefix(prompt, after) == len(prompt):
                contexts[call.call_id] = after[:total]
                break
    calls = []
    for call in program.calls:
        context, shared = contexts[call.call_id], 0
        if call.parents:
            before = contexts[call.parents[0]]
            shared = min(common_prefix(before, context), call.prompt_tokens // block_tokens)
        calls.append(replace(call, shared_prefix_tokens=shared * block_tokens, hash_ids=context[shared:]))
    return replace(program, calls=tuple(calls), block_tokens=block_tokens)
