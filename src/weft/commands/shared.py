"""What the commands share: flags, choices, tables, and what was left out of a file."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Iterator
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from typer.core import TyperCommand, TyperGroup

from weft.core.errors import UnknownOptionError
from weft.core.trace.importers import IMPORTERS, TraceImport

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


def one_of(names: Collection[str], help: str) -> Any:  # noqa: A002  typer's name
    """An option whose value is one of `names`. The names are in `--help`; any other value is a usage error."""

    def check(value: str | None) -> str | None:
        if value is not None and value not in names:
            raise typer.BadParameter(f"{value!r} is not one of {', '.join(map(repr, names))}.")
        return value

    return typer.Option(metavar=f"<{'|'.join(names)}>", callback=check, help=help)


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


def plain_console() -> Console:
    """Standard output, where names of users are printed as they are."""
    from rich.console import Console

    return Console(highlight=False, markup=False)


def plain_table(title: str, name: str, numbers: Iterable[str]) -> Table:
    """A table with a title and a line below its headings: a column of names, and columns of numbers."""
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1))
    table.add_column(name, overflow="fold")
    for heading in numbers:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


FormatOption = Annotated[
    str | None, one_of(IMPORTERS, help="What the files are (default: found by looking at each of them).")
]
GapCapOption = Annotated[float | None, typer.Option(min=0, help="Cut longer gaps to this many seconds.")]
ProgramsOption = Annotated[int | None, typer.Option(min=1, help="Stop after this many programs.")]


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
