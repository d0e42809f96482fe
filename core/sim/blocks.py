"""Rounds the prefixes that calls share to full blocks of the KV cache."""

from __future__ import annotations

from dataclasses import replace

from weft.core.trace.format import TraceProgram


def share_full_blocks(program: TraceProgram, block_tokens: int) -> TraceProgram:
    """Round the prefixes that a program's calls share down to full blocks, because vLLM shares only these.

    An engine never computes the KV of a call's last token. If a context just fills its blocks, its last block is
    therefore not full. Programs with hash ids share full blocks of their own length.

    Args:
        program: The program.
        block_tokens: Tokens in a block.
    """
    if block_tokens == 1 or program.block_tokens is not None:
        return program
    calls = []
    computed = {call.call_id: call.prompt_tokens + call.output_tokens - 1 for call in program.calls}
    for call in program.calls:
        tokens = min([call.shared_prefix_tokens, *(computed[parent] for parent in call.parents[:1])])
        calls.append(replace(call, shared_prefix_tokens=tokens // block_tokens * block_tokens))
    return replace(program, calls=tuple(calls))
