"""What the commands share: flags, choices, tables, and what was left out of a file."""

from __future__ import annotations

import difflib
import inspect
import re
import sys
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from typer.core import TyperCommand, TyperGroup

from weft.core.errors import TraceError, UnknownOptionError
from weft.core.kv_cache.policies import KV_POLICIES
from weft.core.routing import BALANCERS
from weft.core.tables import Table
from weft.core.trace.importers import IMPORTERS, TraceImport


def one_of(names: Collection[str], help: str) -> Any:  # noqa: A002  typer's name
    """An option whose value is one of `names`. The names are in `--help`; any other value is a usage error."""

    def check(value: str | None) -> str | None:
        if value is not None and value not in names:
            raise typer.BadParameter(f"{value!r} is not one of {', '.join(map(repr, names))}.")
        return value

    return typer.Option(metavar=f"<{'|'.join(names)}>", callback=check, help=help)


def described(kind: type[Any]) -> dict[str, str]:
    """What the section `Args` of a class's docstring says of each argument."""
    _, _, arguments = inspect.cleandoc(kind.__doc__ or "").partition("\nArgs:\n")
    found: dict[str, str] = {}
    name = ""
    for line in arguments.partition("\n\n")[0].splitlines():
        if start := re.fullmatch(r" {4}(\w+): (.*)", line):
            name, text = start.groups()
            found[name] = text[:1].upper() + text[1:] if text.split(" ", maxsplit=1)[0].islower() else text
        elif name:
            found[name] += f" {line.strip()}"
    return found


def setting(kind: type[Any], name: str, *more: str, **options: Any) -> Any:
    """An option for an argument of a class, with the first sentence of what the class's docstring says of it."""
    sentence = described(kind).get(name, "").partition(". ")[0].removesuffix(".")
    return typer.Option(help=" ".join([f"{sentence}.", *more]), **options)


HELP_NAMES: Final = {"help_option_names": ["--help", "-h"]}
_NEAR: Final = 0.6  # of 1, as difflib measures how alike two names are


class _FlagsWithoutType:
    """Shows `--json`, where typer would show `--json <bool>`, though the option takes no value."""

    def get_params(self, ctx: Any) -> list[Any]:
        found: list[Any] = super().get_params(ctx)  # type: ignore[misc]  # of the class beside this one
        for parameter in found:
            if getattr(parameter, "is_flag", False):
                parameter.metavar = ""
        return found


class Command(_FlagsWithoutType, TyperCommand):
    """A command of `weft`."""


class CommandGroup(_FlagsWithoutType, TyperGroup):
    """A group of commands of `weft`."""


def check_flags(arguments: Iterable[str], flags: Collection[str], ours: Collection[str]) -> None:
    """Refuse a mistyped option before vLLM is imported, which takes many seconds.

    What may be right passes, and vLLM's own parser judges it: names that are cut short, and short options with their
    value attached.

    Args:
        arguments: The command line, less the options that are Weft's.
        ours: Weft's, which have no short forms. The error may suggest one.

    Raises:
        UnknownOptionError: An option is neither vLLM's nor Weft's.
    """
    for argument in arguments:
        if argument == "--":  # no option follows
            return
        if " " in argument or not argument.lstrip("-")[:1].isalpha() or not argument.startswith("-"):
            continue  # a value, such as -1, or a text
        name = argument.partition("=")[0].partition(".")[0]  # --compilation-config.level=3
        if name.startswith("--"):
            name = name.replace("_", "-")
            is_known = any(flag.startswith(name) for flag in flags)
        else:
            is_known = name.startswith("-O") or any(
                name.startswith(flag) for flag in flags if not flag.startswith("--")
            )
        if not is_known:
            near = difflib.get_close_matches(name, [*flags, *ours], 1, _NEAR)
            raise UnknownOptionError("weft serve", name, near[0] if near else None)


def show(table: Table) -> None:
    """Print a table to standard output: in colour and cut to its width in a terminal, and otherwise as a text."""
    if sys.stdout.isatty():
        import rich

        rich.print(table)
    else:
        typer.echo(table)


FormatOption = Annotated[
    str | None, one_of(IMPORTERS, help="What the files are (default: found by looking at each of them).")
]
GapCapOption = Annotated[float | None, typer.Option(min=0, help="Cut longer gaps to this many seconds.")]
ProgramsOption = Annotated[int | None, typer.Option(min=1, help="Stop after this many programs.")]
GateOption = Annotated[
    bool | None,
    typer.Option("--gate/--no-gate", help="Open no more programs than the KV cache holds (default: under auto)."),
]
KvPolicyOption = Annotated[
    str | None,
    one_of(
        KV_POLICIES,
        help="What is evicted from the KV cache next (default: next-use; without host memory what the scheduling "
        "policy says).",
    ),
]
BalancerOption = Annotated[str, one_of(BALANCERS, help="How an engine is chosen for a call.")]
StealingOption = Annotated[
    bool, typer.Option("--stealing", help="Calls that have not begun move to an engine without a queue (SAGA).")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
TraceOut = Annotated[Path, typer.Option(help="The trace file to write.")]


def check_kept(files: Iterable[Path], out: Path) -> None:
    """Refuse to write over a file that is read, because it would be lost.

    Raises:
        TraceError: `out` is one of the files.
    """
    if out.exists() and any(file.exists() and out.samefile(file) for file in files):
        raise TraceError(f"{out} is one of the files to read, and would be replaced; give another --out.")


def left_out(found: TraceImport) -> Iterator[str]:
    """Say in lines what an import has left out, and why."""
    counts = found.counts
    if by_caps := [
        text
        for number, text in (
            (counts.programs_left_out, counted(counts.programs_left_out, "program")),
            (counts.calls_left_out, f"{counted(counts.calls_left_out, 'call')} of other programs"),
        )
        if number
    ]:
        yield f"left out by the caps: {', '.join(by_caps)}"
    if counts.calls_unused:
        calls = counted(counts.calls_unused, "call")
        yield f"left out as failed, without token counts or repeated from another file: {calls}"
    for reason, paths in (("no known format", found.left_out), ("without a call", found.empty)):
        if paths:
            yield f"left out as {reason}: {counted(len(paths), 'file')} (the first is {paths[0]})"


def counted(number: int, what: str) -> str:
    """A number of things in words."""
    return f"{number:,} {what}{'s'[: number != 1]}"
