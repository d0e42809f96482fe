"""vLLM's logging configuration in the host process."""

from __future__ import annotations

import os
from typing import Final

from weft.engine.vllm_compat.names import LoggingConfig

_VARIABLE: Final = "VLLM_CONFIGURE_LOGGING"


def host_logging() -> LoggingConfig:
    """A logging configuration for vLLM that leaves this process's logging alone, unless VLLM_CONFIGURE_LOGGING is set.

    By default, vLLM runs logging.config.dictConfig, which closes the log handlers that this process has set up. vLLM
    passes the configuration on to its processes. So they log in the same way for each engine of this process.
    """
    if _VARIABLE in os.environ:
        return LoggingConfig()
    # At level INFO, vLLM would set the level of httpx's logger in this process.
    return LoggingConfig(configure_logging=False, log_level="WARNING")
