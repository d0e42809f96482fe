"""The tokens of one step, divided among prompts in rank order."""

from __future__ import annotations

from collections.abc import Iterable

from weft.core.policies.view import Call


class StepTokens:
    """Divides the tokens that decoding calls leave among calls in rank order, whether they run or wait.

    A running call that still computes its prompt takes its tokens before a waiting call of worse rank, and after one of
    better rank. It may get no tokens.

    Args:
        tokens: The tokens of the step, without those of the calls that decode.
        prompts: The running calls that compute a prompt, in rank order, with the tokens that are left to compute.
    """

    def __init__(self, tokens: int, prompts: Iterable[tuple[Call, int]]) -> None:
        self._left = max(0, tokens)
        self._prompts = dict(prompts)  # in rank order, those whose share is not decided yet
        self._preempted: dict[Call, int] = {}
        self._shares: dict[Call, int] = {}

    def left_for(self, call: Call | None) -> int:
        """The tokens left for a waiting call. Ask in rank order.

        Args:
            call: The call. None: what is left after all running calls.
        """
        decided = []
        for prompt, tokens in self._prompts.items():
            if call is not None and call.rank < prompt.rank:
                break
            self._shares[prompt] = self.take(tokens)
            decided.append(prompt)
        for prompt in decided:
            del self._prompts[prompt]
        return self._left

    def take(self, tokens: int) -> int:
        """Take up to `tokens` for a call.

        Returns:
            How many tokens there were.
        """
        taken = min(tokens, self._left)
        self._left -= taken
        return taken

    def preempt(self, call: Call) -> None:
        """A running call would be preempted. Its share must not be decided yet."""
        if call in self._prompts:
            self._preempted[call] = self._prompts.pop(call)
        else:
            self._left += 1

    def keep(self, call: Call) -> None:
        """A call that would have been preempted stays. The last call to be preempted is the first to stay."""
        if call in self._preempted:
            self._prompts[call] = self._preempted.pop(call)
        else:
            self._left -= 1

    def divide(self) -> dict[Call, int]:
        """Give the running calls the rest of the tokens.

        Returns:
            The tokens of each running call that computes a prompt.
        """
        self.left_for(None)
        return self._shares
