"""The table of `weft top`: its columns, its order and its filter."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from weft.core.show import LiveProgram, LiveReplica, LiveState
from weft.core.tables import Cell, Table, one_line

STYLES: Final = {
    "running": "bold green",
    "waiting": "yellow",
    "tool": "cyan",
    "idle": "",
    "finished": "dim",
    "failed": "red",
    "cancelled": "dim yellow",
    "abandoned": "dim magenta",
    "ready": "green",
    "starting": "yellow",
    "draining": "yellow",
    "down": "red",
}
_STATES: Final = {"running": 0, "waiting": 1, "tool": 2, "idle": 3}
_NO_NAME: Final = "program"  # that of `weft.Program()`
_BAR: Final = 10  # columns of a terminal


class Column(NamedTuple):
    """A column of programs."""

    key: str  # its name where the order is chosen
    heading: str
    width: int  # columns of a terminal
    text: Callable[[LiveProgram], str]
    order: Callable[[LiveProgram], Any]
    is_number: bool = True  # aligned to the right, the largest first
    terminal: int = 0  # columns that a terminal needs to show this one


def label(program: LiveProgram) -> str:
    """A program's name, or its id where nobody has named it."""
    return program.name if program.name.strip() not in ("", _NO_NAME) else program.program_id


def _queue_order(program: LiveProgram) -> tuple[float, ...]:
    return tuple(-math.inf if each is None else -each for each in (program.level, program.place))


def state_text(program: LiveProgram) -> str:
    """A program's state, or the tools that it waits for."""
    return f"in {', '.join(program.tools)}" if program.state == "tool" else program.state


COLUMNS: Final = (
    Column("name", "program", 15, label, lambda p: label(p).casefold(), is_number=False),
    Column("state", "state", 16, state_text, lambda p: _STATES.get(p.state, 4), is_number=False),
    Column("queue", "queue", 5, lambda p: p.queue, _queue_order),
    Column("service", "service", 7, lambda p: seconds(p.service_s), lambda p: p.service_s),
    Column("wait", "wait", 7, lambda p: seconds(p.wait_s), lambda p: p.wait_s),
    Column("kv", "KV", 5, lambda p: "" if p.kv_tokens is None else count(p.kv_tokens), lambda p: _known(p.kv_tokens)),
    Column("calls", "calls", 5, lambda p: count(p.calls), lambda p: p.calls),
    Column("in", "in", 5, lambda p: count(p.prompt_tokens), lambda p: p.prompt_tokens),
    Column("out", "out", 5, lambda p: count(p.output_tokens), lambda p: p.output_tokens),
    Column("age", "age", 7, lambda p: seconds(p.age_s), lambda p: p.age_s, terminal=88),
    Column("tools", "tools", 7, lambda p: seconds(p.tools_s), lambda p: p.tools_s, terminal=95),
    Column("replica", "replica", 12, lambda p: ", ".join(p.engine_ids), lambda p: p.engine_ids, False, 108),
    Column("preempt", "pre.", 4, lambda p: count(p.preemptions), lambda p: p.preemptions, terminal=113),
    Column("tenant", "tenant", 10, lambda p: p.tenant or "", lambda p: p.tenant or "", False, 124),
)


