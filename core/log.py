"""Structured logging that leaves the host's configuration alone.

Records go through the standard library's logger ``weft``: silent below WARNING until the host adds a handler or sets a
level, and rendered by whatever the host has set up (structlog's `ProcessorFormatter` included). The bound values stand
in the message and, as `weft_<key>`, on the record. Ids are bound explicitly; nothing is read from the context.
"""

from __future__ import annotations

import logging
from typing import Any, cast

import structlog
from structlog.stdlib import BoundLogger
from structlog.typing import EventDict, WrappedLogger


def _as_record(_logger: WrappedLogger, _method: str, event: EventDict) -> tuple[tuple[str], dict[str, Any]]:
    """Arguments for the stdlib logger: one text, and the bound values as the record's attributes."""
    message = str(event.pop("event"))
    kwargs = {key: event.pop(key) for key in ("exc_info", "stack_info", "stacklevel") if key in event}
    text = " ".join([message, *(f"{key}={value}" for key, value in event.items())])
    return (text,), {**kwargs, "extra": {f"weft_{key}": value for key, value in event.items()}}


def get_logger(name: str = "weft") -> BoundLogger:
    """A structlog bound logger over the standard library's logger `name`."""
    logger = structlog.wrap_logger(
        logging.getLogger(name),
        processors=[
            structlog.stdlib.filter_by_level,
            structlog.stdlib.PositionalArgumentsFormatter(),
            _as_record,
        ],
        wrapper_class=BoundLogger,
        context_class=dict,
        cache_logger_on_first_use=False,
    )
    return cast("BoundLogger", logger)
