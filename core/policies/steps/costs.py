"""What the steps of an engine cost, and how many output tokens a prompt token therefore counts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

FIT_STEPS: Final = 64  # steps after which an engine tells its policy again what steps cost


@dataclass(frozen=True, slots=True)
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

    @property
    def token_s(self) -> float:
        """The engine's seconds for one output token: the token's share of a full step."""
        return self.fixed_s / self.slots + self.decode_token_s

    @property
    def prompt_weight(self) -> float:
        """ω: the output tokens that take as long as one newly computed prompt token."""
        return self.prefill_token_s / self.token_s
