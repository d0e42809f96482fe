"""CPU time that lineage takes for a turn of a long conversation, and for how long a request of 20 MB holds up others.

The conversation has 200 turns and 100,000 characters, and no id. Each round begins with a new `Lineage` and reports the
median of its last ten turns. The large request is read and placed on another thread, as in the server, so it holds up
others for as long as its longest step keeps Python's lock. With `--server` it is also sent to the scripted server, and
to vLLM's application in it without Weft's part, while a task of the event loop wants to run each half millisecond.
Printed are medians, with the lowest and the highest.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from common import machine, spread

from weft.core.identity.items import items_of_answer
from weft.core.identity.lineage import Lineage
from weft.core.identity.sources import Evidence
from weft.engine.http.bodies import read_json
from weft.engine.multi import AsyncMultiLLMEngine
from weft.engine.serve import server
from weft.testing import ScriptedServer

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


def longest_step_ms(work: Callable[[], object]) -> float:
    """The most CPU milliseconds between two calls or returns of functions. In none of these steps does Python's lock
    change hands, unless the step is one of Python's own code."""
    longest_s = last_s = 0.0

    def note(*_event: object) -> None:
        nonlocal longest_s, last_s
        longest_s = max(longest_s, time.thread_time() - last_s)
        last_s = time.thread_time()

    last_s = time.thread_time()
    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return 1e3 * longest_s


def steps(kind: str, texts: list[str]) -> None:
    """Print the longest step of what is done with a large request on another thread."""
    messages = [{"role": ("user", "assistant")[n % 2], "content": each} for n, each in enumerate(texts)]
    large = json.dumps({"messages": messages}).encode()
    request = read_json(large)
    for name, work in (
        ("json.loads", lambda: json.loads(large)),
        ("Weft's reading", lambda: read_json(large)),
        ("finding its program", lambda: Lineage().place(Evidence(), request, "-", ":1")),
    ):
        typer.echo(f"{len(large)} bytes, {kind}, {name}: {spread([longest_step_ms(work) for _ in range(5)], 1)} ms")


def standstill_ms(url: str, engine: AsyncMultiLLMEngine, large: Path) -> tuple[float, float]:
    """The longest pause of a task on the loop of a server that gets a large request, and the most CPU time that others
    took on the loop in between, in milliseconds."""
    done, pauses, spent = threading.Event(), [0.0], [0.0]

    async def watch() -> None:
        now_s, cpu_s = time.perf_counter(), time.thread_time()
        while not done.is_set():
            await asyncio.sleep(0.0005)
            pauses.append(time.perf_counter() - now_s)
            spent.append(time.thread_time() - cpu_s)
            now_s, cpu_s = time.perf_counter(), time.thread_time()

    watching = engine.submit(watch())
    time.sleep(0.5)
    pauses[:], spent[:] = [0.0], [0.0]
    # Another process sends it, because this one's lock is what is measured.
    code = "import httpx, sys; httpx.post(sys.argv[1], content=open(sys.argv[2], 'rb'), headers=eval(sys.argv[3]))"
    route = f"{url}/v1/chat/completions"
    headers = "{'content-type': 'application/json'}"
    subprocess.run([sys.executable, "-c", code, route, str(large), headers], check=True)  # noqa: S603  our own code
    done.set()
    watching.result()
    return 1e3 * max(pauses), 1e3 * max(spent)


def standstills(text: str) -> None:
    """Print the pauses of Weft's server, and of vLLM's application in it without Weft's part."""
    own, folder = server.guarded, Path(tempfile.mkdtemp())
    (folder / "large").write_text(json.dumps({"model": "scripted", "messages": [{"role": "user", "content": text}]}))
    for name, guarded in (("weft serve", own), ("vLLM's application alone", lambda app, *_others: app)):
        server.guarded = guarded
        with ScriptedServer(lambda _request: "ok") as served:
            found = [standstill_ms(served.url, served.engine, folder / "large") for _ in range(5)]
        pauses, spent = zip(*found, strict=True)
        typer.echo(f"{name}: longest pause {spread(pauses, 0)} ms, of the loop's own CPU time {spread(spent, 0)} ms")


def main(
    *, server_too: Annotated[bool, typer.Option("--server", help="Servers with the large request, too.")] = False
) -> None:
    """Print the figures."""
    typer.echo(f"{machine()} load {os.getloadavg()[0]:.0f}")
    for has_tools in (False, True):
        found = [turn_ms(random.Random(seed), has_tools=has_tools) for seed in range(ROUNDS)]
        typer.echo(f"turn {TURNS}, {'with tool calls' if has_tools else 'texts alone'}: {spread(found)} ms")
    rng = random.Random(0)
    long = text(rng, LARGE_BYTES)
    steps("one text", [long])
    steps("one text with a line break after each word", [long.replace(" ", "\n")])
    steps("9,999 texts", [text(rng, LARGE_BYTES // 9_999) for _ in range(9_999)])
    if server_too:
        standstills(long)


if __name__ == "__main__":
    typer.run(main)
