"""An engine that listens: where, for whom and how long, and what it serves."""

from __future__ import annotations

import asyncio
import gc
import os
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from perfetto_rules import check

import weft
from weft.core.errors import ListenError, MissingPackageError, ProgramEndedError
from weft.testing import FakeClock, ScriptedEngine
from weft.views.top_client import STATES

pytest_plugins = ["weft.testing.fixtures"]
pytestmark = pytest.mark.anyio

MESSAGES: Any = {"messages": [{"role": "user", "content": "Hello"}]}
STATE = "/weft/state"


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    """A short path, because that of a socket has at most 107 characters."""
    folder = Path(os.environ.get("TMPDIR", "/tmp"))  # noqa: S108  tmp_path may be too long
    found = folder / f"weft-{os.getpid()}-{tmp_path.name[-20:]}"
    yield found
    found.unlink(missing_ok=True)


def client(engine: ScriptedEngine) -> httpx.Client:
    assert engine.url is not None
    if engine.url.startswith("unix:"):
        transport = httpx.HTTPTransport(uds=engine.url.removeprefix("unix:"))
        return httpx.Client(transport=transport, base_url="http://weft")
    return httpx.Client(base_url=engine.url)


async def test_an_engine_serves_its_state(path: Path) -> None:
    """At a port of this host and at a unix socket, with the program that has made a call."""
    for listen in ("127.0.0.1:0", f"unix:{path}"):
        with ScriptedEngine(["Hi"], latency_s=1.5, listen=listen) as engine, weft.Program("agent") as program:
            await engine.chat(MESSAGES, program, program.reports.start_call(object()))
            with client(engine) as http:
                state = STATES.validate_json(http.get(STATE).raise_for_status().content)
        (shown,) = state.programs
        assert (shown.program_id, shown.name, shown.state) == (program.program_id, "agent", "idle")
        assert (shown.service_s, shown.output_tokens, shown.calls, shown.level) == (1.5, 1, 1, None)
        (replica,) = state.replicas
        assert (state.model, replica.model, replica.state, replica.running) == ("scripted", "scripted", "ready", None)


async def test_an_engine_listens_only_if_asked() -> None:
    """Nobody can connect to an engine by default."""
    with ScriptedEngine([]) as engine:
        assert engine.url is None


async def test_a_program_is_ended_from_outside() -> None:
    """Its call in flight and its next one raise the error of a program that has ended, and its last row stays."""
    clock = FakeClock()
    with ScriptedEngine(["Hi"], latency_s=9.0, clock=clock, listen="127.0.0.1:0") as engine, client(engine) as http:
        program = weft.Program("agent")
        call = asyncio.ensure_future(engine.chat(MESSAGES, program, program.reports.start_call(object())))
        await engine.until_waiting(1)
        found = STATES.validate_json((await asyncio.to_thread(http.get, STATE)).content)
        assert found.programs[0].state == "running"
        url = f"/weft/programs/{program.program_id}"
        assert (await asyncio.to_thread(http.delete, url)).status_code == 204
        assert (await asyncio.to_thread(http.delete, url)).status_code == 404
        with pytest.raises(ProgramEndedError):
            await call
        with pytest.raises(ProgramEndedError):
            await engine.chat(MESSAGES, program, program.reports.start_call(object()))
        program.end()
        assert program.row is not None
        assert str(program.row.state) == "cancelled"


REACHED_BY_OTHERS = "0.0.0.0:8001", "192.168.1.1:80", "[::]:80", "example.com:80", ":80"
MALFORMED = (
    "",
    "127.0.0.1",
    "127.0.0.1:65536",
    "127.0.0.1:-1",
    "http://127.0.0.1:80",
    "unix:",
    "unix:weft.sock",
    "x" * 9999,
)


@pytest.mark.parametrize("listen", [*REACHED_BY_OTHERS, *MALFORMED], ids="{:.20}".format)
def test_an_address_that_others_reach_is_refused(listen: str) -> None:
    """There is no authentication, so only this host, or the owner of a socket's file, may connect."""
    with pytest.raises(ListenError, match="an engine cannot listen at"):
        ScriptedEngine([], listen=listen)


def test_an_address_in_use_is_refused() -> None:
    """The error comes before an engine starts, which takes long."""
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(ListenError, match="in use"):
        ScriptedEngine([], listen=f"127.0.0.1:{taken.getsockname()[1]}")


