"""Errors of one LLM call. Other calls go on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from weft.core.errors.base import WeftError


class CallError(WeftError):
    """One LLM call was refused or failed."""


class InvalidRequestError(CallError, ValueError):
    """The engine refused the request; sending the same request again will not help."""


class ContextLengthError(InvalidRequestError):
    """The prompt, or the prompt with the requested output tokens, is longer than the model's context."""

    def __init__(self, detail: str) -> None:
        super().__init__(
            f"{detail} Shorten the prompt, ask for fewer tokens, or start the engine with a larger max_model_len."
        )


class UnknownModelError(InvalidRequestError):
    """The request names a model that the engine does not serve."""

    def __init__(self, model: str, served: Sequence[str]) -> None:
        super().__init__(
            f"the model {model!r} is not served here. Name one of these, or no model to use the first: "
            f"{', '.join(served)}."
        )
        self.model = model


class OutputParsingError(CallError):
    """The model's output was cut off, or does not have the requested structure."""


class CallFailedError(CallError):
    """The engine reported an internal error for this call only; the call may be sent again."""


class RetryableCallError(CallFailedError):
    """The engine failed on this call for a reason that passes, such as a pause of the engine. Send the call again."""


class OverloadedError(CallError):
    """The limit of calls in flight is reached, and this call was not started.

    Attributes:
        retry_after_s: seconds after which a call is likely to be admitted.
    """

    def __init__(self, calls: int, limit: int, retry_after_s: float) -> None:
        super().__init__(
            f"the engine is overloaded: {calls} calls are in flight, at most {limit} are admitted. Send the call "
            f"again in {retry_after_s:.3g} s, send fewer at once, or raise max_calls."
        )
        self.retry_after_s = retry_after_s


class KeyLimitError(OverloadedError):
    """An API key has reached one of its limits. Other keys are not affected.

    Args:
        limit_name: the limit's name in the file of keys.
        limit: how many the key may have.
        retry_after_s: seconds after which there is likely to be room.
    """

    def __init__(self, limit_name: Literal["max_calls", "max_programs"], limit: int, retry_after_s: float) -> None:
        what = "calls in flight" if limit_name == "max_calls" else "programs with calls in flight"
        CallError.__init__(
            self,
            f"this API key has {limit} {what}, which is its limit. Send the call again in {retry_after_s:.3g} s, or "
            "ask the server's operator for more.",
        )
        self.limit_name = limit_name
        self.retry_after_s = retry_after_s


class ArrivingError(OverloadedError):
    """Too much of other requests is still arriving, so this one was not read to its end.

    Args:
        held: what is arriving, e.g. "512 requests".
        holder: whose bound this is: "this server" or "this client".
    """

    def __init__(self, held: str, holder: str) -> None:
        retry_after_s = 1.0  # nobody knows when a sender goes on
        CallError.__init__(
            self,
            f"{held} that are not complete are arriving, and {holder} may have no more of them. Send the request again "
            f"in {retry_after_s:.0f} s, send fewer at once, or send smaller ones.",
        )
        self.retry_after_s = retry_after_s


class DeadlineError(CallError, TimeoutError):
    """A call was aborted because the call or its program exceeded its time limit.

    Args:
        scope: "call" or "program": the one that has exceeded its limit.
        allowed_s: the limit in seconds.
        delivered_tokens: output tokens that the caller had received.
    """

    def __init__(self, scope: str, allowed_s: float, delivered_tokens: int) -> None:
        super().__init__(
            f"the {scope} was not done within {allowed_s:g} s, and the call was aborted after {delivered_tokens} "
            f"tokens were delivered. Ask for fewer tokens, or give the {scope} more time (timeout_s)."
        )
        self.delivered_tokens = delivered_tokens


class ReplicaLostError(CallError):
    """The replica that ran a call died after the caller had received output, or too many replicas died in turn.

    Args:
        replica: the name of the last replica.
        delivered_tokens: output tokens that the caller had received.
        attempts: how many replicas have tried the call, at least 1.
    """

    def __init__(self, replica: str, delivered_tokens: int, attempts: int) -> None:
        earlier = f" The replicas of {attempts - 1} earlier attempts died, too." if attempts > 1 else ""
        super().__init__(
            f"replica {replica} died during this call, after {delivered_tokens} tokens of its answer were "
            f"delivered.{earlier} Drop the delivered tokens and send the call again."
        )
        self.replica = replica
        self.delivered_tokens = delivered_tokens
        self.attempts = attempts


class ScriptError(CallError, AssertionError):
    """A `weft.testing.ScriptedEngine` has no reply for a call, or its reply is not one that it can give."""
