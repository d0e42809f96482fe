"""`weft serve --join`: several doors of one engine, in processes that are killed and stopped while agents use them."""

from __future__ import annotations

import asyncio
import json
import os
import re
import secrets
import signal
import subprocess
import sys
import threading
from argparse import Namespace
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from socket import create_connection, create_server, socket
from tempfile import TemporaryDirectory
from typing import Any

import anyio
import httpx
import psutil
import pytest
from background import ROOT
from polling import until
from served import url_of
from threads import ONE_THREAD
from tiny_engine import ENDLESS_TOKENS, LONG_CONTEXT_OPTIONS

from weft.core.errors import ClusterError

pytest.importorskip("ray", reason="the extra ray is not installed")
pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.anyio]

SCRIPT = """
from weft.testing import Reply


def reply(request):
    messages = request["messages"]
    turn = sum(each["role"] == "assistant" for each in messages)
    words = "slow " * 2000 if "slowly" in messages[-1]["content"] else "word " * 20
    token_s = 1000 if messages[-1]["content"] == "some day" else 0.002
    return Reply(f"{turn}: {messages[-1]['content']} " + words, token_s=token_s)
"""
# At Ray's own nice value of 15, owners would take minutes to start beside other tests.
RAY = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}
ENVIRONMENT = {**os.environ, **RAY, **ONE_THREAD}
AGENTS, TURNS = 6, 6
HANG_S = 30


@dataclass
class Cluster:
    """A Ray cluster of one node, and the script that all doors serve."""

    address: str
    process: subprocess.Popen[bytes]
    folder: Path

    def start(self, *more: str, model: Sequence[str] = ()) -> Door:
        """Start a door of the script, or of a model; `Door.url` waits until it is ready."""
        log = self.folder / f"door-{len(list(self.folder.glob('door-*')))}.log"
        command = [
            *(sys.executable, "-m", "weft", "serve", *(model or ("--scripted", str(self.folder / "script.py")))),
            *("--join", self.address, "--served-model-name", "tiny", "--host", "127.0.0.1", "--port", "0"),
            *("--hang-timeout-s", str(HANG_S), *more),
        ]
        with log.open("wb") as output:
            process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=ENVIRONMENT)
        return Door(process, log)

    def actors(self, name: str) -> list[psutil.Process]:
        """The processes of actors, such as "Owner": one, or none while it starts again."""
        found = []
        for each in psutil.Process(self.process.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                found += [each] * (f"ray::{name}" in "".join(each.cmdline()))
        return found


@dataclass
class Door:
    """The process of a door."""

    process: subprocess.Popen[bytes]
    log: Path

    @property
    def url(self) -> str:
        return str(url_of(self.process, self.log))


@contextmanager
def ray_cluster() -> Iterator[Cluster]:
    """A cluster of this machine that ends with its processes."""
    with TemporaryDirectory(prefix="ray-", dir="/tmp") as folder:  # sockets need a short path
        with create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        command = [
            *(str(Path(sys.executable).parent / "ray"), "start", "--head", "--block", "--port", str(port)),
            *("--num-cpus", "1", "--node-ip-address", "127.0.0.1", "--include-dashboard", "false"),
            *("--object-store-memory", str(100 << 20), "--temp-dir", folder),
        ]
        (Path(folder) / "script.py").write_text(SCRIPT)
        with (Path(folder) / "head.log").open("wb") as output:
            process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=ENVIRONMENT)
        try:
            anyio.run(until, lambda: b"Ray runtime started" in (Path(folder) / "head.log").read_bytes())
            yield Cluster(f"127.0.0.1:{port}", process, Path(folder))
        finally:
            process.terminate()
            process.wait(60)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with ray_cluster() as cluster:
        yield cluster


@pytest.fixture(scope="module")
def doors(cluster: Cluster) -> Iterator[list[Door]]:
    """Two doors, which start at the same time."""
    doors = [cluster.start(), cluster.start()]
    assert all(door.url for door in doors)
    yield doors
    for door in doors:
        door.process.send_signal(signal.SIGCONT)
        door.process.terminate()
    assert [door.process.wait(120) for door in doors] == [0, 0], doors[0].log.read_text()[-3000:]


