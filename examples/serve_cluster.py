"""Agents on a Ray cluster with two doors and two replicas, and a door and a node that are killed in the midst.

Run it with `python examples/serve_cluster.py`, or `--model Qwen/Qwen2.5-0.5B-Instruct`. The cluster is Ray's own for
one machine: a head and two nodes, each of which has room for one replica. The agents send no ids. With each question
they go to the other door, and the server finds out by their messages that each is one program. Who gets no answer asks
again.
"""

from __future__ import annotations

import os
import re
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import count
from tempfile import TemporaryDirectory
from threading import Event
from typing import Any, Final

import httpx2
import typer
from openai import APIConnectionError, OpenAI

from weft.examples._run import Model, tell

AGENTS: Final = ("rivers", "mountains", "islands", "lakes")
QUESTIONS: Final = tuple(f"Name one in {place}." for place in ("Africa", "Asia", "Europe", "America", "Australia"))
TOKENS: Final = 24
OPTIONS: Final = (
    *("--replicas", "2", "--served-model-name", "served", "--host", "127.0.0.1", "--port", "0", "--enforce-eager"),
    *("--max-model-len", "2048", "--kv-cache-memory-bytes", str(256 << 20), "--host-kv-gib", "0.25"),
    *("--uvicorn-log-level", "warning", "--disable-uvicorn-access-log"),
)
NODE: Final[dict[str, Any]] = {"object_store_memory": 100 << 20}


@dataclass
class Door:
    """A server that may die, and a client of it."""

    number: int
    process: subprocess.Popen[str]
    url: str = ""

    def ready(self) -> OpenAI:
        """Wait until it takes requests.

        Raises:
            typer.Exit: It has ended instead, and has said why.
        """
        assert self.process.stdout is not None  # noqa: S101  it is a pipe
        found = next((each for line in self.process.stdout if (each := re.search(r" at (http://\S+)", line))), None)
        if found is None:
            raise typer.Exit(self.process.wait() or 1)
        self.url = found[1]
        tell(f"door {self.number} is at {self.url}")
        return OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=600)


@dataclass
class Agent:
    """What one agent has seen."""

    topic: str
    answers: list[str] = field(default_factory=list)
    programs: set[str] = field(default_factory=set)
    sent: int = 0

    def run(self, clients: dict[int, OpenAI], turns: Iterator[int], middle: Event) -> None:
        """Ask all questions, each through the next door, and again through another one if that does not answer."""
        messages: list[Any] = [{"role": "system", "content": f"The user asks for {self.topic}."}]
        for turn, question in enumerate(QUESTIONS):
            if next(turns) == len(AGENTS) * len(QUESTIONS) // 2:
                middle.set()
            messages.append({"role": "user", "content": question})
            number = turn % 2 + 1 if 2 in clients else 1
            try:
                self.ask(clients[number], messages)
            except APIConnectionError:
                if number == 1:
                    raise
                tell(f"question {turn + 1} about {self.topic} has no answer from door 2, and is asked again at door 1")
                clients = {1: clients[1]}
                self.ask(clients[1], messages)
            messages.append({"role": "assistant", "content": self.answers[-1]})

    def ask(self, client: OpenAI, messages: list[Any]) -> None:
        """Send the messages, and keep the answer."""
        self.sent += 1
        raw = client.chat.completions.with_raw_response.create(
            model="served", messages=messages, max_tokens=TOKENS, extra_body={"ignore_eos": True}
        )
        self.answers.append(raw.parse().choices[0].message.content or "")
        self.programs.add(raw.headers["weft-program-id"])


@contextmanager
def cluster() -> Iterator[Any]:
    """A head without room for a replica, and two nodes with room for one each. Who has no token is refused."""
    os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32), RAY_USAGE_STATS_ENABLED="0")
    os.environ.update(RAY_worker_niceness="0")  # or the rest of this machine would come first
    from ray.cluster_utils import Cluster

    # Sockets need a short path, and nodes that end may still write.
    with TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        head = {**NODE, "num_cpus": 0, "include_dashboard": False, "temp_dir": folder}
        made: Any = Cluster(initialize_head=True, head_node_args=head)
        try:
            for _ in range(2):
                made.add_node(**NODE, num_cpus=1)
            yield made
        finally:
            made.shutdown()


def node_of_a_replica(made: Any) -> Any:
    """A node with a replica but without the engine's owner, whose death would lose what it knows."""
    actors = [each for each in made.global_state.actor_table(None).values() if each["State"] == "ALIVE"]
    replicas, owners = (
        {each["Address"]["NodeID"] for each in actors if each["ActorClassName"] == name}
        for name in ("ReplicaHost", "Owner")
    )
    return next(node for node in made.worker_nodes if node.node_id in replicas - owners)


@contextmanager
def door(number: int, command: list[str]) -> Iterator[Door]:
    """Start a door, which ends with the block."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"})  # noqa: S603  a fixed command
    try:
        yield Door(number, process)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(120)


def report(agents: list[Agent], url: str) -> bool:
    """Say what became of the agents. Returns whether all is well."""
    listed = httpx2.get(f"{url}/weft/programs", timeout=60).json()["programs"]
    calls = {each["program_id"]: each["calls"] for each in listed}
    asked, answered = len(agents) * len(QUESTIONS), sum(len(agent.answers) for agent in agents)
    sent, seen = sum(agent.sent for agent in agents), [agent.programs for agent in agents]
    found = {
        f"no call was lost: {asked} questions, {answered} answers": asked == answered,
        f"none was doubled: {sent} requests, {sum(calls.values())} calls": asked <= sum(calls.values()) <= sent,
        f"no program was split: {len(agents)} agents, {len(calls)} programs": sorted(map(list, seen))
        == sorted([each] for each in calls),
    }
    tell("")
    for line, holds in found.items():
        tell(line if holds else f"NOT SO: {line}")
    return all(found.values())


def main(model: Model = None) -> None:
    """Start a cluster with two doors, kill a door and a node while agents use them, and say what became of all."""
    with ExitStack() as stack:
        made = stack.enter_context(cluster())
        tell(f"a Ray cluster of three nodes at {made.address}")
        name = [] if model is None else [model]
        command = [sys.executable, "-m", "weft", "serve", *name, "--join", made.address, *OPTIONS]
        doors = [stack.enter_context(door(number, command)) for number in (1, 2)]
        tell(f"$ weft {' '.join(command[3:])}    # twice", "bold")
        clients = {each.number: stack.enter_context(each.ready()) for each in doors}
        agents, turns, middle = [Agent(topic) for topic in AGENTS], count(1), Event()
        with ThreadPoolExecutor(len(agents)) as pool:
            running = [pool.submit(agent.run, clients, turns, middle) for agent in agents]
            middle.wait()
            tell("killing door 2, and a node with a replica")
            doors[1].process.kill()
            made.remove_node(node_of_a_replica(made), allow_graceful=False)
            for each in running:
                each.result()
        top = [sys.executable, "-m", "weft", "top", doors[0].url, "--once"]
        tell(f"\n$ weft {' '.join(top[3:])}", "bold")
        subprocess.run(top, check=True)  # noqa: S603  a fixed command
        if not report(agents, doors[0].url):
            raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
