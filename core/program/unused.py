"""The warning about a program that ended without a call, because it was probably not passed on to its models."""

from __future__ import annotations

from typing import Final

from structlog.stdlib import BoundLogger

_MOST_NAMES: Final = 1000  # after which no further name is warned of

_warned: Final[set[str]] = set()


def warn_of_no_call(name: str, log: BoundLogger) -> None:
    """Warn that a program ended without a call, once for each name."""
    if name in _warned or len(_warned) >= _MOST_NAMES:
        return
    _warned.add(name)
    log.warning(
        "the program ended without a call, so nothing was scheduled as part of it. Pass the program on to its models: "
        "config=program.config() with LangChain and LangGraph, client.bind(program) or bind_team(team, program) with "
        "AutoGen, openai_client(engine, program) with OpenAI's SDK. This is said once for each name of a program"
    )
