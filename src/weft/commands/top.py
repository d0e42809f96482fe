"""`weft top`: what an engine's programs do now."""

from __future__ import annotations

import asyncio
import sys
from shutil import get_terminal_size
from typing import Annotated

import typer

from weft.commands.shared import show
from weft.core.errors import MissingPackageError, pip_install

_URL = "http://localhost:8000"


def top(
    url: Annotated[
        str,
        typer.Argument(help="The address of `weft serve`, or of an engine with listen=...: http://..., or unix:/path."),
    ] = _URL,
    api_key: Annotated[
        str | None, typer.Option(envvar="WEFT_API_KEY", help="One of the server's keys. Only its programs are shown.")
    ] = None,
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between two updates.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print the table once, as plain text.")] = False,
) -> None:
    """Show the programs and replicas of an engine live: state, queue, service, wait, KV, tokens."""
    asyncio.run(_top(url, api_key, interval, once))


async def _top(url: str, api_key: str | None, interval_s: float, once: bool) -> None:
    from weft.views.top_client import StateClient

    async with StateClient(url, api_key) as client:
        state = await client.read()
        if once or not sys.stdout.isatty():
            from weft.views.top_table import Choice, programs, replicas

            show(replicas(state.replicas))
            typer.echo()
            show(programs(state, Choice(with_ended=True), get_terminal_size().columns))
            return
        try:
            from weft.views.top import TopApp
        except ImportError:
            raise MissingPackageError("weft top", ("textual",), f"`{pip_install('textual')}`") from None
        await TopApp(client, state, interval_s).run_async()
