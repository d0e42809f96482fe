"""What a step of an engine costs, and whom it has room for."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Final, Protocol

import numpy as np

from weft.core.policies.view import Call

FIT_STEPS: Final = 64  # steps after which an engine tells its policy again what steps cost


@dataclass(frozen=True)
class StepCosts:
    """A step takes fixed_s + decode_token_s * decoded tokens + prefill_token_s * prompt tokens, in seconds.

    The defaults are those of the simulator. An engine uses them for its first `FIT_STEPS` steps.

    Args:
        fixed_s: Seconds that any step takes.
        decode_token_s: Seconds for each call that decodes in the step.
        prefill_token_s: Seconds for each prompt token that is computed.
        slots: The calls that share a step when the engine is busy.
    """

    fixed_s: float = 8e-3
    decode_token_s: float = 2e-5
    prefill_token_s: float = 1e-4
    slots: int = 16

    @cached_property
    def token_s(self) -> float:
        """The engine's seconds for one output token: the token's share of a full step."""
        return self.fixed_s / self.slots + self.decode_token_s

    @cached_property
    def prompt_weight(self) -> float:
        """ω: the output tokens that take as long as one newly computed prompt token."""
        return self.prefill_token_s / self.token_s


_FORGET: Final = 0.999  # the weight of all earlier steps with each new one: the fit follows the last thousand steps
_LEAST_STEPS: Final = 16  # before the first fit
_NOISE: Final = 1e-9  # the part of the steps' time that rounding may explain


class StepCostFit:
    """Fits the costs by least squares. Later steps count more, and only sums are kept."""

    def __init__(self) -> None:
        self._sums = [0.0] * 9  # of products of two figures of a step; see `observe`
        self._steps = 0
        self._slots = 1

    def observe(self, decode_tokens: int, prefill_tokens: int, step_s: float) -> None:
        """A step was made. `decode_tokens` are the tokens that it decoded, one for each call that decodes."""
        new = (
            1.0,
            decode_tokens,
            prefill_tokens,
            decode_tokens * decode_tokens,
            decode_tokens * prefill_tokens,
            prefill_tokens * prefill_tokens,
            step_s,
            decode_tokens * step_s,
            prefill_tokens * step_s,
        )
        self._sums = [_FORGET * each + more for each, more in zip(self._sums, new, strict=True)]
        self._steps += 1
        self._slots = max(self._slots, decode_tokens)

    def costs(self) -> StepCosts | None:
        """The fitted costs.

        A negative coefficient is set to zero and the others are fitted again. If a number of tokens never varied, its
        cost cannot be told from the fixed part. A coefficient that explains no more of the time than rounding does is
        zero, too: if all steps take as long, tokens cost nothing.

        Returns:
            The costs. None if too few steps were seen, or they took no time.
        """
        if self._steps < _LEAST_STEPS:
            return None
        one, decode, prefill, decode_2, both, prefill_2, *times = self._sums
        products = np.array([[one, decode, prefill], [decode, decode_2, both], [prefill, both, prefill_2]])
        used, fitted = [0, 1, 2], np.zeros(3)
        while used:
            scale = np.sqrt(np.maximum(products[used, used], 1e-30))
            matrix = products[np.ix_(used, used)] / np.outer(scale, scale)
            found = np.linalg.lstsq(matrix, np.array(times)[used] / scale, rcond=1e-9)[0] / scale
            if found.min() >= 0:
                fitted[used] = found
                break
            used.pop(int(found.argmin()))
        is_noise = fitted * products[0] <= _NOISE * times[0]  # both are sums over the steps
        fixed_s, decode_token_s, prefill_token_s = map(float, np.where(is_noise, 0.0, fitted))
        if fixed_s + decode_token_s <= 0:
            return None
        return StepCosts(fixed_s, decode_token_s, prefill_token_s, self._slots)


class Room(Protocol):
    """The KV cache of an engine and the tokens of its next step, if some calls started and others were preempted.

    Calls that begin with the same tokens share KV. Therefore the space that a call needs or gives back depends on the
    calls that run together with it. A driver makes a new object for each decision. The object changes no call.
    """

    def offer(self, call: Call) -> bool:
        """Consider a waiting call, which `fits` and `start` are then about. Returns whether running calls of better
        rank leave the call tokens of the step. If not, no later call starts either."""
        ...

    def fits(self) -> bool:
        """Whether the KV cache has room for the offered call."""
        ...

    def start(self) -> None:
        """The offered call would start."""

    def preempt(self, call: Call) -> None:
        """A running call would be preempted."""

    def keep(self, call: Call) -> None:
        """A call that would have been preempted stays. The last call to be preempted is the first to stay.

        After this, `fits` is not called any more.
        """


class UnlimitedRoom:
    """The room of an engine whose KV cache never fills, and whose steps have no bound."""

    def offer(self, call: Call) -> bool:
        return True

    def fits(self) -> bool:
        return True

    def start(self) -> None: ...

    def preempt(self, call: Call) -> None: ...

    def keep(self, call: Call) -> None: ...


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
        """Take up to `tokens` for a call. Returns how many tokens there were."""
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

        Returns the tokens of each running call that computes a prompt.
        """
        self.left_for(None)
        return self._shares
