"""`weft top` in a terminal, at an engine that listens: what it shows, and what its keys do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from polling import until
from textual.pilot import Pilot
from textual.widgets import DataTable, Static

import weft
from weft.testing import FakeClock, ScriptedEngine
from weft.views.top import TopApp
from weft.views.top_client import StateClient
from weft.views.top_screens import ConfirmEnd, Inspect

pytestmark = pytest.mark.anyio

HOSTILE = "\x1b[2J[bold]x[/bold] " + "n" * 10_000


def shown(app: TopApp) -> list[list[str]]:
    """The table's cells, as texts."""
    table = app.screen_stack[0].query_one("#programs", DataTable)
    return [[str(cell).strip() for cell in table.get_row_at(row)] for row in range(table.row_count)]


def text_of(app: TopApp, selector: str) -> str:
    return str(app.screen.query_one(selector, Static).content)


def heading(app: TopApp) -> str:
    """The heading of the column that orders the table."""
    table = app.query_one("#programs", DataTable)
    columns = table.ordered_columns
    return next(column.label.plain.strip() for column in columns if "underline" in str(column.label.spans))  # type: ignore[union-attr]


class Agents:
    """An engine that listens, with programs whose calls wait for a clock."""

    def __init__(self, listen: str = "127.0.0.1:0") -> None:
        self.clock = FakeClock(100.0)
        self.engine = ScriptedEngine(lambda _body: "Hi there", latency_s=5.0, clock=self.clock, listen=listen)
        self.programs: dict[str, weft.Program] = {}
        self.calls: list[asyncio.Task[Any]] = []

    async def ask(self, name: str) -> None:
        """A program makes a call, which waits."""
        program = self.programs.setdefault(name, weft.Program(name))
        body = {"messages": [{"role": "user", "content": "Hello"}]}
        self.calls.append(asyncio.ensure_future(self.engine.chat(body, program, program.reports.start_call(object()))))
        await self.engine.until_waiting(sum(not call.done() for call in self.calls))

    async def answer(self) -> None:
        """All calls get their answers."""
        self.clock.advance(5.0)
        await asyncio.gather(*self.calls, return_exceptions=True)


@asynccontextmanager
async def running(agents: Agents, *, width: int = 80, looks: bool = False) -> AsyncIterator[tuple[TopApp, Pilot[None]]]:
    """The app. It looks again only where the test says so, because keys wait for an app that is idle."""
    assert agents.engine.url is not None
    async with StateClient(agents.engine.url) as client:
        app = TopApp(client, await client.read(), interval_s=0.05 if looks else 1000)
        async with app.run_test(size=(width, 24)) as pilot:
            await pilot.pause()
            yield app, pilot


@pytest.fixture
async def agents() -> AsyncIterator[Agents]:
    """Two programs that have an answer, one of them in a tool."""
    made = Agents()
    with made.engine:
        await made.ask("planner")
        await made.ask("coder")
        await made.answer()
        made.engine.programs.tool_started(made.programs["coder"].program_id, 1, "search")
        yield made
        for call in made.calls:
            call.cancel()


async def test_programs_are_shown_as_they_change(agents: Agents) -> None:
    """A call that begins, and its answer, appear without a key."""
    async with running(agents, looks=True) as (app, _pilot):
        assert [row[:2] for row in shown(app)] == [["coder", "in search"], ["planner", "idle"]]
        assert "2 programs: 1 in a tool, 1 idle" in text_of(app, "#summary")
        assert "engine-" in text_of(app, "#replicas")
        await agents.ask("planner")
        await until(lambda: ["planner", "running"] in [row[:2] for row in shown(app)])
        assert shown(app)[0][:7] == ["planner", "running", "", "5.00", "0.00", "", "2"], "those that run lead"
        await agents.answer()
        await until(lambda: any(row[3] == "10.0" for row in shown(app)))


