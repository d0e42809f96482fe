"""The workloads of Autellix (§6.1, Fig. 11).

The paper gives the means and the largest numbers of calls. The distributions are Weft's choice; they have long tails,
as in the figure. The paper's prefill of a call is taken as the part of the prompt that the program's earlier calls do
not have. It cannot be the whole prompt: with 256 prompt tokens a call, a chat would have no tokens left for its
history.
"""

from __future__ import annotations

import random
from typing import Final

from weft.core.trace.format import TraceCall, TraceProgram
from weft.core.trace.workloads.parts import chain, long_tail

_SYSTEM_TOKENS: Final = 2048
_WIDTH: Final = 5  # parallel calls in a round of a search
_DEPTH: Final = 6  # rounds from the root of the tree to a leaf


def chat(rng: random.Random, program: str) -> TraceProgram:
    """Make a ShareGPT-like program: a conversation without pauses.

    Means: 6.66 calls (at most 80), 277 output tokens and 256 tokens of prefill a call.
    """
    calls, prefill, output = long_tail(6.66, 80, 1.0), long_tail(256, 4096, 1.0), long_tail(277, 2048, 0.8)
    return TraceProgram(program, tuple(chain(rng, calls.draw(rng), prefill.draw, output.draw)), name="chat")


def tools(rng: random.Random, program: str) -> TraceProgram:
    """Make a BFCL-like program: a ReAct loop with tools that take half a second.

    All programs have the same long system prompt. Means: 10.75 calls (at most 70), 34.14 output tokens and 735.06
    tokens of prefill a call.
    """
    count = long_tail(10.75, 70, 0.6).draw(rng)
    # The system prompt is prefill of one call only, so the other calls have less prefill than the mean.
    later = long_tail((735.06 * 10.75 - _SYSTEM_TOKENS) / 10.75, 4096, 0.8)
    output = long_tail(34.14, 512, 0.6)
    calls = chain(
        rng, count, later.draw, output.draw, system=_SYSTEM_TOKENS, pause=lambda: ("tool", rng.expovariate(2.0))
    )
    return TraceProgram(program, tuple(calls), name="tools")


def search(rng: random.Random, program: str) -> TraceProgram:
    """Make a LATS-like program: a tree search in rounds of five parallel calls.

    A round begins when the whole round before it has ended. After six rounds the search starts at the root again.
    Means: 159.7 calls, 72.6 output tokens and 467.2 tokens of prefill a call.
    """
    prefill, output = long_tail(467.2, 4096, 0.5), long_tail(72.6, 512, 0.5)
    calls = list(chain(rng, 1, prefill.draw, output.draw))
    rounds = long_tail((159.7 - 1) / _WIDTH, 80, 0.35).draw(rng)
    root = node = calls[0]
    before: tuple[str, ...] = (root.call_id,)
    for number in range(rounds):
        if number % _DEPTH == 0:
            node = root
        parents = (node.call_id, *(call_id for call_id in before if call_id != node.call_id))
        shared = node.prompt_tokens + node.output_tokens
        branches = [
            TraceCall(
                call_id=f"c{len(calls) + branch}",
                parents=parents,
                output_tokens=output.draw(rng),
                prompt_tokens=shared + prefill.draw(rng),
                shared_prefix_tokens=shared,
            )
            for branch in range(_WIDTH)
        ]
        calls += branches
        before = tuple(branch.call_id for branch in branches)
        node = rng.choice(branches)
    return TraceProgram(program, tuple(calls), name="search")


def mixed(rng: random.Random, program: str) -> TraceProgram:
    """Make a program of one of the three workloads, each as likely as the others (§6.1 mixes programs, not calls)."""
    return rng.choice((chat, tools, search))(rng, program)
