"""The blocks of a program's calls by their hash ids: what a trace file leaves out, and how it comes to that."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import replace

from weft.core.trace.format import TraceProgram, in_order
from weft.core.trace.prefixes import common_prefix


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
