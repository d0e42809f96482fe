"""What a server is told of programs between their calls: tools, the end, and that they go on."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from langchain_core.tools import tool

import weft
from weft.core.process_rows import ProgramState
from weft.engine.remote import engine as remote_engine
from weft.engine.remote.engine import RemoteEngine
from weft.integrations.langchain import ChatWeft

pytestmark = pytest.mark.anyio

ABSENT = [
    *("vllm", "torch", "transformers", "langchain_core", "autogen_core", "openai", "anthropic", "aiohttp", "requests"),
    *("fastapi", "starlette", "uvicorn", "ray", "msgspec", "msgpack", "zmq", "httpx", "nanobind", "prometheus_client"),
]
ANSWERS = {
    "/v1/models": {"data": [{"id": "canned", "max_model_len": 64}]},
    "/weft/programs": {"programs": []},
    "/v1/chat/completions": {
        "id": "chatcmpl-1",
        "model": "canned",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "yes"}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
        "weft": {"service_s": 0.5, "wait_s": 0.25, "preemptions": 1, "prompt_tokens": 1, "output_tokens": 1},
    },
}


class CannedServer(ThreadingHTTPServer):
    """Answers as a `weft serve` would, and keeps what it is told."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.told: list[dict[str, Any]] = []
        self.calls: list[dict[str, Any]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def of_type(self, kind: str) -> list[dict[str, Any]]:
        return [message for message in self.told if message["type"] == kind]

    async def until_told(self, kind: str) -> None:
        end_s = time.monotonic() + 30
        while not self.of_type(kind):
            assert time.monotonic() < end_s, self.told
            await asyncio.sleep(0.01)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: CannedServer

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        (self.server.told if self.path == "/weft/events" else self.server.calls).append(body)
        self._answer()

    def _answer(self) -> None:
        data = json.dumps(ANSWERS[self.path]).encode() if self.path in ANSWERS else b""
        self.send_response(200 if data else 204)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_arguments: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[CannedServer]:
    with CannedServer() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def remote(server: CannedServer) -> Iterator[RemoteEngine]:
    with weft.connect(server.url) as engine:
        yield engine


async def ask(engine: RemoteEngine, program: weft.Program, label: str | None = None, **more: Any) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": "Hello"}], **more}
    run = object()
    identity = program.reports.start_call(run, label=label)
    answer = await engine.chat(body, program, identity)
    program.reports.end_call(run, identity)
    return answer


async def test_a_call_carries_its_ids_and_no_figures(server: CannedServer, remote: RemoteEngine) -> None:
    """Servers refuse figures of clients; ids may have any letters, so they travel in the body."""
    with weft.Program("Zug nach Köln", session_id="session", tenant="ann", deadline_s=60.0) as program:
        first = await ask(remote, program, vllm_xargs={"mine": 1})
        await ask(remote, program)
        row = program.row
    assert row is not None
    assert (row.account.service_s, row.account.wait_s, row.account.preemptions) == (1.0, 0.5, 2)
    sent, after = server.calls
    assert sent["session_id"] == "session"
    assert sent["vllm_xargs"] == {
        "mine": 1,
        "program_id": program.program_id,
        "program_name": "Zug nach Köln",
        "tenant": "ann",
        "thread_id": first["weft"]["thread_id"],
        "call_id": first["weft"]["call_id"],
        "parents": [],
    }
    assert after["vllm_xargs"]["parents"] == [first["weft"]["call_id"]]


async def test_a_program_inside_another_names_it(server: CannedServer, remote: RemoteEngine) -> None:
    """Its first call tells the server, which shows it."""
    model = ChatWeft(engine=remote)
    names: dict[str, str] = {}

    @weft.program(name="inner")
    async def inner(program: weft.Program) -> str:
        await ask(remote, program)
        return "done"

    @tool
    async def search() -> str:
        """Search."""
        return await inner()

    @weft.program(name="outer")
    async def outer(program: weft.Program) -> None:
        names["outer"] = program.program_id
        await (model | (lambda _answer: {}) | search).ainvoke("Hello", config=program.config())

    await outer()
    assert [call["vllm_xargs"].get("parent_program_id") for call in server.calls] == [None, names["outer"]]


def test_neither_vllm_nor_a_framework_is_needed(server: CannedServer) -> None:
    """`pip install vllm-weft` is enough: the packages of its extras cannot be imported here."""
    code = f"""
import sys
sys.modules.update(dict.fromkeys({ABSENT!r}))  # importing one fails
import weft
with weft.connect({server.url!r}) as engine, weft.Program("bare") as program:
    body = {{"messages": [{{"role": "user", "content": "Hello"}}]}}
    answer = engine.chat_sync(body, program, program.reports.start_call(object()))
    print(answer["choices"][0]["message"]["content"], program.row.account.service_s)
"""
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert done.stdout == "yes 0.5\n", done.stderr


async def test_a_name_that_cannot_travel_is_made_plain(server: CannedServer, remote: RemoteEngine) -> None:
    """It is only shown, so it is no reason to refuse a call, as in process. An empty one is left out."""
    with weft.Program("two\nlines") as program:
        await ask(remote, program, label="no\nname")
    with weft.Program("") as program:
        await ask(remote, program, label="")
    names = [[call["vllm_xargs"].get(name) for name in ("program_name", "label")] for call in server.calls]
    assert names == [["two?lines", "no?name"], [None, None]]


async def test_a_call_carries_its_name_and_the_tools_before_it(server: CannedServer, remote: RemoteEngine) -> None:
    """The server shows them, and learns from them how programs go on. Very long ones are cut off."""
    with weft.Program("p") as program:
        await ask(remote, program, label="planner")
        program.reports.note_tools("run", ["search", "t" * 300])
        await ask(remote, program, label="w" * 300)
    first, second = (call["vllm_xargs"] for call in server.calls)
    assert (first["label"], "tools" in first) == ("planner", False)
    assert (second["label"], second["tools"]) == (f"{'w' * 255}…", ["search", f"{'t' * 255}…"])


@pytest.mark.parametrize("state", [ProgramState.FAILED, ProgramState.CANCELLED])
async def test_how_a_program_ended_is_told(server: CannedServer, remote: RemoteEngine, state: ProgramState) -> None:
    """It is among all that have ended, too, as a server before this one knows them."""
    program = weft.Program("p")
    await ask(remote, program)
    program.end(state)
    await server.until_told("programs_ended")
    (ended,) = server.of_type("programs_ended")
    assert ended["program_ids"] == ended[state.value] == [program.program_id]


async def test_tools_and_the_end_are_told(server: CannedServer, remote: RemoteEngine) -> None:
    """In the order in which they happen; losing one would cost nothing but a guess."""
    with weft.Program("p") as program:
        await ask(remote, program)
        program.reports.tool_began("call-1", "search")
        program.reports.tools_ended(["call-1"])
        program.expect_call()
        await server.until_told("program_events")
    await server.until_told("programs_ended")
    events = [event for message in server.of_type("program_events") for event in message["events"]]
    assert [event[:3] for event in events if event[0] != "prefetch"] == [
        ["tool_started", program.program_id, "search"],
        ["tool_ended", program.program_id, "search"],
    ]
    (ended,) = server.of_type("programs_ended")
    assert ended["program_ids"] == [program.program_id]


async def test_a_program_that_waits_long_is_kept_open(server: CannedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server hears that the program goes on, or it would take it for abandoned."""
    monkeypatch.setattr(remote_engine, "_ALIVE_S", 0.01)
    with weft.connect(server.url) as engine, weft.Program("p") as program:
        await ask(engine, program)
        await server.until_told("programs_open")
    assert server.of_type("programs_open")[0]["program_ids"] == [program.program_id]


async def test_a_server_that_is_gone_takes_no_notice(server: CannedServer, remote: RemoteEngine) -> None:
    """A notice that is lost raises nothing, and the program ends here."""
    with weft.Program("p") as program:
        await ask(remote, program)
        server.shutdown()
        server.server_close()
    assert program.state is ProgramState.FINISHED
    assert len(remote.table) == 0


async def test_something_else_than_weft_serve_is_refused(server: CannedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another server of OpenAI's API has models, too."""
    monkeypatch.delitem(ANSWERS, "/weft/programs")
    with pytest.raises(weft.WeftError, match="no answer of a `weft serve`"):
        weft.connect(server.url)


@pytest.mark.parametrize("ends", [False, True])
async def test_an_engine_may_be_used_on_several_event_loops(remote: RemoteEngine, ends: bool) -> None:
    """Its own loop is on a thread, as that of `weft.Engine`; after its end calls are refused."""

    def elsewhere() -> dict[str, Any]:
        with weft.Program("p") as program:
            return asyncio.run(ask(remote, program))

    if ends:
        remote.shutdown()
        with pytest.raises(weft.WeftError, match="shut down"):
            await asyncio.to_thread(elsewhere)
    else:
        answers = await asyncio.gather(*(asyncio.to_thread(elsewhere) for _ in range(3)))
        assert {answer["choices"][0]["message"]["content"] for answer in answers} == {"yes"}
