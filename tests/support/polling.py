"""Waiting for a condition that no event announces."""

from __future__ import annotations

from collections.abc import Callable

import anyio


async def until(condition: Callable[[], object], limit_s: float = 300) -> None:
    """Wait until a condition holds. The limit only prevents a hang: no test asserts how long the wait takes."""
    with anyio.fail_after(limit_s):
        while not condition():  # noqa: ASYNC110  no event announces it
            await anyio.sleep(0.005)
