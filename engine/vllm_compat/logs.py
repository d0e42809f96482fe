"""vLLM's log: in this process, and in the processes that vLLM starts, which are prepared on the way."""

from __future__ import annotations

import atexit
import gc
import importlib
import logging
import multiprocessing
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError

from weft.core.errors import WeftError
from weft.engine.vllm_compat.environment import sets_logging
from weft.engine.vllm_compat.names import EngineDeadError, LoggingConfig

# The modules of vLLM that log the error of a call, or of an engine, with a traceback.
LOGGERS: Final = (
    "vllm.entrypoints.anthropic.api_router",
    "vllm.entrypoints.anthropic.serving",
    "vllm.entrypoints.cohere.api_router",
    "vllm.entrypoints.cohere.serving",
    "vllm.entrypoints.openai.chat_completion.serving",
    "vllm.entrypoints.openai.completion.serving",
    "vllm.entrypoints.scale_out.token_in_token_out.serving",
    "vllm.v1.engine.async_llm",
)


def leave_the_root_logger() -> None:
    """Import what vLLM's server brings along that would set the level of this process's root logger and its handlers.

    They belong to the application, whose records below ERROR would be lost from then on.
    """
    root = logging.getLogger()
    levels: list[tuple[logging.Logger | logging.Handler, int]] = [
        (root, root.level),
        *((each, each.level) for each in root.handlers),
    ]
    with suppress(ImportError):  # not every version of vLLM has it
        importlib.import_module("model_hosting_container_standards.logging_config")
    for owner, level in levels:
        owner.setLevel(level)


def leave_out_expected_ends() -> None:
    """Keep the ends that Weft expects out of vLLM's log: a call that is lost or late, an engine that has died.

    Weft reports each of them by itself, in one line or as the caller's error. vLLM would write a traceback for each.
    A second call changes nothing.
    """
    for name in LOGGERS:
        logging.getLogger(name).addFilter(_is_unexpected)


def _is_unexpected(record: logging.LogRecord) -> bool:
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, ValidationError):  # by vLLM's Messages, on the error event of the stream that they convert
        return not any(isinstance(each["input"], Mapping) and "error" in each["input"] for each in error.errors())
    while error is not None:
        if isinstance(error, WeftError | EngineDeadError):
            return False
        error = error.__cause__ or error.__context__
    return True


def host_logging() -> LoggingConfig:
    """A logging configuration for vLLM that leaves this process's logging alone, unless the user has configured it.

    By default, vLLM runs logging.config.dictConfig, which closes the log handlers that this process has set up. vLLM
    passes the configuration on to its processes. So they log in the same way for each engine of this process.
    """
    if sets_logging():
        return LoggingConfig()
    # At level INFO, vLLM would set the level of httpx's logger in this process.
    return LoggingConfig(configure_logging=False, log_level="WARNING")


class EngineLogging(LoggingConfig):
    """The logging configuration of one engine.

    vLLM applies it in this process, and pickles it for each process of the engine. Before it is unpickled there, it
    prepares the process (`_prepare`).

    Args:
        log: The file that the engine's processes write to; None: their output is left as `host` says.
    """

    def __init__(self, host: LoggingConfig, log: Path | None) -> None:
        super().__init__(**asdict(host))
        self.log = log

    def __reduce__(self) -> tuple[Any, ...]:
        if self.log is None:
            return _prepare, (os.getpid(), None, asdict(self))
        level = os.environ.get("VLLM_LOGGING_LEVEL", "INFO").upper()
        return _prepare, (os.getpid(), self.log, {"configure_logging": True, "log_level": level})

    def __copy__(self) -> EngineLogging:
        return self

    def __deepcopy__(self, _memo: object) -> EngineLogging:
        return self  # a copy in this process must not prepare it as one of the engine's


def _prepare(parent: int, log: Path | None, fields: Mapping[str, Any]) -> EngineLogging:
    """Prepare a process of the engine, which has just started, and return the configuration for it."""
    # multiprocessing sets this while it unpickles what a new process is for. Ray's workers are not our processes.
    if os.getpid() != parent and getattr(multiprocessing.current_process(), "_inheriting", False):
        # Otherwise the collector would go through all objects of torch and vLLM when the interpreter ends. That takes
        # seconds, so that vLLM would kill the process.
        atexit.register(gc.disable)
        atexit.register(gc.freeze)
        if log is not None:
            _write_to(log)
    return EngineLogging(LoggingConfig(**fields), log)


def _write_to(log: Path) -> None:
    """Let this process and its children write to a file instead of to the terminal."""
    with suppress(OSError):  # without the file, the output stays where it was
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
        os.dup2(file, 1)
        os.dup2(file, 2)
        os.close(file)
