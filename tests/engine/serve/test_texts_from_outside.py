"""Every text that comes from outside passes one gate before anything keeps it, whichever door it comes through."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from doors import BODY, CHAT, Doors
from polling import until

from weft import Program
from weft.core.ids import MAX_ID_LENGTH, is_id

BAD = {
    "half a surrogate pair": "\ud800",
    "a control character": "a\x1b[2J",
    "a NUL": "a\x00b",
    "ten megabytes": "x" * 10_000_000,
}
JSON = {"content-type": "application/json"}
OPEN = {"weft-program-id": "p"}


@pytest.fixture
def doors() -> Iterator[Doors]:
    with Doors() as opened:
        assert opened.chat(OPEN).status_code == 200
        yield opened


def _argument(name: str, make: Callable[[str], Any] = str) -> Callable[[Doors, str], httpx.Response]:
    """A field of `vllm_xargs`."""

    def send(doors: Doors, text: str) -> httpx.Response:
        content = json.dumps({**BODY, "vllm_xargs": {"program_id": "q", "call_id": "c", name: make(text)}})
        return doors.ask("POST", CHAT, content=content, headers=JSON)

    return send


def _field(name: str) -> Callable[[Doors, str], httpx.Response]:
    def send(doors: Doors, text: str) -> httpx.Response:
        return doors.ask("POST", CHAT, content=json.dumps({**BODY, name: text}), headers=JSON)

    return send


def _event(*event: Any) -> Callable[[Doors, str], httpx.Response]:
    """A message of `weft.connect` with a good event before the bad one."""

    def send(doors: Doors, text: str) -> httpx.Response:
        bad = [text if each is None else each for each in event]
        good = ["tool_started", "p", "search", 1, 0.0]
        content = json.dumps({"type": "program_events", "events": [good, bad]})
        return doors.ask("POST", "/weft/events", content=content, headers=JSON)

    return send


DOORS = {
    **{
        name: _argument(name)
        for name in ("program_id", "thread_id", "call_id", "session_id", "program_name", "tenant", "label")
    },
    **{name: _argument(name) for name in ("tool_ended", "tool_started", "fingerprint", "parent_program_id")},
    **{name: _argument(name, lambda text: [text]) for name in ("parents", "tools")},
    "session_id of vLLM": _field("session_id"),
    "an event's tool": _event("tool_started", "p", None, 2, 0.0),
    "an ended tool": _event("tool_ended", "p", None, 1, 0.0),
}


@pytest.mark.parametrize("kind", BAD)
@pytest.mark.parametrize("door", DOORS)
def test_a_text_that_is_no_name_is_refused_at_every_door(doors: Doors, door: str, kind: str) -> None:
    """The answer says what was wrong in a few words, nothing of the request counts, and others go on."""
    before = doors.labels()
    answer = DOORS[door](doors, BAD[kind])
    assert answer.status_code == 400, answer.text
    assert len(answer.json()["error"]["message"]) < 400
    assert doors.labels() - {"malformed"} == before  # why the request was refused
    (shown,) = doors.ask("GET", "/weft/state").json()["programs"]
    assert (shown["program_id"], shown["tools"], shown["calls"]) == ("p", [], 1)
    assert doors.chat(OPEN).status_code == 200


@pytest.mark.parametrize(
    ("header", "values"),
    [
        *(
            (name, ("a\tb", "a\x7fb", "a\xa0b", "x" * 300))
            for name in ("weft-program-id", "weft-tenant", "x-session-id")
        ),
        *((name, ("a\tb", "x" * 300)) for name in ("weft-program-name", "weft-label", "weft-thread-id")),
    ],
)
def test_a_header_passes_the_same_gate(doors: Doors, header: str, values: tuple[str, ...]) -> None:
    """Its bytes are read as Latin-1."""
    for value in values:
        headers = [(b"weft-program-id", b"p")] if header not in OPEN else []
        headers.append((header.encode(), value.encode("latin-1")))
        answer = doors.ask("POST", CHAT, json=BODY, headers=headers)
        assert answer.status_code == 400, (value, answer.text)
    assert all(is_id(label) or not label for label in doors.labels())


@pytest.mark.parametrize(
    "body",
    [
        b'{"vllm_xargs": {"a": "\xed\xa0\x80"}, "messages": []}',
        json.dumps({**BODY, "vllm_xargs": {"a": "\ud800"}}).encode(),
        json.dumps(BODY).encode("utf-16"),
        json.dumps(BODY).encode("utf-32-le"),
        '{"messages": "\ud800"}'.encode("utf-16-be", "surrogatepass"),
    ],
)
@pytest.mark.parametrize("path", [CHAT, "/weft/events"])
def test_json_is_unicode_in_utf_8(doors: Doors, path: str, body: bytes) -> None:
    """Python's parser takes other encodings, and halves of surrogate pairs in each of them."""
    answer = doors.ask("POST", path, content=body, headers=JSON)
    assert answer.status_code == 400, answer.text
    assert "Send text in UTF-8." in answer.json()["error"]["message"]


@pytest.mark.parametrize(("name", "most"), [("parents", 64), ("tools", 64)])
def test_a_list_is_no_longer_than_weft_connect_sends_it(doors: Doors, name: str, most: int) -> None:
    """A million parents are refused in one answer, before a graph has them."""
    answer = _argument(name, lambda _text: ["x"] * 1_000_000)(doors, "")
    assert answer.status_code == 400
    assert f"at most {most} " in answer.json()["error"]["message"]
    assert _argument(name, lambda _text: ["x"] * most)(doors, "").status_code == 200


def test_a_bad_event_of_one_key_fails_no_event_of_another(doors: Doors) -> None:
    """The schedulers get the good ones, and every message to them can be encoded."""
    assert _event("tool_started", "p", "\ud800", 2, 0.0)(doors, "").status_code == 400
    assert _event("tool_started", "p", "lookup", 2, 0.0)(doors, "").status_code == 204
    doors.engine.submit(until(lambda: len(_events(doors)) == 2)).result()
    assert [event[2].rpartition("/")[2] for event in _events(doors)] == ["search", "lookup"]
    json.dumps(doors.engine.told, ensure_ascii=False).encode()


def _events(doors: Doors) -> list[Any]:
    """What the schedulers were told of tools."""
    return [event for message in list(doors.engine.told) for event in message.get("events", ())]


def test_names_of_frameworks_are_made_plain() -> None:
    """In process nobody can be told of an odd name, so tables, metrics and messages get a readable one."""
    with Doors() as doors:
        with Program("\ud800 agent\n" + "x" * 1000, tags=["a\x00"]) as opened:
            call = opened.reports.start_call(object(), label="l\ud800")
            asyncio.run(doors.engine.chat({"messages": BODY["messages"]}, opened, call))
            opened.reports.tool_began(1, "tool\ud800")
            row = doors.engine.table.get(opened.program_id)
            assert row is not None
            (tool,) = row.tools_running
            texts = (opened.name, *opened.tags, tool.name, opened.graph[call.call_id].label)
            assert [text[:6] for text in texts] == ["? agen", "a?", "tool?", "l?"]
            assert len(opened.name) == MAX_ID_LENGTH
            opened.reports.tools_ended([1])
        assert {"tool?", opened.name[:100]} <= doors.labels()
