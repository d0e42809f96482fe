"""Rounds the prefixes that calls share to full blocks of the KV cache."""

from __future__ import annotations

from dataclasses import replace

from weft.core.trace.format import TraceProgram


def share_full_blocks(program: TraceProgram, block_tokens: int) -> TraceProgram:
    """Round the prefixes that a program's calls share down to full blocks, because vLLM shares only these.

    A call computes at least its last token again, so it finds no block that ends with its prompt. Programs with hash
    ids share full blocks of their own length.

    The KV of the last token that a parent generated was never computed. The first call that continues the parent
    computes it, and the parent's other children find it.

    Args:
        program: The program.
        block_tokens: Tokens in a block.
    """
    if block_tokens == 1 or program.block_tokens is not None:
        return program
    calls = []
    for call in program.calls:
        tokens = max(0, min(call.shared_prefix_tokens, call.prompt_tokens - 1))
        calls.append(replace(call, shared_prefix_tokens=tokens // block_tokens * block_tokens))
    return replace(program, calls=tuple(calls))
