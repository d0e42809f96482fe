"""Options that take one name of several, where the names come from the code that has them."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import typer


def one_of(names: Collection[str], help: str) -> Any:  # noqa: A002  typer's name
    """An option whose value is one of `names`. The names are in `--help`; any other value is a usage error."""

    def check(value: str | None) -> str | None:
        if value is not None and value not in names:
            raise typer.BadParameter(f"{value!r} is not one of {', '.join(map(repr, names))}.")
        return value

    return typer.Option(metavar=f"<{'|'.join(names)}>", callback=check, help=help)
