"""Errors while KV moves between an engine's cache and the host pool."""

from __future__ import annotations

from weft.core.errors.engines import EngineError


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
