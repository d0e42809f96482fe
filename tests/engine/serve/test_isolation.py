"""Two keys on a real server: what one of them does, however hostile, is nothing to the other one."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from urllib.parse import urlsplit

import httpx
import psutil
import pytest
from hostile import attacks, fault_of, strike
from served import LIMITED_BYTES, LIMITED_CALLS, LIMITED_KEY, LIMITED_PROGRAMS, TRUSTED_KEY, Served
from tiny_engine import ENDLESS_TOKENS

pytestmark = pytest.mark.engine

AT_ONCE = 8  # attacks


def ask(client: httpx.Client, text: str, **headers: str) -> httpx.Response:
    body = {"model": "tiny", "messages": [{"role": "user", "content": text}], "max_tokens": 2, "temperature": 0}
    return client.post("/v1/chat/completions", json=body, headers=headers)


def client_of(served: Served, key: str) -> httpx.Client:
    return httpx.Client(base_url=served.url, timeout=120, headers={"authorization": f"Bearer {key}"})


class Victim(threading.Thread):
    """Talks as a client with programs does, until it is told to stop."""

    def __init__(self, client: httpx.Client, programs: list[str]) -> None:
        super().__init__()
        self._client, self._programs = client, programs
        self.stopped = threading.Event()
        self.calls: Counter[str] = Counter()
        self.faults: list[str] = []

    def run(self) -> None:
        while not self.stopped.is_set():
            for program in self._programs:
                response = ask(self._client, "Hello", **{"weft-program-id": program})
                if response.status_code == 200:
                    self.calls[program] += 1
                elif response.status_code != 429:
                    self.faults.append(f"{response.status_code} {response.text[:300]}")
            self.stopped.wait(0.2)


async def attack(served: Served, seed: int, count: int, stolen: list[str]) -> tuple[Counter[str], list[str]]:
    """Make attacks, some at once. Returns how many there were of each kind and status, and the faults."""
    port = urlsplit(served.url).port
    assert port is not None
    coming = attacks(seed, count, LIMITED_KEY, stolen, LIMITED_BYTES)
    seen: Counter[str] = Counter()
    faults: list[str] = []

    async def worker() -> None:
        for each in coming:
            answer = await strike(port, each)
            seen[f"{each.name.split(' of ')[0]} {answer.status}"] += 1
            fault = fault_of(each, answer)
            if fault is not None:
                faults.append(fault)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(AT_ONCE):
            tasks.create_task(worker())
    return seen, faults


def settled(served: Served) -> dict[str, int]:
    """The server's sizes when nothing is in flight."""
    deadline = time.monotonic() + 60
    while True:
        sizes = served.sizes()
        if not (sizes["requests"] or sizes["calls"] or sizes["admitted"]):
            return sizes
        assert time.monotonic() < deadline, sizes
        time.sleep(0.1)


# Memory is compared after many requests only; after a few, what allocators keep hides what they cost.
@pytest.mark.parametrize(
    ("count", "most_growth_bytes"), [(1_500, math.inf), pytest.param(20_000, 150 << 20, marks=pytest.mark.soak)]
)
def test_hostile_requests_touch_no_other_key(served: Served, count: int, most_growth_bytes: float) -> None:
    """The attacker has a key, and knows the ids of the other key's programs. It gets nothing but typed refusals, and
    calls of its own within its limits. The other client goes on, its programs have its own calls only, and nothing in
    the server has grown."""
    programs = [f"trip-{count}", f"claude-code:{count}", f"x/{count}"]
    with client_of(served, TRUSTED_KEY) as friend, client_of(served, LIMITED_KEY) as enemy:
        victim = Victim(friend, programs)
        warm_up = asyncio.run(attack(served, 1, 300, programs))[1]  # what is loaded late, is loaded
        before, process = settled(served), psutil.Process(served.process.pid)
        before_bytes, before_files = process.memory_info().rss, process.num_fds()
        victim.start()
        try:
            seen, faults = asyncio.run(attack(served, 2, count, programs))
        finally:
            victim.stopped.set()
            victim.join()
        found = {row["program_id"]: row["calls"] for row in friend.get("/weft/programs").json()["programs"]}
        others = [row["program_id"] for row in enemy.get("/weft/programs").json()["programs"]]
        sizes, grown_bytes = settled(served), process.memory_info().rss - before_bytes
        files = process.num_fds() - before_files
    print(count, dict(seen), sizes, grown_bytes, files)  # noqa: T201  for who runs all of them
    assert not (warm_up + faults), "\n".join([f"{len(faults)} faults", *warm_up[:10], *faults[:10]])
    assert sum(seen.values()) == count
    assert victim.faults == []
    assert {each: found.get(each) for each in programs} == {each: victim.calls[each] for each in programs}
    assert len(others) <= LIMITED_PROGRAMS
    assert sizes["calls of keys"] == sizes["busy programs"] == sizes["ending programs"] == 0
    assert sizes["keys with calls"] <= 1
    for name in ("programs", "rows", "sessions"):
        assert sizes[name] <= before[name] + LIMITED_PROGRAMS + len(programs)
    assert grown_bytes < most_growth_bytes
    assert files <= AT_ONCE


