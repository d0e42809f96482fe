"""The process table as a table for the terminal."""

from __future__ import annotations

import math

from rich import box
from rich.table import Table

from weft.core.process_table import ProcessTable, ProgramRow

_NUMBERS = (
    "thr-\neads",
    "calls",
    "tokens\nin",
    "tokens\nout",
    "serv-\nice s",
    "wait\ns",
    "tools\ns",
    "pre-\nempt.",
    "took\ns",
)
_STATE_STYLES = {"finished": "green", "failed": "red", "cancelled": "yellow", "abandoned": "magenta", "active": "bold"}


def process_table(table: ProcessTable) -> Table:
    """Make a rich table of the programs that run and of those that have ended, in the order of their starts.

    The columns are, with times in seconds:

    - thr-eads: concurrent chains of calls
    - calls
    - tokens in: prompt tokens
    - tokens out: generated tokens
    - serv-ice: time on the model executor along the longest chain of calls
    - wait: time in the scheduler's queue, summed over all calls
    - tools: interception, which is time between calls with no call in flight
    - pre-empt.: preemptions of the program's calls
    - took: time from start to end
    - state
    """
    view = Table(title="process table", title_justify="left", box=box.SIMPLE_HEAD, padding=0)  # fits 80 columns
    view.add_column("program", no_wrap=True, max_width=13)
    for heading in _NUMBERS:
        view.add_column(heading, justify="right", no_wrap=True)
    view.add_column("state", no_wrap=True)
    rows = [*table.ended(), *table]
    for row in sorted(rows, key=lambda row: row.start_s):
        view.add_row(*_cells(row))
    return view


def _cells(row: ProgramRow) -> list[str]:
    account = row.account
    took_s = row.end_s - row.start_s
    style = _STATE_STYLES.get(row.state)
    return [
        row.info.name,
        str(row.thread_count),
        str(row.calls),
        str(account.prompt_tokens),
        str(account.output_tokens),
        _seconds(row.attained.service_s),
        _seconds(row.attained.total_wait_s),
        _seconds(row.interception_s),
        str(account.preemptions),
        "" if math.isnan(took_s) else f"{took_s:.1f}",
        f"[{style}]{row.state}[/]" if style else str(row.state),
    ]


def _seconds(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.1f}"
