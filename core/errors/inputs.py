"""Errors of files, settings and addresses that a user has named, and of packages that are not there."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from weft.core.errors.base import WeftError


class TraceError(WeftError, ValueError):
    """A file or text is neither a program's graph (`ProgramGraph.to_json()`) nor a trace.

    docs/reference/trace-format.md describes traces.
    """


class SimulationError(WeftError, ValueError):
    """A simulation has invalid settings, or programs that do not fit its engines."""


class BenchError(WeftError, ValueError):
    """`weft bench` has invalid settings, or its folder holds rounds of other settings."""


class HistoryError(WeftError, ValueError):
    """A file or text holds no history of programs, or the file cannot be read or written."""


class StateError(WeftError, ValueError):
    """A text holds no state of an engine."""


class ScriptFileError(WeftError, ValueError):
    """A file of scripted answers cannot be read, or makes no sense.

    Args:
        path: the file.
        line: where, from 1; None: the whole file.
        problem: what is wrong, without a full stop.
    """

    def __init__(self, path: Path, line: int | None, problem: str) -> None:
        where = f"{path}:{line}" if line is not None else str(path)
        super().__init__(f"{where}: {problem.rstrip('.')}. docs/how-to/scripted-server.md shows a script.")
        self.path = path
        self.line = line


class PolicyError(WeftError, ValueError):
    """A scheduling policy is unknown, or has invalid parameters."""


class KvPolicyError(WeftError, ValueError):
    """A KV policy is unknown, or has invalid parameters."""


class BalancerError(WeftError, ValueError):
    """A load balancer is unknown, or has invalid parameters."""


class NotReachableError(WeftError, ConnectionError):
    """No Weft server answers at an address.

    Args:
        url: the address, as it was given.
        reason: a sentence.
    """

    def __init__(self, url: str, reason: str) -> None:
        super().__init__(
            f"no Weft server answers at {url!r:.200}: {' '.join(reason.split()):.200} Give the address that "
            "`weft serve` prints, or that of an engine with listen=..., which engine.url says."
        )


class UnknownOptionError(WeftError, ValueError):
    """A command has no option of this name.

    Args:
        command: the command, such as "weft serve".
        option: the name, as it was given.
        near: the option whose name is nearest, if there is one.
    """

    def __init__(self, command: str, option: str, near: str | None) -> None:
        advice = (
            f"Did you mean {near}?" if near else f"`{command} --help` and `vllm serve --help=all` list the options."
        )
        super().__init__(f"{command} has no option {option:.100}. {advice}")


class MissingPackageError(WeftError, ImportError):
    """A package that an integration is made for is not installed."""

    def __init__(self, user: str, packages: Sequence[str], install: str) -> None:
        super().__init__(f"{user} needs {', '.join(packages)}: not installed. Run {install}.")
        self.packages = tuple(packages)
