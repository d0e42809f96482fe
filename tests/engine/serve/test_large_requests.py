"""Requests of many megabytes: streams of others go on while they are read."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Coroutine, Mapping
from functools import wraps
from typing import Any

import pytest

from weft.core.identity import Evidence
from weft.core.identity.items import LONG_CHARACTERS, items_of_answer, text_of
from weft.core.identity.lineage import Lineage, Placed
from weft.engine.http import check_ids
from weft.engine.http.check_ids import LARGE_BYTES
from weft.engine.serve.requests import SharedLineage


def in_a_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a test in an event loop of the main thread."""

    @wraps(test)
    def run(*arguments: Any, **named: Any) -> None:
        asyncio.run(test(*arguments, **named))

    return run


class Watched(Lineage):
    """A lineage that notes its threads, and may be held up."""

    def __init__(self) -> None:
        super().__init__()
        self.threads: list[bool] = []  # of each request, whether it was the event loop's
        self.goes_on = threading.Event()
        self.goes_on.set()

    def place(self, evidence: Evidence, body: Mapping[str, Any], scope: str, peer: str = "") -> Placed:
        self.threads.append(threading.current_thread() is threading.main_thread())
        assert self.goes_on.wait(60), "the event loop stood"
        return super().place(evidence, body, scope, peer)


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110  another thread changes it
        await asyncio.sleep(0)


def conversation(*texts: str) -> dict[str, Any]:
    return {"messages": [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(texts)]}


@in_a_loop
async def test_only_a_large_request_is_placed_on_another_thread() -> None:
    """A hop to a thread costs more than a small request does."""
    watched = Watched()
    lineage = SharedLineage(watched)
    for is_large in (False, True):
        await lineage.place(Evidence(), conversation("a"), "-", "", is_large=is_large)
    assert watched.threads == [True, False]


def placing(lineage: SharedLineage, text: str, *, is_large: bool) -> asyncio.Task[Placed]:
    """A request with a text, which is being placed."""
    return asyncio.create_task(lineage.place(Evidence(), conversation(text), "-", "", is_large=is_large))


async def held(watched: Watched, lineage: SharedLineage) -> asyncio.Task[Placed]:
    """A large request, which is held up on its thread."""
    watched.goes_on.clear()
    large = placing(lineage, "a", is_large=True)
    await until(lambda: bool(watched.threads))
    return large


async def waiting(watched: Watched, lineage: SharedLineage) -> asyncio.Task[Placed]:
    """A small request, which waits for the large one."""
    small = placing(lineage, "b", is_large=False)
    for _ in range(10):
        await asyncio.sleep(0)
    assert watched.threads == [False]
    return small


@in_a_loop
async def test_the_event_loop_goes_on_while_a_large_request_is_placed() -> None:
    """What it does in the meantime lets the request go on. Others are placed after it, in order."""
    watched = Watched()
    lineage = SharedLineage(watched)
    large = await held(watched, lineage)
    small = await waiting(watched, lineage)
    watched.goes_on.set()
    await asyncio.gather(large, small)
    assert watched.threads == [False, True]


@in_a_loop
async def test_a_request_that_is_cancelled_lets_others_in_when_its_thread_ends() -> None:
    """The thread goes on, and lineage is not for several."""
    watched = Watched()
    lineage = SharedLineage(watched)
    large = await held(watched, lineage)
    large.cancel()
    with pytest.raises(asyncio.CancelledError):
        await large
    small = await waiting(watched, lineage)
    watched.goes_on.set()
    await small
    assert watched.threads == [False, True]


@pytest.mark.parametrize(("size", "is_own"), [(10, True), (LARGE_BYTES, False)])
@in_a_loop
async def test_only_a_large_body_is_parsed_on_another_thread(
    size: int, is_own: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what the application reads is what was sent, with the ids in their scope behind it."""
    threads: list[bool] = []
    read = check_ids._read

    def watched(body: bytes) -> Any:
        threads.append(threading.current_thread() is threading.main_thread())
        return read(body)

    monkeypatch.setattr(check_ids, "_read", watched)
    sent = {"session_id": "s", **conversation("x" * size)}
    found: list[bytes] = []

    async def app(_scope: Any, receive: Any, _send: Any) -> None:
        found.append((await receive())["body"])

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": json.dumps(sent).encode() + b" \n", "more_body": False}

    async def send(_message: Any) -> None: ...

    scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": []}
    await check_ids.CheckIds(app)(scope, receive, send)
    assert threads == [is_own]
    read_again = json.loads(found[0])
    assert read_again["messages"] == sent["messages"]
    assert read_again["session_id"].endswith("/s")


def test_a_long_text_counts_with_all_of_its_characters() -> None:
    """Only its beginning and its end are kept, and a digest of it."""
    text = "word " * LONG_CHARACTERS
    other = f"{text[:LONG_CHARACTERS]}?{text[LONG_CHARACTERS + 1 :]}"
    assert text_of(text) != text_of(other)
    assert len(text_of(text)) < LONG_CHARACTERS + 100
    lineage = Lineage()
    placed = lineage.place(Evidence(), conversation(text), "-")
    lineage.answered(placed, items_of_answer({"choices": [{"message": {"content": "ok"}}]}), "-", None)
    again = lineage.place(Evidence(), conversation(text, "ok", "go on"), "-")
    assert again.identity.program_id == placed.identity.program_id


def test_a_body_that_gets_new_members_is_not_written_again() -> None:
    """The members are put behind the others, also into an empty object."""
    for body in (b'{"a": [1.0, 2]} ', b"{}"):
        request = json.loads(body)
        found = check_ids._with_new(body, {**request, "vllm_xargs": {"x": 1}})
        assert found.startswith(body.rstrip()[:-1])
        assert json.loads(found) == {**request, "vllm_xargs": {"x": 1}}
