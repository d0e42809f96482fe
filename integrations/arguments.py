"""Checks of the engines and programs that users pass to the integrations, so that mistakes are found at once."""

from __future__ import annotations

from weft.core.errors import ArgumentTypeError
from weft.core.program import Program
from weft.engine.frontend.frontend import FrontEnd


def check_engine(function: str, engine: object) -> None:
    """Check that an argument is an engine.

    Raises:
        ArgumentTypeError: It is something else.
    """
    if not isinstance(engine, FrontEnd):
        kinds = "a weft.Engine, a weft.AsyncMultiLLMEngine, or weft.connect(url) for a `weft serve`"
        if isinstance(engine, str) and engine.startswith(("http://", "https://")):
            kinds = f"weft.connect({engine!r}), which is an engine on that server"
        raise ArgumentTypeError(function, "engine", engine, kinds)


def check_program(function: str, program: object) -> None:
    """Check that an argument is a program.

    Raises:
        ArgumentTypeError: It is something else.
    """
    if not isinstance(program, Program):
        raise ArgumentTypeError(function, "program", program, "the weft.Program that @weft.program passes in")