def programs(door: Door) -> dict[str, int]:
    """The calls of each open program, as a door shows them."""
    answer = httpx.get(f"{door.url}/weft/programs", timeout=100)
    assert answer.status_code == 200, answer.text
    return {each["program_id"]: each["calls"] for each in answer.json()["programs"]}


def ask(door: Door, messages: list[dict[str, Any]], headers: dict[str, str] | None = None) -> tuple[str, str]:
    """A streamed answer, and the id of its program.

    Raises:
        httpx.TransportError: The door has ended before the answer did.
    """
    body = {"model": "tiny", "messages": messages, "stream": True}
    text, is_whole = "", False
    with httpx.stream("POST", f"{door.url}/v1/chat/completions", json=body, headers=headers, timeout=100) as answer:
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            is_whole |= line == "data: [DONE]"
            if line.startswith("data: {"):
                choices = httpx.Response(200, text=line.removeprefix("data: ")).json()["choices"]
                text += "".join(choice["delta"].get("content") or "" for choice in choices)
        assert is_whole
        return text, answer.headers["weft-program-id"]


def test_a_door_that_is_killed_loses_and_splits_nothing(cluster: Cluster, doors: list[Door]) -> None:
    """It is killed in the midst of the agents' streams."""
    kill_a_door(cluster, doors)


@pytest.mark.soak
@pytest.mark.parametrize("number", range(20))
def test_twenty_doors_are_killed(cluster: Cluster, doors: list[Door], number: int) -> None:
    """One after the other, each among agents whose texts are new."""
    del number
    kill_a_door(cluster, doors)


def kill_a_door(cluster: Cluster, doors: list[Door]) -> None:
    """Agents without ids send each turn to another door, and one of three doors is killed in the midst of their
    streams. Who had an answer under way there sends the turn again. Each agent gets each of its answers once, is one
    program all the time, and no program has more calls than requests were sent."""
    killed = cluster.start()
    ways = [doors[0], killed, doors[1]]
    assert killed.url
    before = programs(doors[0])
    team = secrets.token_hex(4)  # lineage cannot tell agents apart that say what others said before
    turns_begun, sent = count(1), [0] * AGENTS

    def run(agent: int) -> tuple[list[str], set[str]]:
        messages: list[dict[str, Any]] = [{"role": "user", "content": f"Agent {agent} of {team} asks."}]
        texts, ids = [], set()
        for turn in range(TURNS):
            if next(turns_begun) == AGENTS * TURNS // 2:
                killed.process.kill()
            for way in (ways[(agent + turn) % 3], doors[0]):
                sent[agent] += 1
                try:
                    text, program_id = ask(way, messages)
                except httpx.TransportError:
                    assert way is killed
                    continue
                break
            texts.append(text)
            ids.add(program_id)
            messages += [
                {"role": "assistant", "content": text},
                {"role": "user", "content": f"{agent} goes on, {turn}."},
            ]
        return texts, ids

    with ThreadPoolExecutor(AGENTS) as pool:
        results = list(pool.map(run, range(AGENTS)))
    assert killed.process.wait(60) == -signal.SIGKILL
    for agent, (texts, ids) in enumerate(results):
        asked = [f"Agent {agent} of {team} asks.", *(f"{agent} goes on, {turn}." for turn in range(TURNS))]
        assert [text.removesuffix("word " * 20) for text in texts] == [
            f"{turn}: {asked[turn]} " for turn in range(TURNS)
        ]
        assert len(ids) == 1
    found = {name: calls for name, calls in programs(doors[1]).items() if name not in before}
    assert set(found) == {name for _texts, ids in results for name in ids}
    assert len(found) == AGENTS
    for agent, (_texts, ids) in enumerate(results):
        assert TURNS <= found[ids.pop()] <= sent[agent]


def test_a_client_that_leaves_a_door_ends_its_call(doors: list[Door]) -> None:
    """The owner hears of it through the door."""
    body = {"model": "tiny", "messages": [{"role": "user", "content": "slowly"}], "stream": True}
    headers = {"weft-program-id": "left"}
    url = doors[0].url
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, headers=headers, timeout=100) as answer:
        lines = answer.iter_lines()
        assert next(lines)
        assert in_flight(doors[1], "left") == 1
    anyio.run(until, lambda: in_flight(doors[1], "left") == 0)