def test_a_key_at_its_limit_leaves_the_others_alone(served: Served) -> None:
    """Its third call is refused, with the time after which to try again. The server has places left."""
    endless = {"model": "tiny", "prompt": "Hello", "max_tokens": ENDLESS_TOKENS, "ignore_eos": True, "stream": True}
    begun: list[Iterator[str]] = []
    with client_of(served, LIMITED_KEY) as limited, ExitStack() as streams:
        for _ in range(LIMITED_CALLS):
            lines = streams.enter_context(limited.stream("POST", "/v1/completions", json=endless)).iter_lines()
            assert next(lines).startswith("data: ")
            begun.append(lines)  # an iterator that nothing keeps closes its stream
        response = ask(limited, "Hello")
        assert ask(served.client, "Hello").status_code == 200
    assert response.status_code == 429
    assert int(response.headers["retry-after"]) >= 1
    assert response.json()["error"]["code"] == "rate_limit_exceeded"
    assert settled(served)["calls of keys"] == 0


def test_a_request_of_many_prompts_counts_as_many_calls(served: Served) -> None:
    """Else a key could have any number of calls in one request. The request fails as a whole, and nothing is left."""
    body = {"model": "tiny", "prompt": ["a"] * (LIMITED_CALLS + 2), "max_tokens": 4}
    with client_of(served, LIMITED_KEY) as limited:
        assert limited.post("/v1/completions", json=body).status_code == 429
    sizes = settled(served)
    assert (sizes["calls of keys"], sizes["busy programs"]) == (0, 0)


def test_a_body_above_a_keys_limit_is_refused(served: Served) -> None:
    """Another key may send it."""
    body = {"model": "tiny", "prompt": "Hello", "vllm_xargs": {}, "user": "x" * LIMITED_BYTES, "max_tokens": 1}
    with client_of(served, LIMITED_KEY) as limited:
        response = limited.post("/v1/completions", json=body)
    assert response.status_code == 413
    assert "max_body_bytes" in response.json()["error"]["message"]
    assert served.client.post("/v1/completions", json=body).status_code == 200


def test_a_trusted_key_names_tenants_and_figures(served: Served) -> None:
    """A gateway is believed. A program's tenant is what it says, or else the key's."""
    with client_of(served, TRUSTED_KEY) as trusted:
        headers = {"weft-program-id": "customer", "weft-tenant": "acme"}
        body = {"model": "tiny", "prompt": "a", "max_tokens": 1, "vllm_xargs": {"service_s": 2.5, "program_calls": 3}}
        assert trusted.post("/v1/completions", json=body, headers=headers).status_code == 200
        assert ask(trusted, "Hello", **{"weft-program-id": "own"}).status_code == 200
        tenants = {row["program_id"]: row["tenant"] for row in trusted.get("/weft/programs").json()["programs"]}
    assert (tenants["customer"], tenants["own"]) == ("acme", "gateway")


def test_no_key_is_in_the_log(served: Served) -> None:
    """Neither at the start nor for the requests of the tests before."""
    log = served.log.read_text()
    assert "key-limited" not in log
    assert "key-trusted" not in log
