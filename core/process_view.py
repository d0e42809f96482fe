"""The process table and its rows as tables for people."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, TypeVar

from weft.core.class_rows import Branch, known
from weft.core.prediction import Tier
from weft.core.tables import Cell, Table, seconds

if TYPE_CHECKING:
    from weft.core.accounts import Account
    from weft.core.class_rows import ClassRow
    from weft.core.prediction import ForecastRow
    from weft.core.process_rows import ProgramRow
    from weft.core.process_table import ProcessTable

Row = TypeVar("Row")
_Columns = dict[str, Callable[[Row], str | Cell]]  # what each column says of a row, by its heading

MOST_PROGRAMS: Final = 50
_STATE_STYLES: Final = {
    "finished": "green",
    "failed": "red",
    "cancelled": "yellow",
    "abandoned": "magenta",
    "active": "bold",
}


def programs(table: ProcessTable) -> Table:
    """A table of the programs that run and of those that have ended, in the order of their starts.

    At most 50 are shown: those that run, then those that ended last. A table of forecasts is below if there is one for
    any name, a table of classes if the scheduler ranks any by what it learned, and a table of KV if any was lost.

    The columns are, with times in seconds:

    - threads: concurrent chains of calls
    - calls
    - tokens in/out: prompt tokens and generated tokens
    - service: time on the model executor along the longest chain of calls
    - wait: time in the scheduler's queue, summed over all calls
    - tools: interception, which is time between calls with no call in flight
    - preempt.: preemptions of the program's calls
    - took: time from start to end
    - state, or the tools that the program waits for
    - tenant, if the programs belong to more than one
    - due: seconds from the first call on within which the program should end, if any program has a deadline
    - in: the program inside which this one runs, if any program of the table runs inside another
    """
    rows = [*table, *table.ended()]  # those that have ended, the newest first
    shown = sorted(rows[:MOST_PROGRAMS], key=lambda row: row.start_s)
    title = "process table" + (f": {len(shown)} of {len(rows)} programs" if len(shown) < len(rows) else "")
    columns: _Columns[ProgramRow] = {
        "program": lambda row: row.info.name,
        "threads": lambda row: str(row.thread_count),
        "calls": lambda row: str(row.calls),
        "tokens\nin/out": lambda row: f"{row.account.prompt_tokens}/{row.account.output_tokens}",
        "service\ns": lambda row: seconds(row.attained.service_s),
        "wait\ns": lambda row: seconds(row.attained.total_wait_s),
        "tools\ns": lambda row: seconds(row.interception_s),
        "preempt.": lambda row: str(row.account.preemptions),
        "took\ns": lambda row: "" if math.isnan(row.end_s) else f"{row.end_s - row.start_s:.1f}",
        "state": lambda row: state_cell(row.state) if row.in_flight or not row.tools_running else f"in {_tools(row)}",
    }
    if len({row.info.tenant for row in shown}) > 1:
        columns["tenant"] = lambda row: row.info.tenant or ""
    if any(map(_due, shown)):
        columns["due"] = _due
    if any(row.info.parent_program_id is not None for row in shown):
        names = {row.info.program_id: row.info.name for row in rows}
        columns["in"] = lambda row: names.get(row.info.parent_program_id or "", row.info.parent_program_id or "")
    # The scheduler treats a class in a way of its own, or waits with its programs.
    is_special = any(row.branch is not Branch.QUEUES or row.held > 0 for row in table.classes)
    below = classes(table.classes) if is_special else None
    known_names = table.forecasts()
    if any(row.tier is not Tier.COLD for row in known_names):
        below = forecasts(known_names, below)
    if any(row.account.recomputed_tokens or _copied(row.account) for row in shown):
        below = kv(shown, below)
    # The name is narrow, so that the table fits a terminal of 80 columns.
    return _table(title, columns, shown, range(1, 9), widest=13, below=below)


def kv(rows: Sequence[ProgramRow], below: Table | None = None) -> Table:
    """A table of where the KV of programs' prompts came from, in tokens.

    The columns are:

    - found: on the device
    - fetched: copied from host memory when a call began, or began again after a preemption
    - again: computed again, though the same program had computed them before
    """
    columns: _Columns[ProgramRow] = {
        "program": lambda row: row.info.name,
        "tokens\nin": lambda row: str(row.account.prompt_tokens),
        "found": lambda row: str(row.account.found_tokens),
        "fetched": lambda row: str(_copied(row.account)),
        "again": lambda row: str(row.account.recomputed_tokens),
    }
    return _table("KV cache", columns, rows, range(1, 5), widest=13, below=below)


def classes(rows: Sequence[ClassRow]) -> Table:
    """A table of what the scheduler knows of each class of programs, at most 50, in the order of `rows`.

    Work is counted in output tokens; a computed prompt token counts as a part of one. The columns are:

    - class: the programs' name
    - ended: how many programs have ended
    - live: how many have not
    - held: how many of these the gate holds back
    - median and p95: the work that half of the programs, and 95 % of them, do not exceed; empty while it is unknown
    - ranked by: see `weft.core.class_rows.Branch`
    - tenant, if any class has one
    """
    shown = rows[:MOST_PROGRAMS]
    title = "classes" + (f": {len(shown)} of {len(rows)}" if len(shown) < len(rows) else "")
    columns: _Columns[ClassRow] = {
        "class": lambda row: row.name or "(no name)",
        "ended": lambda row: str(row.ended),
        "live": lambda row: str(row.live),
        "held": lambda row: str(row.held),
        "median\ntokens": lambda row: known(row.median_tokens),
        "p95\ntokens": lambda row: known(row.p95_tokens),
        "ranked by": lambda row: row.branch.value,
    }
    if any(row.tenant is not None for row in shown):
        columns["tenant"] = lambda row: row.tenant or ""
    return _table(title, columns, shown, range(1, 6))


def forecasts(rows: Sequence[ForecastRow], below: Table | None = None) -> Table:
    """A table of what the forecasts of each program name rest on, at most 50, in the order of `rows`.

    The columns are:

    - name
    - tier: see `weft.core.prediction.Tier`
    - ended: how many programs have ended
    - calls: the mean number of calls of a program
    - nodes: the pairs of label and tools that are told apart
    """
    shown = rows[:MOST_PROGRAMS]
    title = "forecasts" + (f": {len(shown)} of {len(rows)}" if len(shown) < len(rows) else "")
    columns: _Columns[ForecastRow] = {
        "name": lambda row: row.name or "(no name)",
        "tier": lambda row: str(row.tier),
        "ended": lambda row: str(row.ended),
        "calls": lambda row: "" if math.isnan(row.calls) else f"{row.calls:.1f}",
        "nodes": lambda row: str(row.nodes),
    }
    return _table(title, columns, shown, range(2, 5), below=below)


def facts(row: ProgramRow) -> Table:
    """A table of what a row says about its program, with one fact on each line."""
    info, account, attained = row.info, row.account, row.attained
    took_s = row.end_s - row.start_s

    def both(longest_s: float, all_s: float) -> str:
        return f"{seconds(longest_s)} s along the longest chain of calls, {seconds(all_s)} s in all"

    pairs = {
        "program": f"{info.name} ({info.program_id})",
        "inside": info.parent_program_id or "",
        "session": info.session_id,
        "tenant": info.tenant or "",
        "state": state_cell(row.state),
        "took": "" if math.isnan(took_s) else f"{seconds(took_s)} s",
        "due": f"{_due(row)} s after its first call" if _due(row) else "",
        "calls": f"{row.calls} in {row.thread_count} threads, {len(row.in_flight)} in flight",
        "service": both(attained.service_s, attained.total_service_s),
        "wait": both(attained.wait_s, attained.total_wait_s),
        "tools": f"{seconds(row.interception_s)} s between calls",
        "waits for": _tools(row),
        "tokens": f"{account.prompt_tokens} in, {account.output_tokens} out",
        "KV": f"{account.found_tokens} tokens found on the device, {account.fetched_tokens} fetched from host memory, "
        f"{account.recomputed_tokens} computed again",
        "preemptions": f"{account.preemptions}, {account.swapped_tokens} tokens swapped in"
        if account.preemptions
        else "",
        "engines": ", ".join(row.engine_ids),
    }
    return Table("", ("", ""), [(name, value) for name, value in pairs.items() if value], widest=90)


def state_cell(state: str) -> str | Cell:
    """A program's or a call's state, in its colour."""
    style = _STATE_STYLES.get(state)
    return Cell(str(state), style) if style else str(state)


def _due(row: ProgramRow) -> str:
    return "" if math.isinf(row.info.due_after_s) else seconds(row.info.due_after_s)


def _copied(account: Account) -> int:
    return account.fetched_tokens + account.swapped_tokens


def _tools(row: ProgramRow) -> str:
    """The names of the tools that run, each once. At most three are named."""
    names = list(dict.fromkeys(tool.name for tool in row.tools_running))
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _table(
    title: str,
    columns: _Columns[Row],
    rows: Sequence[Row],
    numbers: range,
    *,
    widest: int = 24,
    below: Table | None = None,
) -> Table:
    cells = [[text(row) for text in columns.values()] for row in rows]
    return Table(title, tuple(columns), cells, frozenset(numbers), widest, below)