def in_flight(door: Door, program_id: str) -> int:
    shown = httpx.get(f"{door.url}/weft/programs", timeout=100).json()["programs"]
    return next((int(each["calls_in_flight"]) for each in shown if each["program_id"] == program_id), 0)


def test_a_door_that_is_stopped_and_goes_on(doors: list[Door]) -> None:
    """The program goes on through the other door meanwhile, and afterwards through both."""
    headers = {"weft-program-id": "stopped"}
    first = ask(doors[1], [{"role": "user", "content": "one"}], headers)
    doors[1].process.send_signal(signal.SIGSTOP)
    second = ask(doors[0], [{"role": "user", "content": "two"}], headers)
    doors[1].process.send_signal(signal.SIGCONT)
    third = ask(doors[1], [{"role": "user", "content": "three"}], headers)
    assert [text.partition(" word")[0] for text, _ in (first, second, third)] == ["0: one", "0: two", "0: three"]
    assert [program_id for _, program_id in (first, second, third)] == ["stopped"] * 3
    assert programs(doors[0])["stopped"] == 3


def test_a_door_that_is_stopped_in_the_midst_of_a_stream(doors: list[Door]) -> None:
    """The stream waits, and is whole when the door goes on. The program's next call does not wait for it."""
    headers = {"weft-program-id": "halted"}
    body = {"model": "tiny", "messages": [{"role": "user", "content": "slowly"}], "stream": True}
    url = f"{doors[1].url}/v1/chat/completions"
    with httpx.stream("POST", url, json=body, headers=headers, timeout=300) as answer:
        lines = answer.iter_lines()
        first = next(lines)
        doors[1].process.send_signal(signal.SIGSTOP)
        assert ask(doors[0], [{"role": "user", "content": "meanwhile"}], headers)[0].startswith("0: meanwhile ")
        doors[1].process.send_signal(signal.SIGCONT)
        events = [each for each in (first, *lines) if each]
    assert events[-1] == "data: [DONE]"
    chunks = [json.loads(each.removeprefix("data: ")) for each in events[:-1]]
    text = "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])
    assert text.split() == ["0:", "slowly", *["slow"] * 2000]
    assert programs(doors[0])["halted"] == 2


@pytest.mark.soak
def test_the_only_door_is_stopped_for_long(cluster: Cluster, doors: list[Door]) -> None:
    """The engine ends without a door that is heard of, and the door starts another one when it goes on."""
    for door in doors:
        door.process.send_signal(signal.SIGSTOP)
    anyio.run(until, lambda: cluster.actors("Owner") == [])
    doors[0].process.send_signal(signal.SIGCONT)
    body = {"model": "tiny", "messages": [{"role": "user", "content": "one"}]}
    assert answer_of(doors[0], body, {"weft-program-id": "after"}).headers["weft-program-id"] == "after"
    doors[1].process.send_signal(signal.SIGCONT)
    assert programs(doors[1]) == {"after": 1}


