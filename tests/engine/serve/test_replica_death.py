"""A replica of `weft serve` is killed while it answers."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import psutil
import pytest
from served import url_of
from threads import ONE_THREAD

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.anyio]

CALLS = 32  # of each kind, four times as many as there are places
TOKENS = 60


class Server(NamedTuple):
    """A server with two replicas."""

    url: str
    process: psutil.Process

    def engines(self) -> list[psutil.Process]:
        """The scheduler processes of its replicas."""
        children = self.process.children(recursive=True)
        return [each for each in children if any("VLLM::EngineCore" in part for part in each.cmdline())]


@pytest.fixture(scope="module")
def pair(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of this module's own, because its tests kill replicas."""
    log = tmp_path_factory.mktemp("pair") / "log"
    command = [
        *(sys.executable, "-m", "weft", "serve", str(tiny_model), "--served-model-name", "tiny", "--replicas", "2"),
        *("--host", "127.0.0.1", "--port", "0", "--max-num-seqs", "4", "--max-model-len", "2048", "--enforce-eager"),
        *("--kv-cache-memory-bytes", str(256 << 20), "--policy", "fcfs"),  # so that calls wait, and have no token yet
    ]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env={**os.environ, **ONE_THREAD})
    try:
        yield Server(url_of(process, log), psutil.Process(process.pid))
    finally:
        process.terminate()
        process.wait(120)


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


async def test_a_replica_is_killed_and_no_answer_is_lost_or_doubled(pair: Server) -> None:
    """A call without a stream gets its whole answer, from the other replica if need be. A stream that has begun says
    that it was lost, and the text until then is right. The replica comes back."""
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
        while not all(each["state"] == "ready" for each in (await state(client))["replicas"]):  # noqa: ASYNC110  over HTTP
            await asyncio.sleep(0.5)
        assert not victim.is_running() or victim.status() == psutil.STATUS_ZOMBIE
        assert len(pair.engines()) == 2
        assert await ask(client, 0, "after") == expected[0]
