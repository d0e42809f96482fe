"""Options: how `--help` shows those that take no value, and which of `weft serve` nobody knows."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable
from typing import Any, Final

from typer.core import TyperCommand, TyperGroup

from weft.core.errors import UnknownOptionError

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


class Group(_FlagsWithoutType, TyperGroup):
    """A group of commands of `weft`."""


def check_flags(arguments: Iterable[str], flags: Collection[str], ours: Collection[str]) -> None:
    """Refuse a mistyped option before vLLM is imported, which takes many seconds.

    What may be right passes, and vLLM's own parser judges it: names that are cut short, and short options with their
    value attached.

    Args:
        arguments: The command line, less the options that are Weft's.
        flags: vLLM's options.
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
