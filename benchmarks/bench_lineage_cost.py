"""CPU time that lineage takes for a turn of a long conversation, and for how long a request of 20 MB holds up others.

The conversation has 200 turns and 100,000 characters, and no id. Each round begins with a new `Lineage` and reports the
median of its last ten turns. The large request is read and placed on another thread, as in the server, so it holds up
others for as long as its longest step keeps Python's lock. With `--server` it is also sent to the scripted server, to
Weft's part of it alone, and to vLLM's application alone, while a task of the event loop wants to run each half
millisecond; as a control, the task also runs while nothing is sent.
The first request of a program is measured while as many programs are open as lineage compares it with.
Printed are medians, with the lowest and the highest.
"""

from __future__ import annotations

import asyncio
import base64
import gc
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from common import machine, spread

from weft.core.identity.items import items_of_answer
from weft.core.identity.lineage import Lineage
from weft.core.identity.sources import Evidence
from weft.engine.http.bodies import read_json, release
from weft.engine.http.check_ids import App, Receive, Scope, Send
from weft.engine.multi import AsyncMultiLLMEngine
from weft.engine.serve import server
from weft.testing import ScriptedServer

TURNS: Final = 200
CHARACTERS: Final = 100_000
OPEN: Final = 256  # programs of one key, each with six short answers
FIRST: Final = (300, 2_000, 8_000, 200_000)  # characters of a first request
ROUNDS: Final = 20
LARGE_BYTES: Final = 20_000_000
MESSAGES: Final = 9_999  # more are no conversation for lineage
REQUESTS: Final = 20
own: Final = server.guarded
WORDS: Final = ("harbour", "keeper", "counted", "ships", "night", "train", "river", "plant", "light", "gull")