def test_only_its_owner_may_use_a_unix_socket(path: Path) -> None:
    """The file is there as long as the engine."""
    with ScriptedEngine([], listen=f"unix:{path}"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert not path.exists()


def test_an_engine_that_nobody_shuts_down_leaves_no_socket(path: Path) -> None:
    """The listener does not keep the engine alive."""
    engine = ScriptedEngine([], listen=f"unix:{path}")
    assert path.exists()
    del engine
    gc.collect()
    assert not path.exists()


def test_a_stale_socket_is_replaced_and_others_are_not(path: Path) -> None:
    """A killed engine leaves its file. That of a living one, and a file that is no socket, are somebody's."""
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(path))
        killed.listen()
    with ScriptedEngine([], listen=f"unix:{path}") as first:
        with pytest.raises(ListenError, match="another process listens there"):
            ScriptedEngine([], listen=f"unix:{path}")
        with client(first) as http:
            assert http.get(STATE).status_code == 200
    path.write_text("mine")
    with pytest.raises(ListenError, match="is no socket"):
        ScriptedEngine([], listen=f"unix:{path}")
    assert path.read_text() == "mine"


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "", "[", "10.0.0.1"])
def test_a_page_of_another_host_is_refused(host: str) -> None:
    """A browser sends the name of the page's host, also if that name was made to mean this host."""
    with ScriptedEngine([], listen="127.0.0.1:0") as engine, client(engine) as http:
        assert http.get(STATE, headers={"host": host}).status_code == 403
        assert http.delete("/weft/programs/p", headers={"host": host}).status_code == 403
        assert http.get(STATE, headers={"host": "localhost:1"}).status_code == 200


FORKED = """
import os, sys
from weft.testing import ScriptedEngine
engine = ScriptedEngine([], listen=sys.argv[1])
print(engine.url, flush=True)
if os.fork() == 0:
    os.write(1, os.fsencode("forked" + os.linesep))  # print may write the end of the line by itself
    sys.stdin.read()  # until the test has looked
    os._exit(0)
engine.shutdown()
os.write(1, os.fsencode("down" + os.linesep))
os._exit(0)
"""


@pytest.mark.parametrize("make", [lambda path: "127.0.0.1:0", lambda path: f"unix:{path}"], ids=["port", "unix"])
def test_a_forked_child_does_not_listen(path: Path, make: Callable[[Path], str]) -> None:
    """The child has a copy of the socket, and closes it: nobody could answer there after its parent's end."""
    command = [sys.executable, "-W", "ignore", "-c", FORKED, make(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        assert {process.stdout.readline(), process.stdout.readline()} == {"forked\n", "down\n"}  # in either order
        family, address = (
            (socket.AF_UNIX, url.removeprefix("unix:"))
            if url.startswith("unix:")
            else (socket.AF_INET, ("127.0.0.1", int(url.rpartition(":")[2])))
        )
        with socket.socket(family) as probe, pytest.raises((ConnectionRefusedError, FileNotFoundError)):
            probe.connect(address)
        process.communicate()


async def test_an_engine_has_the_page_and_timelines(path: Path) -> None:
    """With the calls of a program in process, its tools and their labels; at a unix socket as at a port."""
    for listen in ("127.0.0.1:0", f"unix:{path}"):
        with ScriptedEngine(["Hi"], latency_s=1.5, listen=listen) as engine, weft.Program("agent") as program:
            await engine.chat(MESSAGES, program, program.reports.start_call(object()))
            with client(engine) as http:
                page = http.get("/weft").raise_for_status()
                made = http.get(f"/weft/programs/{program.program_id}/timeline").raise_for_status().json()
                trace = http.get(f"/weft/programs/{program.program_id}/perfetto").raise_for_status().json()
                assert http.get("/weft/programs/none/timeline").status_code == 404
        assert "data-needs-key" not in page.text
        assert page.headers["content-security-policy"].startswith("default-src 'none'")
        (call,) = made["calls"]
        assert (made["name"], call["service_s"], call["services"]) == ("agent", 1.5, [[0.0, 1.5]])
        check(trace)


async def test_the_page_is_for_this_host_only() -> None:
    """A name that leads here from elsewhere gets nothing, because a foreign page could read it then."""
    with ScriptedEngine([], listen="127.0.0.1:0") as engine, client(engine) as http:
        for path in ("/weft", "/weft/page/main.js", "/weft/programs/p/timeline"):
            assert http.get(path, headers={"host": "evil.example"}).status_code == 403


def test_an_engine_that_listens_needs_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Starlette and uvicorn come with vLLM, and the error says what to install without it."""
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    with pytest.raises(MissingPackageError, match="pip install starlette uvicorn"):
        ScriptedEngine([], listen="127.0.0.1:0")
