"""Requests of many megabytes: streams of others go on while they are read."""

from __future__ import annotations

import asyncio
import json
import random
import threading
from collections.abc import Callable, Coroutine, Iterable, Mapping
from functools import wraps
from typing import Any

import pytest

from weft.core.errors import InvalidRequestError
from weft.core.identity import Evidence
from weft.core.identity.items import Item, items_of_answer
from weft.core.identity.lineage import Lineage, Placed
from weft.engine.http import bodies, check_ids
from weft.engine.http.bodies import LARGE_BYTES, read_json
from weft.engine.serve.requests import PLACED_ELSEWHERE_BYTES, SharedLineage


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
        self.noted: list[bool] = []  # the same of each answer
        self.goes_on = threading.Event()
        self.goes_on.set()

    def place(self, evidence: Evidence, body: Mapping[str, Any], scope: str, peer: str = "") -> Placed:
        self.threads.append(threading.current_thread() is threading.main_thread())
        assert self.goes_on.wait(60), "the event loop stood"
        return super().place(evidence, body, scope, peer)

    def answered(self, placed: Placed, answers: Iterable[Iterable[Item]], *more: Any, **keywords: Any) -> None:
        self.noted.append(threading.current_thread() is threading.main_thread())
        super().answered(placed, answers, *more, **keywords)


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
    for body_bytes in (PLACED_ELSEWHERE_BYTES, PLACED_ELSEWHERE_BYTES + 1):
        await lineage.place(Evidence(body_bytes=body_bytes), conversation("a"), "-", "")
    assert watched.threads == [True, False]


@in_a_loop
async def test_only_the_answer_to_a_large_request_is_noted_on_another_thread() -> None:
    """What it hands on is looked for in all that the model was told."""
    watched = Watched()
    lineage = SharedLineage(watched)
    answer = items_of_answer({"choices": [{"message": {"content": "b"}}]})
    programs = []
    for body_bytes, texts in ((PLACED_ELSEWHERE_BYTES + 1, "a"), (PLACED_ELSEWHERE_BYTES, "abc")):
        placed = await lineage.place(Evidence(body_bytes=body_bytes), conversation(*texts), "-", "")
        await lineage.answered(placed, answer, "-", None)
        programs.append(placed.identity.program_id)
    assert watched.noted == [False, True]
    assert programs[0] == programs[1]


def placing(lineage: SharedLineage, text: str, *, is_large: bool) -> asyncio.Task[Placed]:
    """A request with a text, which is being placed."""
    evidence = Evidence(body_bytes=PLACED_ELSEWHERE_BYTES + is_large, is_retry=not is_large)
    return asyncio.create_task(lineage.place(evidence, conversation(text), "-", ""))


async def held(watched: Watched, lineage: SharedLineage) -> asyncio.Task[Placed]:
    """A large request, which is held up on its thread."""
    watched.goes_on.clear()
    large = placing(lineage, "a", is_large=True)
    await until(lambda: not all(watched.threads[-1:]))
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


@in_a_loop
async def test_a_client_that_leaves_while_another_request_is_placed_is_known_when_it_comes_back() -> None:
    """Its first request, sent again, belongs to the same program."""
    watched = Watched()
    lineage = SharedLineage(watched)
    placed = await placing(lineage, "b", is_large=False)
    large = await held(watched, lineage)
    lineage.left(placed, "-")
    watched.goes_on.set()
    await large
    again = await placing(lineage, "b", is_large=False)
    assert again.identity.program_id == placed.identity.program_id


