"""Structured logging that leaves the host application's configuration alone.

Records go to the standard library's logger `weft`. It is silent below WARNING until the host sets a level, and the
host's handlers and formatters render the records (structlog's `ProcessorFormatter` among them). Bound values appear in
the message and, as `weft_<key>`, on the record. Ids are bound explicitly; nothing is read from the context.
"""

from __future__ import annotations

import logging
import sys
import traceback
from contextlib import suppress
from typing import Any, cast

import structlog
from structlog.stdlib import BoundLogger
from structlog.typing import EventDict, WrappedLogger


def _as_record(_logger: WrappedLogger, _method: str, event: EventDict) -> tuple[tuple[str], dict[str, Any]]:
    """Return the arguments for the standard library's logger: one text, and the bound values as `extra`."""
    message = str(event.pop("event"))
    kwargs = {key: event.pop(key) for key in ("exc_info", "stack_info", "stacklevel") if key in event}
    text = " ".join([message, *(f"{key}={value}" for key, value in event.items())])
    return (text,), {**kwargs, "extra": {f"weft_{key}": value for key, value in event.items()}}


class _Logger(BoundLogger):
    """A logger whose caller goes on if a handler of the host raises, because its disk is full, for example."""

    def _proxy_to_logger(self, method_name: str, event: str | None = None, *event_args: str, **event_kw: Any) -> Any:
        try:
            return super()._proxy_to_logger(method_name, event, *event_args, **event_kw)
        except Exception:
            if logging.raiseExceptions and sys.stderr is not None:  # as the standard library's handlers do
                with suppress(OSError):
                    traceback.print_exc()
            return None


def get_logger(name: str = "weft") -> BoundLogger:
    """Return a structlog bound logger that wraps the standard library's logger `name`."""
    logger = structlog.wrap_logger(
        logging.getLogger(name),
        processors=[structlog.stdlib.filter_by_level, structlog.stdlib.PositionalArgumentsFormatter(), _as_record],
        wrapper_class=_Logger,
        context_class=dict,
        cache_logger_on_first_use=False,
    )
    return cast("BoundLogger", logger)
