"""Dynamo's agentic Mooncake rows: requests that wait for others.

Version 2 begins with a header, and its rows have `play_id`, `not_before_ms` and `dependencies`. Version 1 has no
header, and its rows have `wait_for`, `delay` and `tool_wait_ms`. Requests that depend on one another are a program.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from weft.core.errors import TraceError
from weft.core.trace.format import TraceCall, TraceProgram, in_turn, text, whole
from weft.core.trace.importers.contract import Blocks, Importer
from weft.core.trace.importers.mooncake import (
    INPUT,
    MS,
    OUTPUT,
    TIME,
    Row,
    block_tokens_of,
    first_rows,
    head_rows,
    key_of,
)
from weft.core.trace.importers.reading import a_list, an_object, grouped, hash_ids, optional_seconds, rows
from weft.core.trace.prefixes import with_block_hashes

SCHEMA: Final = "dynamo.agentic_mooncake"
VERSION: Final = 2
_EXPECTED: Final = "a row with request_id, input_length, output_length and wait_for or dependencies, or a v2 header"


@dataclass(frozen=True, slots=True)
class _Request:
    """A row that was read."""

    where: str
    row: Row
    request_id: str
    session: str | None
    at_s: float | None  # since the start of the file
    after: tuple[tuple[str, float], ...]  # the requests that must have ended before it, and the seconds after that
    beside: tuple[tuple[str, float], ...]  # the requests that must have begun

    @property
    def waits(self) -> Iterator[str]:
        return (other for other, _ in (*self.after, *self.beside))


def _matches(_: Path, head: str) -> bool:
    """Whether the file begins with the header, or with rows that have ids and may wait for others."""
    found = head_rows(head)
    if not found:
        return False
    return found[0].get("schema") == SCHEMA or (
        "request_id" in found[0]
        and any(key in row for row in found for key in ("wait_for", "branches", "tool_wait_ms", "prefix_reset"))
    )


def _read(path: Path, blocks: Blocks, advance: Callable[[int], object]) -> Iterator[TraceProgram]:
    """Reads both versions. A row names those that must have ended, or begun, before it."""
    header = next((row for _, row in rows(path, lambda _: None, _EXPECTED)), {})
    has_header = header.get("schema") == SCHEMA
    block_tokens = _header(header, path) if has_header else block_tokens_of(path, first_rows(path, _EXPECTED))
    plays = None if has_header else _plays(path)

    def play_of(row: Row, where: str) -> str:
        if row.get("schema") == SCHEMA:
            return ""
        key = "play_id" if has_header else "request_id"
        found = text(row, key, where, required=True) or ""
        return found if plays is None else plays[found]

    file_scope = None if has_header else blocks.scope()  # the ids of version 1 hold in the whole file
    for group in grouped(path, advance, _EXPECTED, play_of):
        if group[0][1].get("schema") == SCHEMA:
            _refuse_more_headers(group)
            continue
        scope = file_scope or blocks.scope()
        requests = _in_order([_request(row, where, has_header) for where, row in group])
        first = requests[0]
        play_id = play_of(first.row, first.where) if has_header else first.session or first.request_id
        program = _program(play_id, requests)
        prompts: dict[str, array[int]] = {}
        for request, call in zip(requests, program.calls, strict=True):
            ids = hash_ids(request.row, request.where, call.prompt_tokens, block_tokens) if block_tokens else []
            prompts[call.call_id] = scope.numbers(ids)
        yield with_block_hashes(program, prompts, block_tokens) if block_tokens else program


AGENTIC_MOONCAKE: Final = Importer(
    "agentic-mooncake", "Dynamo's agentic Mooncake rows, with and without a header", _matches, _read
)


def _header(header: Row, path: Path) -> int:
    where = f"{path}, line 1"
    version = header.get("version")
    if version != VERSION:
        raise TraceError(
            f"{where}: version is {version!r:.40}; expected {VERSION}, or rows of version 1 and no header."
        )
    return whole(header, "block_size", where, least=1, required=True)


def _refuse_more_headers(group: list[tuple[str, Row]]) -> None:
    if len(group) > 1:
        raise TraceError(f"{group[1][0]}: a second header; expected one, on the first line.")
    if not group[0][0].endswith(" 1"):
        raise TraceError(f"{group[0][0]}: a header after rows; expected it on the first line.")


def _plays(path: Path) -> dict[str, str]:
    """For each request of version 1, the first of those that it is connected with."""
    found: dict[str, str] = {}

    def first(request_id: str) -> str:
        while found.setdefault(request_id, request_id) != request_id:
            found[request_id] = found[found[request_id]]
            request_id = found[request_id]
        return request_id

    for where, row in rows(path, lambda _: None, _EXPECTED):
        request = _request(row, where, has_header=False)
        this = first(request.request_id)
        for other in request.waits:
            that = first(other)
            if that != this:
                found[that] = this
    return {request_id: first(request_id) for request_id in list(found)}


def _request(row: Row, where: str, has_header: bool) -> _Request:
    request_id = text(row, "request_id", where, required=True) or ""
    after: list[tuple[str, float]] = []
    beside: list[tuple[str, float]] = []
    if has_header:
        at_s = optional_seconds(row, "not_before_ms", where, MS)
        for each in _list(row, "dependencies", where):
            dependency = an_object(each, where, "dependencies with request_id, trigger and delay_ms")
            trigger = text(dependency, "trigger", where, required=True)
            if trigger not in ("completion", "dispatch"):
                raise TraceError(f"{where}: trigger is {trigger!r:.40}; expected completion or dispatch.")
            other = text(dependency, "request_id", where, required=True) or ""
            delay_s = optional_seconds(dependency, "delay_ms", where, MS) or 0.0
            (after if trigger == "completion" else beside).append((other, delay_s))
        if (after or beside) and not at_s:
            at_s = None  # 0 where nothing was recorded
    else:
        at_s = optional_seconds(row, key_of(row, *TIME), where, MS)
        delays = (optional_seconds(row, key, where, MS) for key in ("delay", "delay_ms", "tool_wait_ms"))
        delay_s = sum(each or 0.0 for each in delays)
        for each in _list(row, "wait_for", where):
            if not isinstance(each, str):
                raise TraceError(f"{where}: wait_for has {each!r:.40}; expected ids of requests.")
            after.append((each, delay_s))
    session = text(row, "session_id", where)
    return _Request(where, row, request_id, session, at_s, tuple(dict(after).items()), tuple(beside))


def _list(row: Row, key: str, where: str) -> list[Any]:
    return a_list(row, key, where) if row.get(key) is not None else []


def _in_order(requests: list[_Request]) -> list[_Request]:
    """Return the requests of a play in the order of their times, each one after those it waits for."""
    by_id: dict[str, _Request] = {}
    for each in requests:
        if by_id.setdefault(each.request_id, each) is not each:
            raise TraceError(f"{each.where}: request_id {each.request_id!r:.80} is there twice; expected one of each.")
    waits = {each.request_id: set(each.waits) for each in requests}
    for each in requests:
        for other in each.waits:
            if other not in by_id:
                raise TraceError(f"{each.where}: it waits for {other!r:.80}; expected a request of the same play.")
    found = in_turn(waits, lambda request_id: by_id[request_id].at_s or 0.0)
    if len(found) < len(requests):
        blocked = next(each for each in requests if each.request_id not in found)
        raise TraceError(f"{blocked.where}: requests wait for one another in a circle; expected no circle.")
    return [by_id[request_id] for request_id in found]


def _program(play_id: str, requests: list[_Request]) -> TraceProgram:
    """Return the program of a play, whose requests come after those they wait for."""
    prefix = f"{play_id}:" if all(each.request_id.startswith(f"{play_id}:") for each in requests) else ""
    main = requests[0].session
    arrival_s = min(each.at_s or 0.0 for each in requests if not any(each.waits))
    calls: dict[str, TraceCall] = {}
    for each in requests:
        where, row = each.where, each.row
        if each.after:
            # Each dependency has a delay of its own. What is over last has the shortest one.
            parents = tuple(calls[other].call_id for other, _ in each.after)
            gap_s = min(delay_s for _, delay_s in each.after)
        elif each.beside:
            other, delay_s = each.beside[0]
            parents, gap_s = calls[other].parents, calls[other].gap_s + delay_s
        else:
            parents, gap_s = (), (each.at_s or 0.0) - arrival_s
        calls[each.request_id] = TraceCall(
            call_id=each.request_id.removeprefix(prefix),
            parents=parents,
            output_tokens=max(1, whole(row, key_of(row, *OUTPUT), where, required=True)),
            prompt_tokens=whole(row, key_of(row, *INPUT), where, required=True),
            gap_s=gap_s,
            tool="tool" if optional_seconds(row, "tool_wait_ms", where) else None,
            at_s=None if each.at_s is None else max(0.0, each.at_s - arrival_s),
            agent=_agent(each.session, play_id) if each.session != main else None,
        )
    return TraceProgram(play_id, tuple(calls.values()), arrival_s=arrival_s)


def _agent(session: str | None, play_id: str) -> str | None:
    """The sub-agent whose session this is. The number of the session that `weft trace export` adds is left out."""
    name = (session or "").removeprefix(f"{play_id}:")
    agent, hash_sign, number = name.rpartition("#")
    return (agent if hash_sign and number.isdecimal() else name) or None
