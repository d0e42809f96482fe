"""`weft top`: the programs of an engine, live in a terminal."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import replace
from typing import ClassVar, Final

from rich.text import Text
from textual import on
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.coordinate import Coordinate
from textual.events import Resize
from textual.theme import BUILTIN_THEMES
from textual.widgets import DataTable, Footer, Input, Static

from weft.core.errors import NotReachableError
from weft.core.show import LiveProgram, LiveState
from weft.core.tables import one_line
from weft.views.top_client import StateClient
from weft.views.top_screens import ConfirmEnd, Inspect
from weft.views.top_table import STYLES, Choice, Column, columns_for, replicas, short_name, summary

# The terminal's own colours, so that it suits dark and light ones.
_ANSI: Final = BUILTIN_THEMES["ansi-dark"]
_THEME: Final = replace(
    _ANSI,
    name="weft",
    primary="ansi_blue",
    accent="ansi_blue",
    variables={
        **_ANSI.variables,
        "block-cursor-background": "ansi_blue",
        "block-cursor-foreground": "ansi_bright_white",
        "block-cursor-text-style": "none",
        "border": "ansi_blue",
        "footer-key-foreground": "ansi_blue",
        "scrollbar": "ansi_blue",
        "scrollbar-background": "ansi_default",
    },
)


class TopApp(App[None]):
    """Shows an engine's state, and keeps it up to date.

    Args:
        interval_s: Seconds between two updates.
    """

    CSS = """
    #title, #note { height: 1; }
    #title { text-style: bold; }
    #title, #note, #summary { text-wrap: nowrap; text-overflow: ellipsis; }
    #note { color: ansi_red; display: none; }
    #note.shown { display: block; }
    #replicas { height: auto; max-height: 8; overflow-y: auto; margin-bottom: 1; }
    #summary { height: 1; text-style: italic; }
    #programs { height: 1fr; }
    #programs > .datatable--header { text-style: bold; background: ansi_default; color: ansi_default; }
    #filter { display: none; height: 1; border: none; padding: 0; }
    #filter.shown { display: block; }
    """
    ENABLE_COMMAND_PALETTE = False
    TITLE = "weft top"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "Quit"),
        Binding("slash", "filter", "Filter", key_display="/"),
        Binding("greater_than_sign", "order(1)", "Order", key_display="< >"),
        Binding("less_than_sign", "order(-1)", show=False),
        Binding("r", "reverse", "Reverse"),
        Binding("e", "ended", "Ended"),
        Binding("i", "inspect", "Inspect", key_display="Enter"),
        Binding("x", "end", "End program"),
        Binding("escape", "clear", show=False),
    ]

    def __init__(self, client: StateClient, state: LiveState, interval_s: float = 1.0) -> None:
        super().__init__()
        self.state = state
        self._client = client
        self._interval_s = interval_s
        self._choice = Choice()
        self._shown: list[LiveProgram] = []
        self._columns: list[Column] = []
        self._title = Static(id="title", markup=False)
        self._note = Static(id="note", markup=False)
        self._replicas = Static(id="replicas", markup=False)
        self._summary = Static(id="summary", markup=False)
        self._table: DataTable[Text] = DataTable(id="programs", cursor_type="row", cell_padding=0)
        self._filter = Input(id="filter", placeholder="program, state, tool, tenant, replica", compact=True)
        self.register_theme(_THEME)
        self.theme = "weft"

    def compose(self) -> ComposeResult:
        yield from (self._title, self._note, self._replicas, self._summary, self._table, self._filter)
        yield Footer(show_command_palette=False, compact=True)

    def on_mount(self) -> None:
        self._table.focus()
        self.run_worker(self._poll(), exclusive=True)

    async def _poll(self) -> None:
        while True:
            await asyncio.sleep(self._interval_s)
            await self._read()

    async def _read(self) -> None:
        try:
            self.state = await self._client.read()
        except NotReachableError as error:
            reason = str(error).partition(": ")[2] if self.size.width > 120 else ""
            self._tell(f"not reachable, trying again{f' ({reason})' if reason else ''}")
        else:
            self._tell("")
            self.show()
            await self._read_timeline()

    async def _read_timeline(self) -> None:
        """Read the calls of the program that is inspected."""
        for screen in self.screen_stack:
            if isinstance(screen, Inspect):
                with suppress(NotReachableError):  # the state says so
                    timeline = await self._client.timeline(screen.program_id)
                    if timeline is not None:
                        screen.show_calls(timeline)

    def _tell(self, text: str) -> None:
        self._note.update(one_line(text))
        self._note.set_class(bool(text), "shown")

    # -- what is shown

    @on(Resize)
    def _resized(self) -> None:
        self.show()

    def show(self) -> None:
        """Show the state as it was last read."""
        state, choice = self.state, self._choice
        parts = ("weft top", self._client.url, state.policy, short_name(state.model))
        self._title.update(one_line("  ".join(parts)))
        self._replicas.update(replicas(state.replicas))
        filtered = f'  only "{choice.text}"' if choice.text else ""
        self._summary.update(one_line(summary(state) + filtered))
        self._show_programs()
        for screen in self.screen_stack:
            if isinstance(screen, Inspect):
                screen.show(state)

    def _show_programs(self) -> None:
        table, before = self._table, self._selected
        columns = columns_for(self.size.width)
        scroll = table.scroll_offset
        if columns != self._columns:
            self._columns = columns
            table.clear(columns=True)
        else:
            table.clear()
        if not table.columns:
            for column in columns:
                table.add_column(self._heading(column), width=column.width + 1, key=column.key)
        for column in columns:
            table.columns[column.key].label = self._heading(column)  # type: ignore[index]  # a key may be a text
        self._shown = self._choice.programs(self.state)
        for number, program in enumerate(self._shown):
            table.add_row(*(_cell(program, column) for column in columns), key=str(number))
        ids = [program.program_id for program in self._shown]
        if before is not None and before.program_id in ids:
            table.cursor_coordinate = Coordinate(ids.index(before.program_id), 0)
        table.scroll_to(scroll.x, scroll.y, animate=False)

    def _heading(self, column: Column) -> Text:
        heading = _aligned(column, column.heading, "bold")
        if column.key == self._choice.order:
            heading.highlight_words([column.heading], "underline")
        return heading

    @property
    def _selected(self) -> LiveProgram | None:
        row = self._table.cursor_row
        return self._shown[row] if 0 <= row < len(self._shown) else None

    # -- what the user does

    def action_order(self, step: int) -> None:
        self._choice.next_order(step)
        if self._choice.order not in {column.key for column in self._columns}:  # it is not shown
            self.action_order(step)
            return
        self.show()

    @on(DataTable.HeaderSelected)
    def _header_selected(self, event: DataTable.HeaderSelected) -> None:
        key = str(event.column_key.value)
        self._choice.is_reversed = key == self._choice.order and not self._choice.is_reversed
        self._choice.order = key
        self.show()

    def action_reverse(self) -> None:
        self._choice.is_reversed = not self._choice.is_reversed
        self.show()

    def action_ended(self) -> None:
        self._choice.with_ended = not self._choice.with_ended
        self.show()

    def action_filter(self) -> None:
        self._filter.add_class("shown")
        self._filter.focus()

    @on(Input.Changed, "#filter")
    def _filter_changed(self, event: Input.Changed) -> None:
        self._choice.text = event.value
        self.show()

    @on(Input.Submitted, "#filter")
    def _leave_filter(self) -> None:
        self._filter.set_class(bool(self._choice.text), "shown")
        self._table.focus()

    def action_clear(self) -> None:
        self._filter.value = ""
        self._choice.text = ""
        self._leave_filter()

    def action_inspect(self) -> None:
        program = self._selected
        if program is not None:
            self.push_screen(Inspect(program))
            self.run_worker(self._read_timeline())

    @on(DataTable.RowSelected)
    def _row_selected(self) -> None:
        self.action_inspect()

    def action_end(self) -> None:
        program = self._selected
        if program is not None and program.is_open:
            self.push_screen(ConfirmEnd(program), lambda is_sure: self._end(program, is_sure))

    def _end(self, program: LiveProgram, is_sure: bool | None) -> None:
        if is_sure:
            self.run_worker(self._end_on_server(program))

    async def _end_on_server(self, program: LiveProgram) -> None:
        try:
            await self._client.end(program.program_id)
        except NotReachableError as error:
            self._tell(str(error))
        else:
            await self._read()


def _cell(program: LiveProgram, column: Column) -> Text:
    style = STYLES.get(program.state, "") if column.key == "state" else "" if program.is_open else "dim"
    return _aligned(column, column.text(program), style)


def _aligned(column: Column, text: str, style: str) -> Text:
    """A text that fits its column, whatever it has. Markup in it means nothing."""
    cell = Text(one_line(text[: 4 * column.width]), style=style, no_wrap=True, end="")
    cell.truncate(column.width, overflow="ellipsis")
    cell.align("right" if column.is_number else "left", column.width)
    return cell
