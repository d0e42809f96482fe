"""A thousand programs at once on `weft serve`, a hundred calls a second, for half an hour; memory must stay flat.

    make soak-serve MINUTES=30 SEED=0

Half of the programs send ids, and the server finds the others by their messages. They end by the header, by DELETE, or
are left. The folder gets `samples.jsonl`, `report.json` and `rss.svg`, as of `make soak`.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, NamedTuple

import httpx
import psutil
import typer

if TYPE_CHECKING:
    from soak_tally import Tally

MODEL: Final = "tiny"
_ENGINE: Final = ("--max-num-seqs", "32", "--max-model-len", "1024", "--enforce-eager")
_LONGEST: Final = 24  # calls of a program
_LEFT: Final = 0.02  # of the programs are left by their client, and end when the server finds them idle
_EVERY_S: Final = 5.0
_WARM_UP: Final = 0.6  # of the time: the server keeps 30,000 states of conversations, which fill in 60,000 calls
_KEEPALIVE_S: Final = 2.0  # less than the 5 s of vLLM's server, so that no call meets a connection that it closes


@dataclass
class Conversation:
    """A program, as its client sees it."""

    number: int
    calls: int  # that it will make
    has_id: bool
    end: str  # "header", "delete" or "left"
    messages: list[dict[str, str]] = field(default_factory=list)
    program_id: str = ""

    def headers(self) -> dict[str, str]:
        """The headers of the next call, whose message is in `messages`."""
        headers = {"weft-program-id": f"program-{self.number}"} if self.has_id else {}
        if self.end == "header" and self.calls == 1:
            headers["weft-program-end"] = "true"
        return headers


class Load(NamedTuple):
    """What the clients do."""

    minutes: float
    seed: int
    programs: int  # open at once
    rate: float  # calls a second


class Clients:
    """Keeps so many programs open, and makes so many calls a second.

    Args:
        client: Talks to the server.
        rng: What the programs do.
        tally: Counts the calls.
        programs: How many are open.
    """

    def __init__(self, client: httpx.AsyncClient, rng: random.Random, tally: Tally, programs: int) -> None:
        self._client = client
        self._rng = rng
        self._tally = tally
        self._numbers = itertools.count()
        self._idle = [self._new(self._rng.randint(1, _LONGEST)) for _ in range(programs)]
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self, rate: float, seconds: float) -> None:
        """Make calls at the times of a clock, whether or not earlier ones have ended."""
        start_s = time.monotonic()
        for number in range(int(rate * seconds)):
            await asyncio.sleep(max(0.0, start_s + number / rate - time.monotonic()))
            if not self._idle:  # every program waits for an answer
                continue
            place = self._rng.randrange(len(self._idle))
            self._idle[place], self._idle[-1] = self._idle[-1], self._idle[place]
            task = asyncio.create_task(self._call(self._idle.pop()))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        if self._tasks:
            await asyncio.wait(self._tasks)

    def _new(self, calls: int) -> Conversation:
        end = "left" if self._rng.random() < _LEFT else self._rng.choice(("header", "delete"))
        return Conversation(next(self._numbers), calls, self._rng.random() < 0.5, end)

    async def _call(self, program: Conversation) -> None:
        said = {"role": "user", "content": f"{program.number} {self._rng.randrange(1000)}"}
        body = {"model": MODEL, "messages": [*program.messages, said], "max_tokens": 2, "seed": program.number}
        with self._tally.call("with an id" if program.has_id else "by its messages") as ending:
            answer = await self._client.post("/v1/chat/completions", json=body, headers=program.headers())
            ending.outcome = "result" if answer.status_code == 200 else f"status {answer.status_code}"
            if answer.status_code == 200:
                self._note(program, said, answer)
        if program.calls > 0:
            self._idle.append(program)
            return
        if program.end == "delete":
            deleted = await self._client.delete(f"/weft/programs/{program.program_id}")
            if deleted.status_code != 204:
                self._tally.fail("delete", f"status {deleted.status_code}: {deleted.text:.200}")
        self._idle.append(self._new(_LONGEST))

    def _note(self, program: Conversation, said: dict[str, str], answer: httpx.Response) -> None:
        found = answer.headers["weft-program-id"]
        before = program.messages[-1]["content"].strip() if program.messages else ""
        # After an empty answer, messages do not tell.
        if program.messages and (program.has_id or before) and found != program.program_id:
            self._tally.fail("identity", f"{program.program_id} became {found} after {program.messages[-1]}")
        program.program_id = found
        said_back = answer.json()["choices"][0]["message"]["content"] or ""
        program.messages += [said, {"role": "assistant", "content": said_back}]
        program.calls -= 1


def main(
    minutes: Annotated[float, typer.Option(min=2, help="How long the clients run.")] = 30.0,
    seed: Annotated[int, typer.Option(help="Seed of what the clients do.")] = 0,
    programs: Annotated[int, typer.Option(min=1, help="How many programs are open at once.")] = 1000,
    rate: Annotated[float, typer.Option(min=0.1, help="Calls a second.")] = 100.0,
    out: Annotated[Path, typer.Option(help="Folder of the results; samples of an earlier soak are replaced.")] = Path(
        "build/soak-serve"
    ),
) -> None:
    """Run the server and the clients, sample, judge, report."""
    from rich.console import Console
    from served import url_of
    from soak_tally import Tally
    from threads import ONE_THREAD
    from tiny_engine import make_tiny_llama

    console, tally, load = Console(), Tally(), Load(minutes, seed, programs, rate)
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        model, log = make_tiny_llama(Path(folder) / "model"), out / "log"
        command = [sys.executable, "-m", "weft", "serve", str(model), "--served-model-name", MODEL, "--port", "0"]
        with log.open("wb") as output, console.status("starting a server"):
            server = subprocess.Popen(
                [*command, "--host", "127.0.0.1", "--disable-uvicorn-access-log", *_ENGINE],
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **ONE_THREAD},
            )
            url = url_of(server, log)
        try:
            problems = asyncio.run(_soak(url, psutil.Process(server.pid), load, tally, out / "samples.jsonl"))
        finally:
            server.terminate()
            code = server.wait(120)
    if code != 0:
        problems.append(f"the server ended with exit code {code}; its log is {log}")
    from soak import report

    sys.exit(report(out, tally, problems, load._asdict(), console, warm_up=_WARM_UP))


async def _soak(url: str, server: psutil.Process, load: Load, tally: Tally, samples: Path) -> list[str]:
    """Run the clients and take samples. Returns what is not as it should be at the end."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from soak_samples import Meter

    limits = httpx.Limits(max_connections=64, keepalive_expiry=_KEEPALIVE_S)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as client:
        sizes = {"open programs": 0}
        meter = Meter(server, lambda: dict(sizes))
        clients = Clients(client, random.Random(load.seed), tally, load.programs)
        running = asyncio.create_task(clients.run(load.rate, load.minutes * 60))
        columns = (BarColumn(), TimeElapsedColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
        with Progress(*columns) as progress, samples.open("w") as file:
            bar, start_s = progress.add_task("", total=load.minutes * 60), time.monotonic()
            while not running.done():
                state = (await client.get("/weft/state")).json()
                sizes["open programs"] = state["programs_total"]
                sample = meter.sample(tally.ended.total())
                file.write(json.dumps(sample) + "\n")
                file.flush()
                memory = " ".join(f"{name} {mb:.0f}" for name, mb in sample["rss_mb"].items())
                text = f"{sample['calls']} calls, {sizes['open programs']} programs, MB: {memory}"
                progress.update(bar, completed=time.monotonic() - start_s, description=text)
                await asyncio.wait({running}, timeout=_EVERY_S)
        await running
    wanted, made = int(load.rate * load.minutes * 60), tally.begun.total()
    refused = made - tally.outcomes["result"]
    problems = [f"only {made} of {wanted} calls were made in time"] if made < 0.99 * wanted else []
    problems += [f"{refused} calls had no result"] if refused else []
    problems += [f"{tally.failed} programs were not as they should be"] if tally.failed else []
    return problems


if __name__ == "__main__":
    typer.run(main)
