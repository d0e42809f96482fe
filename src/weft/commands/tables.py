"""The tables that commands print. They import rich when they are made, so that `weft --help` stays quick."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


def plain_console() -> Console:
    """Standard output, where names of users are printed as they are."""
    from rich.console import Console

    return Console(highlight=False, markup=False)


def plain_table(title: str) -> Table:
    """A table with a title and a line below its headings, without columns."""
    from rich import box
    from rich.table import Table

    return Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1))
