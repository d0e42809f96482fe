"""`weft top`: what an engine's programs do now."""

from __future__ import annotations

import asyncio
import sys
from typing import Annotated

import typer

from weft.core.errors import MissingPackageError

_URL = "http://localhost:8000"


def top(
    url: Annotated[
        str, typer.Argument(help="Of `weft serve`, or of an engine with listen=...: http://..., or unix:/path.")
    ] = _URL,
    api_key: Annotated[
        str | None, typer.Option(envvar="WEFT_API_KEY", help="A key of the server, whose programs are shown.")
    ] = None,
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between two looks.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print the table once, as plain text.")] = False,
) -> None:
    """Show the programs of an engine live: service, wait, queue, state, KV, tokens; with the replicas above."""
    asyncio.run(_top(url, api_key, interval, once))


async def _top(url: str, api_key: str | None, interval_s: float, once: bool) -> None:
    from weft.views.top_client import StateClient

    async with StateClient(url, api_key) as client:
        state = await client.read()
        if once or not sys.stdout.isatty():
            from rich.console import Console

            from weft.views.top_table import Choice, programs, replicas

            console = Console(highlight=False)
            console.print(replicas(state.replicas))
            console.print()
            console.print(programs(state, Choice(with_ended=True), console.width))
            return
        try:
            from weft.views.top import TopApp
        except ImportError:
            raise MissingPackageError("weft top", ("textual",), "pip install 'weft[top]'") from None
        await TopApp(client, state, interval_s).run_async()
