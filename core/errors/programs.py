"""Errors in the use of programs, and of functions with arguments."""

from __future__ import annotations

from weft.core.errors.base import WeftError


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
    """An argument has the wrong kind, such as a name instead of an engine.

    Args:
        function: the function that was called.
        argument: the name of the argument.
        value: what was given.
        expected: what the function takes.
    """

    def __init__(self, function: str, argument: str, value: object, expected: str) -> None:
        super().__init__(f"{function}: {argument} is {value!r:.80} ({type(value).__name__}). Give {expected}.")


class InvalidIdError(WeftError, ValueError):
    """An id has the wrong type, is empty, too long, not printable, or already in use."""
