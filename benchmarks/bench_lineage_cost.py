"""CPU time that lineage takes for a turn of a long conversation, and how long a request of 20 MB holds up others.

The conversation has 200 turns and 100,000 characters, and no id. Each round begins with a new `Lineage` and reports the
median of its last ten turns. The large request is read and placed on another thread, as in the server, while a task of
the event loop wants to run each millisecond. Printed are medians, with the lowest and the highest.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import statistics
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final

import typer
from common import machine, spread

from weft.core.identity.items import items_of_answer
from weft.core.identity.lineage import Lineage
from weft.core.identity.sources import Evidence
from weft.engine.serve.requests import SharedLineage

TURNS: Final = 200
CHARACTERS: Final = 100_000
ROUNDS: Final = 20
LARGE_BYTES: Final = 20_000_000
WORDS: Final = ("harbour", "keeper", "counted", "ships", "night", "train", "river", "plant", "light", "gull")


def text(rng: random.Random, characters: int) -> str:
    """Words of about so many characters."""
    return " ".join(rng.choice(WORDS) for _ in range(characters // 7))


def turn_ms(rng: random.Random, *, has_tools: bool) -> float:
    """The CPU milliseconds of a turn at the end of a conversation, half of whose messages are answers."""
    lineage, messages = Lineage(), [{"role": "system", "content": text(rng, 500)}]
    each = CHARACTERS // TURNS // 2
    spent_ms, call_id = [], ""
    for turn in range(TURNS):
        asked: dict[str, Any] = {"role": "user", "content": text(rng, each)}
        answer: dict[str, Any] = {"role": "assistant", "content": text(rng, each)}
        if has_tools and turn % 2:
            asked = {"role": "tool", "tool_call_id": call_id, "content": text(rng, each)}
        elif has_tools:
            call_id = f"chatcmpl-tool-{rng.getrandbits(64):016x}"
            call = {"name": "search", "arguments": json.dumps({"words": text(rng, each)})}
            answer = {"role": "assistant", "content": None, "tool_calls": [{"id": call_id, "function": call}]}
        messages.append(asked)
        body = json.loads(json.dumps({"messages": messages}))
        begin_s = time.thread_time()
        placed = lineage.place(Evidence(), body, "-", ":1")
        lineage.answered(placed, items_of_answer({"choices": [{"message": answer}]}), "-", None)
        spent_ms.append(1e3 * (time.thread_time() - begin_s))
        messages.append(answer)
    return statistics.median(spent_ms[-10:])


async def pause_ms(work: Callable[[], Awaitable[object]]) -> float:
    """The longest pause in milliseconds of a task that wants to run each millisecond, while other work goes on."""
    longest_s, last_s = 0.0, time.perf_counter()
    working = asyncio.ensure_future(work())
    while not working.done():
        await asyncio.sleep(0.001)
        now_s = time.perf_counter()
        longest_s, last_s = max(longest_s, now_s - last_s), now_s
    await working
    return 1e3 * longest_s


async def pauses(large: bytes) -> None:
    """Print the longest pauses that each part of a large request's identification makes, as the server does it."""

    async def idle() -> None:
        await asyncio.sleep(0.3)

    async def read() -> None:
        requests.append(await asyncio.to_thread(json.loads, large))

    async def place() -> None:
        await SharedLineage(Lineage()).place(Evidence(), requests[-1], "-", ":1", is_large=True)

    requests: list[Any] = []
    for name, work in (("nothing", idle), ("reading its JSON", read), ("finding its program", place)):
        found = [await pause_ms(work) for _ in range(5)]
        typer.echo(f"longest pause of other tasks by {name}: {spread(found, 0)} ms")


def main() -> None:
    """Print the figures."""
    typer.echo(f"{machine()} load {os.getloadavg()[0]:.0f}")
    for has_tools in (False, True):
        found = [turn_ms(random.Random(seed), has_tools=has_tools) for seed in range(ROUNDS)]
        typer.echo(f"turn {TURNS}, {'with tool calls' if has_tools else 'texts alone'}: {spread(found)} ms")
    content = text(random.Random(0), LARGE_BYTES)
    asyncio.run(pauses(json.dumps({"messages": [{"role": "user", "content": content}]}).encode()))


if __name__ == "__main__":
    typer.run(main)