def text(rng: random.Random, characters: int) -> str:
    """Words of about so many characters."""
    return " ".join(rng.choice(WORDS) for _ in range(characters // 7))


def turn_ms(rng: random.Random, *, has_tools: bool = False, is_json: bool = False, has_clock: bool = False) -> float:
    """The CPU milliseconds of a turn at the end of a conversation, half of whose messages are answers.

    Args:
        has_clock: Whether the system prompt changes with each call.
    """
    lineage, system = Lineage(), text(rng, 500)
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}]
    each = CHARACTERS // TURNS // 2
    spent_ms, call_id = [], ""
    for turn in range(TURNS):
        asked: dict[str, Any] = {"role": "user", "content": text(rng, each)}
        answer: dict[str, Any] = {"role": "assistant", "content": text(rng, each)}
        if is_json:
            answer["content"] = json.dumps({f"part {n}": text(rng, each // 6) for n in range(5)})
        if has_tools and turn % 2:
            asked = {"role": "tool", "tool_call_id": call_id, "content": text(rng, each)}
        elif has_tools:
            call_id = f"chatcmpl-tool-{rng.getrandbits(64):016x}"
            call = {"name": "search", "arguments": json.dumps({"words": text(rng, each)})}
            answer = {"role": "assistant", "content": None, "tool_calls": [{"id": call_id, "function": call}]}
        messages.append(asked)
        if has_clock:
            messages[0] = {"role": "system", "content": f"{system} It is {turn}."}
        body = json.loads(json.dumps({"messages": messages}))
        begin_s = time.thread_time()
        placed = lineage.place(Evidence(), body, "-", ":1")
        lineage.answered(placed, items_of_answer({"choices": [{"message": answer}]}), "-", None)
        spent_ms.append(1e3 * (time.thread_time() - begin_s))
        messages.append(answer)
    return statistics.median(spent_ms[-10:])


def first_ms(rng: random.Random, characters: int) -> float:
    """The CPU milliseconds for the first request of a program, in the median of twenty, while others are open."""
    lineage = Lineage()
    for _ in range(OPEN):
        messages: list[dict[str, Any]] = []
        for _ in range(6):
            messages.append({"role": "user", "content": text(rng, 200)})
            placed = lineage.place(Evidence(), {"messages": messages}, "-", ":1")
            messages.append({"role": "assistant", "content": f"{text(rng, 30)} {rng.getrandbits(32)}"})
            lineage.answered(placed, items_of_answer({"choices": [{"message": messages[-1]}]}), "-", None)
    spent_ms = []
    for _ in range(20):
        body = {"messages": [{"role": "user", "content": text(rng, characters)}]}
        begin_s = time.thread_time()
        lineage.place(Evidence(), body, "-", ":2")
        spent_ms.append(1e3 * (time.thread_time() - begin_s))
    return statistics.median(spent_ms)


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


def shapes(rng: random.Random) -> Iterator[tuple[str, dict[str, Any]]]:
    """Requests of about 20 MB."""
    long, each = text(rng, LARGE_BYTES), LARGE_BYTES // MESSAGES
    yield "one text", {"messages": [{"role": "user", "content": long}]}
    lines = long.replace(" ", "\n")
    yield "one text with a line break after each word", {"messages": [{"role": "user", "content": lines}]}
    han = "".join(chr(rng.randrange(0x4E00, 0x9FFF)) for _ in range(LARGE_BYTES // 6))
    yield "one text of Unicode escapes", {"messages": [{"role": "user", "content": han}]}
    image = base64.b64encode(rng.randbytes(LARGE_BYTES * 3 // 4)).decode()
    parts = [
        {"type": "text", "text": "What is it?"},
        {"type": "image_url", "image_url": {"url": f"data:x;base64,{image}"}},
    ]
    yield "an image in base64", {"messages": [{"role": "user", "content": parts}]}
    yield (
        f"{MESSAGES} texts",
        {"messages": [{"role": ("user", "assistant")[n % 2], "content": text(rng, each)} for n in range(MESSAGES)]},
    )
    calls: list[dict[str, Any]] = []
    for n in range(MESSAGES // 2):
        function = {"name": "search", "arguments": json.dumps({"words": text(rng, each)})}
        calls.append({"role": "assistant", "tool_calls": [{"id": f"c{n}", "type": "function", "function": function}]})
        calls.append({"role": "tool", "tool_call_id": f"c{n}", "content": text(rng, each)})
    yield f"{MESSAGES // 2} tool calls with results", {"messages": calls}
    nested: list[Any] = [{"role": "user", "content": "Go on."}]
    for n in range(MESSAGES // 10):
        deep: Any = text(rng, 10 * each)
        for _ in range(48):
            deep = {"a": deep}
        nested.append({"role": "user", "content": str(n), "more": deep})
    yield f"{MESSAGES // 10} texts in 48 objects each", {"messages": nested}  # nearly as many as are taken


def steps(kind: str, request: dict[str, Any]) -> None:
    """Print the longest step of what is done with a large request on another thread."""
    large = json.dumps(request).encode()
    read = read_json(large)
    for name, work in (
        ("json.loads", lambda: json.loads(large)),
        ("Weft's reading", lambda: release([read_json(large)])),
        ("finding its program", lambda: Lineage().place(Evidence(), read, "-", ":1")),
    ):
        gc.freeze()  # as the server does when it starts
        typer.echo(f"{len(large)} bytes, {kind}, {name}: {spread([longest_step_ms(work) for _ in range(5)], 1)} ms")


def standstill_ms(url: str, engine: AsyncMultiLLMEngine, large: Path | None) -> float:
    """The longest pause in milliseconds of a task on the loop of a server that gets a large request, or, as a control,
    nothing for half a second."""
    done, pauses = threading.Event(), [0.0]

    async def watch() -> None:
        now_s = time.perf_counter()
        while not done.is_set():
            await asyncio.sleep(0.0005)
            pauses.append(time.perf_counter() - now_s)
            now_s = time.perf_counter()

    watching = engine.submit(watch())
    time.sleep(0.5)
    if large is not None:
        pauses[:] = [0.0]
        # Another process sends it, because this one's lock is what is measured.
        code = (
            "import httpx, sys; httpx.post(sys.argv[1] + '/v1/chat/completions', content=open(sys.argv[2], 'rb'), "
            "headers={'content-type': 'application/json'}, timeout=99)"
        )
        subprocess.run([sys.executable, "-c", code, url, str(large)], check=True)  # noqa: S603  our own code
    done.set()
    watching.result()
    return 1e3 * (max(pauses) - 0.0005)


def without_vllm(app: App, *others: Any) -> App:
    """Weft's part of the server, and an application that only takes the request."""

    async def take(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await app(scope, receive, send)
            return
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    return own(take, *others)


def standstills(shaped: Iterable[tuple[str, dict[str, Any]]]) -> None:
    """Print the pauses of Weft's server, of Weft's part of it, and of vLLM's application without Weft's part."""
    folder = Path(tempfile.mkdtemp())
    files: list[tuple[str, Path]] = []
    for name, request in shaped:
        files.append((name, folder / str(len(files))))
        files[-1][1].write_text(json.dumps({"model": "scripted", **request}))
    kinds: dict[str, Callable[..., App]] = {
        "weft serve": own,
        "Weft's part": without_vllm,
        "vLLM's application": lambda app, *_others: app,
    }
    for name, guarded in kinds.items():
        server.guarded = guarded
        with ScriptedServer(lambda _request: "ok") as served:
            for shape, file in (("nothing", None), *files):
                found = [standstill_ms(served.url, served.engine, file) for _ in range(REQUESTS + 1)][1:]
                typer.echo(f"{name}, {shape}: longest pause {spread(found, 1)} ms")


def main(
    *, server_too: Annotated[bool, typer.Option("--server", help="Servers with the large request, too.")] = False
) -> None:
    """Print the figures."""
    typer.echo(f"{machine()} load {os.getloadavg()[0]:.0f}")
    turns: dict[str, dict[str, bool]] = {
        "texts alone": {},
        "with tool calls": {"has_tools": True},
        "answers of JSON": {"is_json": True},
        "another system prompt each time": {"has_clock": True},
        "answers of JSON, another system prompt each time": {"is_json": True, "has_clock": True},
    }
    for name, options in turns.items():
        found = [turn_ms(random.Random(seed), **options) for seed in range(ROUNDS)]
        typer.echo(f"turn {TURNS}, {name}: {spread(found)} ms")
    for characters in FIRST:
        found = [first_ms(random.Random(seed), characters) for seed in range(5)]
        typer.echo(f"a first request of {characters} characters, {OPEN} programs open: {spread(found)} ms")
    for kind, request in shapes(random.Random(0)):
        steps(kind, request)
    if server_too:
        standstills(shapes(random.Random(0)))


if __name__ == "__main__":
    typer.run(main)