async def test_the_order_is_chosen_with_keys(agents: Agents) -> None:
    """> and < go to the next column and back, r turns the order round. The program that was chosen stays chosen."""
    async with running(agents) as (app, pilot):
        assert heading(app) == "state"
        await pilot.press("less_than_sign")
        assert (heading(app), [row[0] for row in shown(app)]) == ("program", ["coder", "planner"])
        await pilot.press("down", "r")
        assert [row[0] for row in shown(app)] == ["planner", "coder"]
        assert app.query_one("#programs", DataTable).cursor_row == 0, "it is the planner yet"
        for _ in range(20):
            await pilot.press("greater_than_sign")
            assert heading(app) in {"program", "state", "queue", "service", "wait", "KV", "calls", "in", "out"}


async def test_a_text_filters_programs(agents: Agents) -> None:
    """The table follows each letter. Enter leaves the field, and Escape shows all again."""
    async with running(agents) as (app, pilot):
        await pilot.press("slash", *"sear")
        assert [row[0] for row in shown(app)] == ["coder"]
        assert 'only "sear"' in text_of(app, "#summary")
        await pilot.press("enter", "r")
        assert [row[0] for row in shown(app)] == ["coder"], "r is a key again, and not a letter"
        await pilot.press("escape")
        assert len(shown(app)) == 2


async def test_a_program_is_inspected(agents: Agents) -> None:
    """Enter shows one program in full with its calls, and follows it."""
    async with running(agents, looks=True) as (app, pilot):
        await pilot.press("enter")
        assert isinstance(app.screen, Inspect)
        assert agents.programs["coder"].program_id in text_of(app, "#facts")
        assert "search" in text_of(app, "#facts")
        await until(lambda: "calls, the latest first" in text_of(app, "#calls"))
        assert text_of(app, "#calls").splitlines()[3].split()[0] == "1*", "its only thread, on the critical path"
        agents.engine.programs.tools_ended(agents.programs["coder"].program_id, [1])
        await until(lambda: "idle" in text_of(app, "#facts"))
        await pilot.press("escape")
        assert not isinstance(app.screen, Inspect)


async def test_a_program_is_ended_after_a_question(agents: Agents) -> None:
    """No key but y ends it. What has ended is shown if asked for."""
    async with running(agents) as (app, pilot):
        for answer in ("n", "escape"):
            await pilot.press("x")
            assert isinstance(app.screen, ConfirmEnd)
            await pilot.press(answer)
        assert len(shown(app)) == 2
        await pilot.press("x", "y")
        await until(lambda: [row[0] for row in shown(app)] == ["planner"])
        assert agents.engine.row(agents.programs["coder"].program_id) is None
        await pilot.press("e")
        assert [row[:2] for row in shown(app)] == [["planner", "idle"], ["coder", "cancelled"]]


async def test_a_server_that_restarts_is_found_again() -> None:
    """While it is away the last state stays, with a line that says so."""
    agents = Agents()
    url = agents.engine.url
    assert url is not None
    await agents.ask("planner")
    async with running(agents, looks=True) as (app, _pilot):
        agents.engine.shutdown()
        await until(lambda: "not reachable, trying again" in text_of(app, "#note"))
        assert [row[0] for row in shown(app)] == ["planner"]
        again = Agents(listen=url.removeprefix("http://"))
        with again.engine:
            await again.ask("coder")
            await until(lambda: [row[0] for row in shown(app)] == ["coder"])
            assert text_of(app, "#note") == ""
            await again.answer()
    await asyncio.gather(*agents.calls, return_exceptions=True)


@pytest.mark.parametrize("width", [20, 80])
async def test_hostile_names_are_shown_harmlessly(width: int) -> None:
    """Control characters and markup mean nothing, and a long name stays in its cell. A narrow terminal will do."""
    agents = Agents()
    with agents.engine:
        await agents.ask(HOSTILE)
        await agents.answer()
        agents.engine.programs.tool_started(agents.programs[HOSTILE].program_id, 1, HOSTILE)
        async with running(agents, width=width) as (app, pilot):
            name, state, *_ = shown(app)[0]
            assert name == "?[2J[bold]x[/b…"
            assert state == "in  [2J[bold]x[…"
            await pilot.press("enter")
            assert "[2J[bold]" in text_of(app, "#facts")
            assert "\x1b" not in text_of(app, "#facts")
            await pilot.press("escape", "x")
            assert "\x1b" not in str(app.screen.query(Static).first().content)
            assert "\x1b" not in app.export_screenshot()
