"""What the integrations share: the checks of their arguments, and of answers that should be JSON."""

from __future__ import annotations

import json

from weft.core.errors import ArgumentTypeError
from weft.core.program import Program
from weft.engine.host.frontend import FrontEnd


def check_engine(function: str, engine: object) -> None:
    """Raise ArgumentTypeError unless an argument is an engine."""
    if not isinstance(engine, FrontEnd):
        kinds = "a weft.Engine, a weft.AsyncMultiLLMEngine, or weft.connect(url) for a `weft serve`"
        if isinstance(engine, str) and engine.startswith(("http://", "https://")):
            kinds = f"weft.connect({engine!r}), which is an engine on that server"
        raise ArgumentTypeError(function, "engine", engine, kinds)


def check_program(function: str, program: object) -> None:
    """Raise ArgumentTypeError unless an argument is a program."""
    if not isinstance(program, Program):
        raise ArgumentTypeError(function, "program", program, "the weft.Program that @weft.program passes in")


def is_json(text: str) -> bool:
    """Whether a text is one JSON value. JSON that was cut off hardly ever is."""
    try:
        json.loads(text)
    except ValueError:
        return False
    return True
