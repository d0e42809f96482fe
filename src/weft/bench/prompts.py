"""Prompts of random tokens for the calls of a trace."""

from __future__ import annotations

import random

from weft.core.trace.format import TraceCall, TraceProgram


class Prompts:
    """Makes prompts of random tokens, which share prefixes as the trace says.

    Args:
        seed: the same seed gives the same prompts.
        token_ids: the ids to choose from.
    """

    def __init__(self, seed: str, token_ids: range) -> None:
        self._seed = seed
        self._token_ids = token_ids

    def make(self, program: TraceProgram, call: TraceCall, history: list[int]) -> list[int]:
        """The prompt of a call, as `call.prompt_tokens` token ids.

        Args:
            history: prompt and output of the call's first parent. It is not used for a call without parents, whose
                prompt begins like the prompts of all programs of the same name.
        """
        shared = call.shared_prefix_tokens
        prefix = history[:shared] if call.parents else self._choose(f"name {program.name}", shared)
        return prefix + self._choose(f"call {program.program} {call.call_id}", call.prompt_tokens - len(prefix))

    def _choose(self, key: str, count: int) -> list[int]:
        """The same key gives the same tokens."""
        return random.Random(f"{self._seed} {key}").choices(self._token_ids, k=count)  # noqa: S311  not a secret
