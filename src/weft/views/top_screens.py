"""The screens that `weft top` shows over its table: one program, and the question before it is ended."""

from __future__ import annotations

from typing import ClassVar, Final

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Static

from weft.core.process_view import state_cell
from weft.core.show import LiveProgram, LiveState, Timeline
from weft.core.tables import Table, one_line
from weft.views.top_table import count, seconds, state_text

_MOST_CALLS: Final = 50
_BOX = """
{0} {{ align: center middle; background: transparent; }}
{0} > VerticalScroll {{
    width: 78; max-width: 100%; height: auto; max-height: 100%;
    border: round ansi_blue; background: ansi_default; padding: 0 1;
}}
{0} Static {{ height: auto; }}
{0} #calls {{ margin: 1 0; }}
"""


class Inspect(ModalScreen[None]):
    """Shows all that is known of a program."""

    CSS = _BOX.format("Inspect")
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,enter,q", "dismiss", "Back")]

    def __init__(self, program: LiveProgram) -> None:
        super().__init__()
        self._program = program
        self._facts = Static(facts(program), id="facts", markup=False)
        self._calls = Static(id="calls", markup=False)

    @property
    def program_id(self) -> str:
        return self._program.program_id

    def compose(self) -> ComposeResult:
        with VerticalScroll():
            yield self._facts
            yield self._calls
            yield Static("Escape: back", markup=False)

    def show(self, state: LiveState) -> None:
        """Show the program as it is by now."""
        programs = (*state.programs, *state.ended)
        found = next((each for each in programs if each.program_id == self._program.program_id), None)
        if found is not None:
            self._program = found
            self._facts.update(facts(found))

    def show_calls(self, timeline: Timeline) -> None:
        """Show the program's calls by now."""
        self._calls.update(calls(timeline))


class ConfirmEnd(ModalScreen[bool]):
    """Asks before a program is ended."""

    CSS = _BOX.format("ConfirmEnd")
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y", "dismiss(True)", "End it"),
        Binding("n,escape,q", "dismiss(False)", "Leave it"),
    ]

    def __init__(self, program: LiveProgram) -> None:
        super().__init__()
        self._program = program

    def compose(self) -> ComposeResult:
        program = self._program
        calls = program.calls_in_flight
        consequence = f" Its {calls} call{'' if calls == 1 else 's'} in flight will be aborted." if calls else ""
        with VerticalScroll():
            yield Static(one_line(f"End {program.name:.60} ({program.program_id})?{consequence}"), markup=False)
            yield Static("y: end it   n: leave it", markup=False)


def facts(program: LiveProgram) -> Table:
    """What is known of a program, one fact a line."""
    due_s = program.due_in_s
    ended_s = program.ended_ago_s
    pairs = {
        "program": program.name,
        "id": program.program_id,
        "session": program.session_id,
        "tenant": program.tenant or "",
        "inside": program.parent_program_id or "",
        "state": state_text(program) + (f", {seconds(ended_s)} ago" if ended_s is not None else ""),
        "waits for": ", ".join(program.tools),
        "queue": program.queue,
        "age": seconds(program.age_s),
        "due": "" if due_s is None else f"in {seconds(due_s)}" if due_s >= 0 else f"{seconds(-due_s)} late",
        "calls": f"{program.calls} in {program.threads} thread{'' if program.threads == 1 else 's'}, "
        f"{program.calls_in_flight} in flight",
        "service": f"{seconds(program.service_s)} along the longest chain of calls",
        "wait": f"{seconds(program.wait_s)} in queues, over all calls",
        "tools": f"{seconds(program.tools_s)} between calls",
        "tokens": f"{count(program.prompt_tokens)} in, {count(program.output_tokens)} out",
        "KV": "" if program.kv_tokens is None else f"{count(program.kv_tokens)} tokens",
        "preempted": count(program.preemptions),
        "replicas": ", ".join(program.engine_ids),
    }
    return Table("", ("", ""), [(name, value) for name, value in pairs.items() if value], widest=60)


def calls(timeline: Timeline) -> Table:
    """A program's calls, the latest first; those of its critical path have a mark."""
    rows = [
        [
            f"{call.lane + 1}{'*' if call.is_critical else ''}",
            call.label,
            state_cell(call.state),
            seconds(call.start_s),
            seconds(call.wait_s),
            seconds(call.service_s),
            count(call.prompt_tokens),
            count(call.output_tokens),
        ]
        for call in reversed(timeline.calls[-_MOST_CALLS:])
    ]
    more = len(timeline.calls) + timeline.calls_left_out - len(rows)
    title = f"the latest {len(rows)} calls, and {more} before" if more else "calls, the latest first"
    headings = ("thread", "call", "state", "at", "wait", "service", "in", "out")
    return Table(f"{title}; * on the critical path", headings, rows, frozenset({3, 4, 5, 6, 7}), widest=14)
