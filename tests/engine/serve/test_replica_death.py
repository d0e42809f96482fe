"""Replicas of `weft serve` are killed while they answer, and while calls move between them."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families
from served import url_of
from threads import ONE_THREAD

from weft.core.policies.history import History

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.anyio]

CALLS = 32  # of each kind, four times as many as there are places
TOKENS = 60
HOST_GIB = 0.25


class Server(NamedTuple):
    """A server with two replicas."""

    url: str
    process: psutil.Process
    log: Path

    def engines(self) -> list[psutil.Process]:
        """The scheduler processes of its replicas."""
        children = self.process.children(recursive=True)
        return [each for each in children if any("VLLM::EngineCore" in part for part in each.cmdline())]


@pytest.fixture(scope="module")
def pair(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of this module's own, because its tests kill replicas."""
    folder = tmp_path_factory.mktemp("pair")
    log = folder / "log"
    command = [
        *(sys.executable, "-m", "weft", "serve", str(tiny_model), "--served-model-name", "tiny", "--replicas", "2"),
        *("--host", "127.0.0.1", "--port", "0", "--max-num-seqs", "4", "--max-model-len", "2048", "--enforce-eager"),
        # so that calls wait, and have no token yet
        *("--kv-cache-memory-bytes", str(256 << 20), "--policy", "fcfs", "--stealing", "--hang-timeout-s", "0"),
        *("--kv-policy", "next-use", "--host-kv-gib", str(HOST_GIB), "--history", str(folder / "history.json")),
    ]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env={**os.environ, **ONE_THREAD})
    try:
        yield Server(url_of(process, log), psutil.Process(process.pid), log)
    finally:
        process.terminate()
        process.wait(120)
    assert "Traceback" not in log.read_text()  # clients left, calls were lost, replicas died: all of it is expected


def body(number: int, *, stream: bool = False) -> dict[str, Any]:
    """A request with one right answer."""
    return {
        "model": "tiny",
        "messages": [{"role": "user", "content": f"count from {number}"}],
        "max_tokens": TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": stream,
    }


async def ask(client: httpx.AsyncClient, number: int, program: str) -> str:
    """A whole answer."""
    answer = await client.post("/v1/chat/completions", json=body(number), headers={"weft-program-id": program})
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == TOKENS
    return str(answer.json()["choices"][0]["message"]["content"])


async def read(client: httpx.AsyncClient, number: int) -> tuple[str, str]:
    """The text of a stream, and how it ended: `[DONE]`, or the code of an error."""
    text = ""
    async with client.stream("POST", "/v1/chat/completions", json=body(number, stream=True)) as answer:
        assert answer.status_code == 200, await answer.aread()
        async for line in answer.aiter_lines():
            if not line.startswith("data: "):
                continue
            if line == "data: [DONE]":
                return text, "[DONE]"
            chunk = json.loads(line.removeprefix("data: "))
            if "error" in chunk:
                return text, str(chunk["error"]["code"])
            text += "".join(choice["delta"].get("content") or "" for choice in chunk["choices"])
    return text, "cut off"


async def state(client: httpx.AsyncClient) -> dict[str, Any]:
    """What the server says of its replicas and programs."""
    found: dict[str, Any] = (await client.get("/weft/state")).json()
    return found


async def test_the_options_of_the_kv_cache_reach_the_engine(pair: Server) -> None:
    """Each replica has as much host memory as `--host-kv-gib` says, less what does not fill a block. The file of the
    history is there."""
    async with httpx.AsyncClient(base_url=pair.url, timeout=300) as client:
        await ask(client, 0, "first")
        metrics = (await client.get("/metrics")).text
    (family,) = (each for each in text_string_to_metric_families(metrics) if each.name == "weft:kv_host_capacity_bytes")
    capacities = [sample.value for sample in family.samples]
    assert len(capacities) == 2
    assert all(0.99 * HOST_GIB < capacity / 2**30 <= HOST_GIB for capacity in capacities), capacities
    assert not History.from_json(pair.log.with_name("history.json").read_bytes()).models


