"""`weft top` at a real server: it shows the programs of its key, and ends one."""

from __future__ import annotations

import asyncio

import pytest
from polling import until
from served import KEY, Served
from textual.widgets import DataTable

from weft.core.errors import NotReachableError
from weft.views.top import TopApp
from weft.views.top_client import StateClient

pytestmark = [pytest.mark.engine, pytest.mark.anyio]


def names(app: TopApp) -> list[str]:
    table = app.screen_stack[0].query_one("#programs", DataTable)
    return [str(table.get_row_at(row)[0]).strip() for row in range(table.row_count)]


async def test_a_program_of_a_server_is_shown_and_ended(served: Served) -> None:
    """A call's program has its service and tokens. After the question the server has ended it."""
    headers = {"weft-program-id": "trips/17 ü".encode(), "weft-program-name": b"top-agent"}
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, "ignore_eos": True}
    call = await asyncio.to_thread(served.client.post, "/v1/chat/completions", json=body, headers=headers)
    assert call.status_code == 200, call.text
    async with StateClient(served.url, KEY) as client:
        app = TopApp(client, await client.read(), interval_s=1000)
        async with app.run_test(size=(80, 24)) as pilot:
            await pilot.press("slash", *"top-agent", "enter")
            assert names(app) == ["top-agent"]
            cells = [str(cell).strip() for cell in app.query_one("#programs", DataTable).get_row_at(0)]
            assert cells[1] == "idle"
            assert float(cells[3]) >= 0
            assert (cells[6], cells[8]) == ("1", "4")
            await pilot.press("x", "y")
            await until(lambda: names(app) == [])
        ended = (await client.read()).ended[0]
    assert (ended.name, ended.state, ended.output_tokens) == ("top-agent", "finished", 4)


async def test_a_wrong_key_is_refused(served: Served) -> None:
    """The error says what to give."""
    async with StateClient(served.url, "wrong") as client:
        with pytest.raises(NotReachableError, match="give --api-key"):
            await client.read()