@pytest.mark.parametrize(("size", "is_own"), [(10, True), (LARGE_BYTES, False)])
@in_a_loop
async def test_only_a_large_body_is_parsed_on_another_thread(
    size: int, is_own: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was read is freed on one as well. What the application reads is what was sent, with the ids in their scope
    behind it."""
    threads: list[bool] = []

    def noting(work: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*arguments: Any) -> Any:
            threads.append(threading.current_thread() is threading.main_thread())
            return work(*arguments)

        return watched

    for name in ("read_json", "release"):
        monkeypatch.setattr(check_ids, name, noting(getattr(check_ids, name)))
    sent = {"session_id": "s", **conversation("x" * size)}
    found: list[bytes] = []

    async def app(_scope: Any, receive: Any, _send: Any) -> None:
        found.append((await receive())["body"])

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": json.dumps(sent).encode() + b" \n", "more_body": False}

    async def send(_message: Any) -> None: ...

    scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": []}
    await check_ids.CheckIds(app)(scope, receive, send)
    assert threads == ([True] if is_own else [False, False])
    read_again = json.loads(found[0])
    assert read_again["messages"] == sent["messages"]
    assert read_again["session_id"].endswith("/s")


def test_a_body_that_gets_new_members_is_not_written_again() -> None:
    """The members are put behind the others, also into an empty object."""
    for body in (b'{"a": [1.0, 2]} ', b"{}"):
        request = json.loads(body)
        found = check_ids._with_new(body, {**request, "vllm_xargs": {"x": 1}})
        assert found.startswith(body.rstrip()[:-1])
        assert json.loads(found) == {**request, "vllm_xargs": {"x": 1}}


LONG = 'A "keeper" \\ counts\nships \u00fc\u6f22\U0001f600 ' * 60_000


def test_a_long_text_of_a_large_body_is_cut_in_the_same_places_wherever_it_stands() -> None:
    """Its beginning and its end stay, and a digest stands for all that is between them."""
    read = [
        read_json(json.dumps({**before, "text": text}, ensure_ascii=is_ascii).encode())["text"]
        for is_ascii in (False, True)
        for text in (LONG, LONG[:1_000_000] + "?" + LONG[1_000_001:])
        for before in ({}, {"a": "x" * 99, "b": '"\\'})
    ]
    assert len(set(read)) == 4
    assert [read[0], read[2], read[4], read[6]] == [read[1], read[3], read[5], read[7]]
    assert all(len(LONG) > len(each) and each[:9] == LONG[:9] and each[-9:] == LONG[-9:] for each in read)


def test_a_large_body_is_refused_for_what_is_no_unicode_in_the_middle_of_a_text() -> None:
    """Where nothing is kept of it, too. What is no text at all is left to the application."""
    for wrong in (rb"\ud800", rb"\udc00\ud800", b"\xed\xa0\x80"):
        for place in (10, 2_000_000):
            body = bytearray(b'{"text": "' + b"x" * 3_000_000 + b'"}')
            body[place:place] = wrong
            with pytest.raises(InvalidRequestError, match=r"Send text in UTF-8\.$"):
                read_json(bytes(body))
    with pytest.raises(ValueError, match="utf-8"):
        read_json(b'{"text": "' + b"x" * 3_000_000 + b'\xff"}')


def any_json(rng: random.Random, levels: int) -> Any:
    """Lists and objects, with all that looks like their marks in texts and names."""
    sizes = (0, 1, 2, 9)
    if levels and rng.random() < 0.7:
        values = [any_json(rng, levels - 1) for _ in range(rng.choice(sizes))]
        names = ("a", "b", "", "x,y", 'q"', "\\", "[{")
        return values if rng.random() < 0.5 else {rng.choice(names): value for value in values}
    return rng.choice(
        (1, -2.5e3, None, True, "", "x,y]}", '"', '\\"', "\u00e9\u6f22\U0001f600" * 5, "[{" * 9, "z" * 300)
    )


def read_or_none(read: Callable[[bytes], Any], body: bytes) -> str | None:
    """What is read of a body, in its order; None if it is no JSON."""
    try:
        return json.dumps(read(body))
    except ValueError:
        return None


@pytest.mark.parametrize("seed", range(5))
def test_what_is_read_in_steps_is_what_is_read_at_once(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever the steps end, with names that an object has twice, and where the JSON is broken."""
    monkeypatch.setattr(bodies, "LARGE_BYTES", 0)
    monkeypatch.setattr(bodies, "_KEPT", 1_000_000)
    rng = random.Random(seed)
    for _ in range(200):
        monkeypatch.setattr(bodies, "_STEP_BYTES", rng.choice((40, 64, 300)))
        text = json.dumps(any_json(rng, 5), ensure_ascii=rng.random() < 0.5, indent=rng.choice((None, 1)))
        text = text.replace('"b":', '"a":') if rng.random() < 0.2 else text
        place = rng.randrange(len(text)) if rng.random() < 0.4 else len(text)
        text = (
            text[:place] + rng.choice(("", ",", "]", "}", "[", "{", ":", "1", " ")) + text[place + rng.randrange(2) :]
        )
        assert read_or_none(read_json, text.encode()) == read_or_none(json.loads, text.encode())


@pytest.mark.parametrize("kind", ["texts", "calls", "ids", "nested"])
def test_no_large_body_is_read_in_one_piece(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One call of `json.loads` holds Python's lock until it returns."""
    message: dict[str, Any] = {"role": "user", "content": "x" * 500}
    if kind == "calls":
        message = {"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "x" * 500}}]}
    sent: dict[str, Any] = {"messages": [message] * 8_000}
    if kind == "ids":
        sent = {"prompt": list(range(1_000_000))}
    if kind == "nested":
        sent = {"messages": [{"content": [{"a": [{"b": [["x" * 500]] * 4_000}]}]}]}
    body, read, sizes = json.dumps(sent).encode(), json.loads, []

    def noted(piece: bytes) -> Any:
        sizes.append(len(piece))
        return read(piece)

    monkeypatch.setattr(bodies.json, "loads", noted)
    assert read_json(body) == sent
    assert max(sizes) < 256 << 10 < len(body)


def test_what_was_read_is_freed_piece_by_piece() -> None:
    """The server does nothing else while Python frees an object with all that is in it."""
    held: list[Any] = []
    left: list[int] = []

    class Noted(dict[str, Any]):
        def __del__(self) -> None:
            left.append(len(held))

    held.append(Noted(a=[Noted(b=Noted()), {"c": Noted()}]))
    bodies.release(held)
    assert left == [5, 3, 1, 0]  # the list and the plain object are between them


def test_a_large_body_with_too_many_objects_is_refused() -> None:
    """Python's collector looks at all of them at once. Brackets in texts are none."""
    some = [["x" * 20] for _ in range(49_000)]
    assert read_json(json.dumps([some, "[{" * 60_000]).encode()) is not None
    with pytest.raises(InvalidRequestError, match="more than 50000 lists and objects"):
        read_json(json.dumps([some, [{}] * 1_000]).encode())


def test_a_body_with_too_many_levels_is_refused_as_by_python() -> None:
    """Also where no comma is in it."""
    for one in (b"[", b'{"a":', b"[1,"):
        with pytest.raises(RecursionError):
            read_json(one * 400_000)