async def test_a_replica_is_killed_and_no_answer_is_lost_or_doubled(pair: Server) -> None:
    """A call without a stream gets its whole answer, from the other replica if need be. A stream that has begun says
    that it was lost, and the text until then is right. The replica comes back. The server's log has both."""
    async with httpx.AsyncClient(base_url=pair.url, timeout=300, limits=httpx.Limits(max_connections=None)) as client:
        expected = [await ask(client, number, f"reference-{number}") for number in range(CALLS)]
        whole, streams = [], []
        for number in range(CALLS):
            whole.append(asyncio.create_task(ask(client, number, f"program-{number}")))
            streams.append(asyncio.create_task(read(client, number)))
        await asyncio.wait((*whole, *streams), return_when=asyncio.FIRST_COMPLETED)
        before = await state(client)
        victim = pair.engines()[0]
        victim.send_signal(signal.SIGKILL)
        assert await asyncio.gather(*whole) == expected
        ends = await asyncio.gather(*streams)
        for (text, end), right in zip(ends, expected, strict=True):
            if end == "[DONE]":
                assert text == right
            else:
                assert end == "replica_lost"
                assert right.startswith(text)
        after = await state(client)
        calls = {each["program_id"]: each["calls"] for each in (*after["programs"], *after["ended"])}
        assert [calls[f"program-{number}"] for number in range(CALLS)] == [1] * CALLS
        (lost,) = [each["engine_id"] for each in after["replicas"] if each["deaths"]]
        assert any(each["calls_in_flight"] and lost in each["engine_ids"] for each in before["programs"])
        await until(are_ready, client)
        assert not victim.is_running() or victim.status() == psutil.STATUS_ZOMBIE
        assert len(pair.engines()) == 2
        assert await ask(client, 0, "after") == expected[0]
    log = pair.log.read_text()
    death = rf"WARNING:.* replica died .*replica={lost} reason=exit code -9 log=/.*\.log\n"
    assert re.search(rf"{death}(.*\n)*INFO:.* replica ready .*replica={lost}\n", log), log


class Crowd:
    """Clients that call again and again. `done` has the texts of the calls that ended well.

    Args:
        client: for their requests.
        expected: the right answer of each.
    """

    def __init__(self, client: httpx.AsyncClient, expected: str) -> None:
        self._client, self._expected = client, expected
        self.may_begin = asyncio.Event()  # the clients that are not in a hurry wait for it before each call
        self.is_over = False
        self.done: list[str] = []

    async def whole(self, number: int) -> None:
        """Ask for whole answers."""
        while not self.is_over:
            await self.may_begin.wait()
            self.done.append(await ask(self._client, 0, f"whole-{number}"))

    async def streams(self) -> None:
        """Ask for streams, which may be lost with a replica."""
        while not self.is_over:
            await self.may_begin.wait()
            text, end = await read(self._client, 0)
            if end == "[DONE]":
                self.done.append(text)
            else:
                assert end == "replica_lost"
                assert self._expected.startswith(text)

    async def impatient(self) -> None:
        """Have deadlines that pass, and leave."""
        while not self.is_over:
            hurried = {"weft-timeout-s": "0.5"}
            answer = await self._client.post("/v1/chat/completions", json=body(0), headers=hurried)
            assert answer.status_code in (200, 504), answer.text
            leaving = asyncio.ensure_future(ask(self._client, 0, "left"))
            await asyncio.wait([leaving], timeout=0.3)
            leaving.cancel()
            await asyncio.wait([leaving])


async def until(is_so: Callable[[list[dict[str, Any]]], bool], client: httpx.AsyncClient) -> None:
    """Wait until something is true of the replicas' states."""
    while not is_so((await state(client))["replicas"]):  # noqa: ASYNC110  over HTTP
        await asyncio.sleep(0.05)


async def test_calls_move_while_replicas_die(pair: Server) -> None:
    """All calls wait at the replica that is left, which stands still until the other one is back. So some of them move.
    Then the replica that they left is killed.

    No new calls begin in between: they would fill the replica that is back, which then takes none of the others.
    Meanwhile clients leave and deadlines pass. Each other call gets its whole answer, once.
    """
    async with httpx.AsyncClient(base_url=pair.url, timeout=300, limits=httpx.Limits(max_connections=None)) as client:
        await until(are_ready, client)
        expected = await ask(client, 0, "reference")
        crowd = Crowd(client, expected)
        async with asyncio.timeout(600), asyncio.TaskGroup() as clients:
            crowd.may_begin.set()
            for number in range(10):
                clients.create_task(crowd.whole(number))
                clients.create_task(crowd.streams())
            clients.create_task(crowd.impatient())
            while len(crowd.done) < 20:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            crowd.may_begin.clear()
            first, other = pair.engines()
            other.suspend()
            before = (await state(client))["replicas"]
            first.kill()
            await until(lambda now: sum_of("deaths", now) > sum_of("deaths", before), client)
            await until(are_ready, client)
            assert sum_of("stolen", before) == sum_of("stolen", (await state(client))["replicas"])
            other.resume()
            await until(lambda now: sum_of("stolen", now) > sum_of("stolen", before), client)
            other.kill()
            crowd.may_begin.set()
            finished = len(crowd.done)
            while len(crowd.done) < finished + 20:  # noqa: ASYNC110
                await asyncio.sleep(0.1)
            crowd.is_over = True
        assert set(crowd.done) == {expected}
        await until(lambda now: not sum_of("calls", now), client)


def are_ready(replicas: list[dict[str, Any]]) -> bool:
    """Whether all replicas take calls."""
    return all(each["state"] == "ready" for each in replicas)


def sum_of(name: str, replicas: list[dict[str, Any]]) -> int:
    """The sum of a count over replicas."""
    return sum(each[name] for each in replicas)