@dataclass
class Choice:
    """Which programs are shown, and in which order.

    Attributes:
        order: The key of a column.
        is_reversed: Whether the order is reversed.
        text: Only programs with this text in an id, a name, their state or a tool are shown. Its case does not matter.
        with_ended: Whether programs that have ended follow the open ones.
    """

    order: str = "state"
    is_reversed: bool = False
    text: str = ""
    with_ended: bool = False

    def programs(self, state: LiveState) -> list[LiveProgram]:
        """The programs to show."""
        shown = self._in_order(filter(self._fits, state.programs))
        return shown + [each for each in state.ended if self._fits(each)] if self.with_ended else shown

    def next_order(self, step: int) -> None:
        """Order by the next column, or by the one before."""
        keys = [column.key for column in COLUMNS]
        self.order, self.is_reversed = keys[(keys.index(self.order) + step) % len(keys)], False

    def _in_order(self, programs: Iterable[LiveProgram]) -> list[LiveProgram]:
        column = next(column for column in COLUMNS if column.key == self.order)
        return sorted(programs, key=column.order, reverse=column.is_number != self.is_reversed)

    def _fits(self, program: LiveProgram) -> bool:
        text = self.text.casefold()
        places = program.name, program.program_id, program.session_id, program.tenant or "", state_text(program)
        return any(text in place.casefold() for place in (*places, *program.engine_ids))


def columns_for(terminal: int) -> list[Column]:
    return [column for column in COLUMNS if column.terminal <= terminal]


def seconds(value: float) -> str:
    """A duration in at most six letters: "0.52", "75.0", "12m30s", "3h05m", "12d"."""
    if not math.isfinite(value):  # no server of ours says so
        return "?"
    if value < 100:
        return f"{value:.2f}" if value < 10 else f"{value:.1f}"
    minutes, rest = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours // 24}d" if hours >= 100 else f"{hours}h{minutes:02}m" if hours else f"{minutes}m{rest:02}s"


def count(value: int) -> str:
    """A number in at most five letters: "9999", "12.3k", "123k", "1.2M"."""
    for unit, name in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if value >= max(unit, 10_000):
            return f"{value / unit:.1f}{name}" if value < 100 * unit else f"{value // unit}{name}"
    return str(value)


def bar(share: float) -> str:
    """A share between 0 and 1 as a bar of ten letters and a percentage."""
    share = share if 0 <= share <= 1 else 0.0
    full = round(share * _BAR)
    return f"{'█' * full}{'░' * (_BAR - full)} {share:4.0%}"


def short_name(model: str) -> str:
    """The last part of a model's name, which may be a path."""
    return model.rstrip("/").rpartition("/")[2] or model


def replicas(found: Iterable[LiveReplica]) -> Table:
    """The replicas and their queues."""
    rows: list[list[str | Cell]] = [
        [
            each.engine_id,
            Cell(each.state, STYLES.get(each.state, "")),
            "?" if each.running is None else str(each.running),
            "?" if each.waiting is None else str(each.waiting),
            str(each.calls),
            "?" if each.kv_used is None else bar(each.kv_used),
            str(each.deaths),
            str(each.stolen),
            short_name(each.model),
        ]
        for each in found
    ]
    headings = ("replica", "state", "running", "waiting", "calls", "KV cache", "deaths", "stolen", "model")
    return Table("", headings, rows, frozenset({2, 3, 4, 6, 7}), widest=16)


def programs(state: LiveState, choice: Choice, terminal: int) -> Table:
    """The programs as plain text."""
    columns = columns_for(terminal)
    rows = [
        [Cell(column.text(each), STYLES.get(each.state, "")) if column.key == "state" else column.text(each)
         for column in columns]
        for each in choice.programs(state)
    ]  # fmt: skip
    numbers = frozenset(number for number, column in enumerate(columns) if column.is_number)
    return Table(summary(state), [column.heading for column in columns], rows, numbers, widest=16)


def summary(state: LiveState) -> str:
    """How many programs are in which state, in a line."""
    counts = {name: sum(each.state == name for each in state.programs) for name in _STATES}
    parts = [f"{number} {'in a tool' if name == 'tool' else name}" for name, number in counts.items() if number]
    more = state.programs_total - len(state.programs)
    shown = f" (the {len(state.programs)} that were used last)" if more > 0 else ""
    total = f"{state.programs_total} program{'' if state.programs_total == 1 else 's'}"
    return one_line(f"{total}{shown}{': ' if parts else ''}{', '.join(parts)}")


def _known(value: float | None) -> float:
    return -1 if value is None else value