def test_doors_and_the_owner_notice_that_the_other_is_cut_off(cluster: Cluster, doors: list[Door]) -> None:
    """While nothing is sent, the system asks the other side of each connection whether it is there."""
    body = json.dumps({"model": "tiny", "messages": [{"role": "user", "content": "some day"}]}).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: door\r\nweft-program-id: waits\r\n"
    (owner,) = cluster.actors("Owner")
    with create_connection(("127.0.0.1", httpx.URL(doors[0].url).port or 0)) as client:
        client.sendall(head + b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        anyio.run(until, lambda: in_flight(doors[1], "waits") == 1)
        own = {(each.laddr, each.raddr) for each in owner.net_connections("tcp") if each.raddr}
        theirs = psutil.Process(doors[0].process.pid).net_connections("tcp")
        shared = {frozenset((each.laddr, each.raddr)) for each in theirs if (each.raddr, each.laddr) in own}
        sides = (owner.pid, doors[0].process.pid)
        anyio.run(until, lambda: shared.intersection(*map(kept_alive, sides)))  # the others are Ray's


def kept_alive(pid: int) -> set[frozenset[Any]]:
    """The connections that a process has, over which the system asks whether the other side is there."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    asked = {(row[1][-4:], row[2][-4:]) for row in rows if row[5].startswith("02:")}
    found = [each for each in psutil.Process(pid).net_connections("tcp") if each.raddr]
    return {
        frozenset((each.laddr, each.raddr))
        for each in found
        if (f"{each.laddr.port:04X}", f"{each.raddr.port:04X}") in asked
    }


def test_the_owner_is_killed(cluster: Cluster, doors: list[Door]) -> None:
    """What was under way there fails with an error that says to send it again, what comes later waits for Ray to start
    the owner again, and a program with an id goes on under it."""
    headers = {"weft-program-id": "again"}
    (owner,) = cluster.actors("Owner")
    owner.kill()
    owner.wait(60)
    body = {"model": "tiny", "messages": [{"role": "user", "content": "one"}]}
    assert [answer_of(door, body, headers).headers["weft-program-id"] for door in doors] == ["again", "again"]
    assert programs(doors[0]) == {"again": 2}


def test_the_owner_is_stopped(cluster: Cluster, doors: list[Door]) -> None:
    """A door kills an owner that does not answer, and Ray starts another one. There are never two."""
    (owner,) = cluster.actors("Owner")
    owner.suspend()
    body = {"model": "tiny", "messages": [{"role": "user", "content": "one"}]}
    assert answer_of(doors[0], body, {"weft-program-id": "late"}).headers["weft-program-id"] == "late"
    assert cluster.actors("Owner") != [owner]
    assert len(cluster.actors("Owner")) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--served-model-name", "another"), "was started with model tiny, and this server with another"),
        (("--policy", "fcfs"), "was started with --policy PolicyConfig"),
        (("--join", "127.0.0.1:1"), "no Ray cluster answers at '127.0.0.1:1'"),
    ],
)
def test_a_door_that_does_not_fit(
    cluster: Cluster, doors: list[Door], arguments: tuple[str, ...], message: str
) -> None:
    """It says in one line what differs, and ends; the doors that there are serve on."""
    other = cluster.start(*arguments)
    assert other.process.wait(300) == 1
    (line,) = [each for each in other.log.read_text().splitlines() if each.startswith("error:")]
    assert message in line
    assert httpx.get(f"{doors[0].url}/health", timeout=100).status_code == 200


async def test_a_door_of_another_weft() -> None:
    """Its version is compared before anything else of it is read."""
    from weft.engine.serve.doors.owner import Owner, Setup
    from weft.engine.serve.keys import make_key_ring

    setup = Setup({}, Namespace(), make_key_ring([], None), None, {"vllm-weft": "0.1.0", "model": "tiny"})
    with pytest.raises(ClusterError, match=r"with vllm-weft 0\.1\.0, and this server with 0\.2\.0"):
        await Owner(setup).join("door", {"vllm-weft": "0.2.0"})


async def test_an_owner_ends_after_its_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """While its engine ends for the last door, the watch over the doors waits for that, and kills no half of it."""
    import ray

    from weft.engine.serve.doors import owner as module
    from weft.engine.serve.keys import make_key_ring

    killed: list[str] = []
    monkeypatch.setattr(module, "PERIOD_S", 1e-4)
    monkeypatch.setattr(ray, "kill", killed.append)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: Namespace(current_actor="the owner"))
    begun, may_end = threading.Event(), threading.Event()
    owner = module.Owner(module.Setup({}, Namespace(), make_key_ring([], None), None, {}))
    monkeypatch.setattr(owner, "_serve", lambda: module.Served("http://owner", "secret", ("owner", 1)))
    await owner.join("door", {})
    owner._open.callback(lambda: (begun.set(), may_end.wait()))
    leaving = asyncio.ensure_future(owner.leave("door"))
    await until(begun.is_set)
    for _ in range(100):  # turns in which the watch could end the owner
        await asyncio.sleep(1e-3)
    assert killed == []
    may_end.set()
    assert await leaving == 0
    await until(lambda: killed == ["the owner"])


async def test_an_owner_that_starts_is_not_taken_to_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    """A door waits long for the first answer of each owner, and kills it if later ones do not come."""
    import ray

    from weft.engine.serve.doors.door import OwnerLink

    asked: list[asyncio.Future[None]] = []
    killed: list[int] = []

    def ping() -> asyncio.Future[None]:
        asked.append(asyncio.get_running_loop().create_future())
        return asked[-1]

    monkeypatch.setattr(ray, "kill", lambda _owner, no_restart: killed.append(len(asked)))
    setup: Any = None
    link = OwnerLink(setup)
    link._owner = Namespace(ping=Namespace(remote=ping))
    watching = asyncio.ensure_future(link.watch(1e-3))
    for owner in (1, 2):
        await until(lambda first=2 * owner - 1: len(asked) == first)
        for _ in range(50):  # many times its time limit
            await asyncio.sleep(1e-3)
        assert len(killed) == owner - 1
        asked[-1].set_result(None)
        await until(lambda owner=owner: len(killed) == owner)
    watching.cancel()


async def test_an_owner_that_a_door_cannot_reach_is_not_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A door that is cut off from the owner's machine does not end what others use. It does when it is there again, and
    the owner still gives no answer."""
    import ray

    from weft.engine.serve.doors import door as module
    from weft.engine.serve.doors.owner import Served

    killed: list[int] = []
    monkeypatch.setattr(module, "_CONNECT_S", 0.01)
    monkeypatch.setattr(ray, "kill", lambda _owner, no_restart: killed.append(len(asked)))
    with create_server(("127.0.0.1", 0), backlog=0) as machine, socket() as only:
        only.connect(machine.getsockname())  # its queue is full: the system drops what comes
        asked: list[asyncio.Future[Served]] = []

        def ping() -> asyncio.Future[Served]:
            """Answered when the watch begins anew, and otherwise not."""
            asked.append(asyncio.get_running_loop().create_future())
            if len(asked) % 2:
                asked[-1].set_result(Served("http://owner", "secret", machine.getsockname()))
            return asked[-1]

        setup: Any = None
        link = module.OwnerLink(setup)
        link._owner = Namespace(ping=Namespace(remote=ping))
        watching = asyncio.ensure_future(link.watch(1e-3))
        await until(lambda: len(asked) > 6)
        assert killed == []
        machine.listen(1000)
        await until(lambda: killed)
        watching.cancel()


async def test_an_owner_that_is_there_again_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that a door could not pass on goes to the same owner when it can be reached."""
    from weft.engine.serve.doors import door as module
    from weft.engine.serve.doors.owner import Served

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nhere")
        await writer.drain()
        writer.close()

    with create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    setup: Any = None
    link, joins, servers = module.OwnerLink(setup), count(1), []

    async def join() -> None:
        link._served = Served(f"http://127.0.0.1:{port}", "secret", ("127.0.0.1", port))
        if next(joins) == 3:
            servers.append(await asyncio.start_server(answer, "127.0.0.1", port))

    monkeypatch.setattr(link, "_join", join)
    monkeypatch.setattr(module, "_AGAIN_S", 1e-3)
    transport = httpx.ASGITransport(module.Door(link.served))
    async with httpx.AsyncClient(transport=transport, base_url="http://door") as client:
        assert (await client.get("/health")).text == "here"
    servers[0].close()


async def test_only_doors_reach_the_owner() -> None:
    """A stranger who finds the owner's port is refused, and a door's client cannot name another origin."""
    from weft.engine.serve.doors.owner import FromDoors

    seen: list[dict[str, Any]] = []

    async def app(scope: Any, _receive: Any, send: Any) -> None:
        seen.append(scope)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    transport = httpx.ASGITransport(FromDoors(app, "secret"))
    async with httpx.AsyncClient(transport=transport, base_url="http://owner") as client:
        guesses: list[dict[str, str]] = [{}, {"weft-door": ""}, {"weft-door": '["guess", ["1.2.3.4", 5], "https"]'}]
        for headers in guesses:
            refused = await client.get("/v1/models", headers=headers)
            assert (refused.status_code, refused.json()["error"]["code"]) == (403, "not_a_door")
        assert seen == []
        headers = {"weft-door": '["secret", ["1.2.3.4", 5], "https"]'}
        assert (await client.get("/v1/models", headers=headers)).status_code == 200
    assert (seen[0]["client"], seen[0]["scheme"]) == (("1.2.3.4", 5), "https")
    assert not [name for name, _ in seen[0]["headers"] if name.startswith(b"weft-door")]


def test_the_engine_ends_with_its_last_door(cluster: Cluster, doors: list[Door]) -> None:
    """Its actor is gone then, and a door that comes later starts another one."""
    for door in doors:
        door.process.terminate()
    assert [door.process.wait(120) for door in doors] == [0, 0]
    anyio.run(until, lambda: cluster.actors("Owner") == [])
    doors[:] = [cluster.start(), cluster.start()]
    assert [programs(door) for door in doors] == [{}, {}]


def test_a_replica_and_its_kv_outlive_the_owner(tiny_model: Path) -> None:
    """The owner is killed while a call runs. The same replica serves on, has dropped that call, and finds the KV of
    what the program had asked before. It ends with the last door."""
    model = [
        *(str(tiny_model), "--max-num-seqs", "4", *LONG_CONTEXT_OPTIONS, "--enforce-eager"),
        *("--kv-cache-memory-bytes", str(256 << 20), "--enable-prompt-tokens-details"),
    ]
    headers = {"weft-program-id": "kept"}
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "word " * 200}], "max_tokens": 4, "temperature": 0}
    endless = {**body, "max_tokens": ENDLESS_TOKENS, "ignore_eos": True, "stream": True}
    with ray_cluster() as cluster:
        door = cluster.start(model=model)
        url = f"{door.url}/v1/chat/completions"
        first = httpx.post(url, json=body, headers=headers, timeout=300).json()
        replicas = cluster.actors("ReplicaHost")
        with httpx.stream("POST", url, json=endless, headers=headers, timeout=300) as answer:
            lines = answer.iter_lines()
            assert next(lines).startswith("data: ")
            (owner,) = cluster.actors("Owner")
            owner.kill()
            with pytest.raises(httpx.RemoteProtocolError):
                list(lines)
        again = answer_of(door, body, headers)
        assert again.json()["choices"][0]["message"] == first["choices"][0]["message"]
        assert again.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 200
        assert cluster.actors("ReplicaHost") == replicas != []

        def replica() -> dict[str, Any]:
            (found,) = httpx.get(f"{door.url}/weft/state", timeout=100).json()["replicas"]
            return dict(found)

        anyio.run(until, lambda: replica()["running"] == 0)
        assert (replica()["state"], replica()["deaths"]) == ("ready", 0)
        door.process.terminate()
        assert door.process.wait(120) == 0, door.log.read_text()[-3000:]
        anyio.run(until, lambda: cluster.actors("ReplicaHost") == [])


def answer_of(door: Door, body: dict[str, Any], headers: dict[str, str]) -> httpx.Response:
    """The answer to a request that is sent again as long as its error says so."""
    while True:
        answer = httpx.post(f"{door.url}/v1/chat/completions", json=body, headers=headers, timeout=600)
        if answer.status_code == 200:
            return answer
        assert answer.headers["x-should-retry"] == "true", answer.text


@pytest.mark.soak
def test_the_demo_of_a_cluster(tiny_model: Path) -> None:
    """It kills a door and a node in the midst of four programs, and finds that nothing was lost, doubled or split."""
    command = [sys.executable, str(ROOT / "examples" / "serve_cluster.py"), "--model", str(tiny_model)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **ONE_THREAD})
    assert ended.returncode == 0, ended.stderr[-3000:]
    *_, lost, doubled, split = ended.stdout.splitlines()
    assert lost == "no call was lost: 20 questions, 20 answers"
    assert re.fullmatch(r"none was doubled: 2\d requests, 2\d calls", doubled)
    assert split == "no program was split: 4 agents, 4 programs"
    assert "killing door 2, and a node with a replica" in ended.stdout
    assert re.search(r"^engine-0/\d ready ", ended.stdout, re.MULTILINE)
    assert re.search(r"^engine-0/\d (starting|down)", ended.stdout, re.MULTILINE), ended.stdout
