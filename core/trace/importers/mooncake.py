"""Rows of requests in the form of Mooncake's traces, alone or in sessions.

`Mooncake` reads rows that are whole prompts: those of Mooncake, and those of Dynamo with a `session_id`. `Aiperf` reads
AIPerf's conversations, whose rows are what each turn adds.
"""

from __future__ import annotations

import itertools
import json
from array import array
from collections.abc import Callable, Hashable, Iterable, Iterator
from pathlib import Path
from typing import Any, Final

from weft.core.errors import TraceError
from weft.core.trace.format import TraceCall, TraceProgram, text, whole
from weft.core.trace.importers.contract import Blocks, Importer
from weft.core.trace.importers.reading import (
    a_list,
    an_object,
    block_size,
    grouped,
    hash_ids,
    optional_seconds,
    rows,
    tokens_of,
)
from weft.core.trace.prefixes import with_block_hashes

MS: Final = 1e-3
_LOOKED_AT: Final = 100  # rows that tell the size of blocks
_MOST_BLOCKS: Final = 2**20  # of a prompt whose row does not list them
_ROW: Final = "an object with input_length and output_length on each line"
_TURN: Final = "an object with session_id, input_length and output_length, or with turns, on each line"

INPUT: Final = ("input_length", "input_tokens")
OUTPUT: Final = ("output_length", "output_tokens")
TIME: Final = ("timestamp", "created_time")
_DELAY: Final = ("delay", "delay_ms")

Row = dict[str, Any]


def _matches(_: Path, head: str) -> bool:
    """Whether the file begins like Mooncake's, and its sessions repeat their prompts."""
    found = head_rows(head)
    if not found or not _is_request(found[0]):
        return False
    return "session_id" not in found[0] or _repeat_prompts(found)


def _read(path: Path, blocks: Blocks, advance: Callable[[int], object]) -> Iterator[TraceProgram]:
    """Reads requests of which each has its whole prompt. Without `session_id`, each is a program."""
    file, scope = _File(path), blocks.scope()
    for group in grouped(path, advance, _ROW, _session):
        conversation = _Conversation(file)
        for where, row in group:
            prompt_tokens = whole(row, key_of(row, *INPUT), where, required=True)
            ids = hash_ids(row, where, prompt_tokens, file.block_tokens) if file.block_tokens else []
            conversation.add(row, where, prompt_tokens, scope.numbers(ids))
        yield conversation.program(*group[0])


MOONCAKE: Final = Importer(
    "mooncake", "requests as in Mooncake's traces: timestamp, input_length, output_length, hash_ids", _matches, _read
)


def _matches_turns(_: Path, head: str) -> bool:
    """Whether the file begins like AIPerf's."""
    found = head_rows(head)
    return bool(found) and (
        isinstance(found[0].get("turns"), list) or ("session_id" in found[0] and _is_request(found[0]))
    )


def _read_turns(path: Path, blocks: Blocks, advance: Callable[[int], object]) -> Iterator[TraceProgram]:
    """Reads conversations of AIPerf: a row is what a turn adds to the history of its session."""
    file, scope = _File(path), blocks.scope()
    for group in grouped(path, advance, _TURN, _session):
        session, row = group[0]
        conversation = _Conversation(file)
        history = system_tokens = 0
        known: list[Hashable] = []  # what the blocks of the conversation are called
        for where, turn in itertools.chain.from_iterable(itertools.starmap(_turns, group)):
            new = _new_tokens(turn, where)
            if turn.get("role") == "system":  # it is sent with the next turn
                system_tokens += new
                continue
            prompt_tokens, system_tokens = history + system_tokens + new, 0
            if file.block_tokens and not history:
                known += hash_ids(turn, where, prompt_tokens, file.block_tokens)
            if file.block_tokens:  # each block of a conversation stays what it is
                whole_blocks = prompt_tokens // file.block_tokens
                if whole_blocks > _MOST_BLOCKS:
                    raise TraceError(f"{where}: the prompt has {whole_blocks} blocks; expected {_MOST_BLOCKS} at most.")
                known += [(session, number) for number in range(len(known), whole_blocks)]
            conversation.add(turn, where, prompt_tokens, scope.numbers(known), history)
            history = prompt_tokens + conversation.calls[-1].output_tokens
        if not conversation.calls:
            raise TraceError(f"{session}: the session has no turn; expected {_TURN}.")
        yield conversation.program(session, row)


AIPERF: Final = Importer(
    "aiperf",
    "AIPerf's multi-turn rows: session_id, delay, input_length or texts, output_length",
    _matches_turns,
    _read_turns,
)


class _File:
    """What the first rows say of a file.

    Attributes:
        stem: the name of the file.
        block_tokens: the tokens of a block. None if the rows have no ids of blocks.
        start_s: the first time.
    """

    def __init__(self, path: Path) -> None:
        self.stem = path.stem
        first = first_rows(path, _ROW)
        times_s = (optional_seconds(row, key_of(row, *TIME), where, MS) for where, row in first)
        self.start_s = next((time_s for time_s in times_s if time_s is not None), None)
        self.block_tokens = block_tokens_of(path, first)


class _Conversation:
    """Collects the calls of a session, one after the other."""

    def __init__(self, file: _File) -> None:
        self.calls: list[TraceCall] = []
        self._file = file
        self._prompts: dict[str, array[int]] = {}
        self._times_s: list[float] = []  # since the file's start; of the calls that have one

    def add(self, row: Row, where: str, prompt_tokens: int, prompt: array[int], shared_tokens: int = 0) -> None:
        """Add the call of a row.

        Args:
            prompt: the numbers of its blocks.
            shared_tokens: how many first tokens repeat the call before and its output, if that is known.
        """
        at_s = optional_seconds(row, key_of(row, *TIME), where, MS)
        at_s = None if at_s is None else max(0.0, at_s - (self._file.start_s or 0.0))
        gap_s = optional_seconds(row, key_of(row, *_DELAY), where, MS)
        if gap_s is None or not self.calls:
            gap_s = max(0.0, at_s - self._times_s[-1]) if at_s is not None and self._times_s else 0.0
        if at_s is not None:
            self._times_s.append(at_s)
        call = TraceCall(
            call_id=f"c{len(self.calls)}",
            parents=(self.calls[-1].call_id,) if self.calls else (),
            output_tokens=max(1, whole(row, key_of(row, *OUTPUT), where, required=True)),
            prompt_tokens=prompt_tokens,
            gap_s=gap_s,
            shared_prefix_tokens=shared_tokens,
            at_s=None if at_s is None else max(0.0, at_s - self._times_s[0]),
        )
        self.calls.append(call)
        self._prompts[call.call_id] = prompt

    def program(self, where: str, row: Row) -> TraceProgram:
        """Return the program. Its first row with its place names it."""
        line = where.rpartition(" ")[2]
        program_id = text(row, "session_id", where) or text(row, "request_id", where) or f"{self._file.stem}-{line}"
        program = TraceProgram(program_id, tuple(self.calls), arrival_s=self._times_s[0] if self._times_s else 0.0)
        return (
            with_block_hashes(program, self._prompts, self._file.block_tokens) if self._file.block_tokens else program
        )


def head_rows(head: str) -> list[Row]:
    """The whole rows at the beginning of a file. None if its lines are not JSON objects."""
    found: list[Row] = []
    for line in head.splitlines():
        if line.strip():
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                break
            if not isinstance(row, dict):
                return []
            found.append(row)
    return found


def first_rows(path: Path, expected: str) -> list[tuple[str, Row]]:
    """The rows that tell the size of blocks, with their places."""
    return list(itertools.islice(rows(path, lambda _: None, expected), _LOOKED_AT))


def block_tokens_of(path: Path, found: Iterable[tuple[str, Row]]) -> int | None:
    """The tokens of a block. None if the rows have no ids of blocks."""
    prompts = [
        (whole(row, key_of(row, *INPUT), where, required=True), len(ids))
        for where, row in found
        if isinstance(ids := row.get("hash_ids"), list) and ids
    ]
    return block_size(prompts, str(path)) if prompts else None


def _is_request(row: Row) -> bool:
    has_output = any(key in row for key in OUTPUT)
    has_input = any(key in row for key in (*INPUT, "text_input"))
    return has_output and has_input and not {"wait_for", "parent_chat_id", "dependencies"} & set(row)


def _repeat_prompts(found: list[Row]) -> bool:
    """Whether a later row of a session begins with the first block of an earlier one."""
    first: dict[Any, Any] = {}
    for row in found:
        ids = row.get("hash_ids")
        if isinstance(ids, list) and ids and isinstance(session := row.get("session_id"), str):
            if session in first:
                return bool(first[session] == ids[0])
            first[session] = ids[0]
    return False


def _session(row: Row, where: str) -> str | tuple[str]:
    """What tells the session of a row: its id, or else its place."""
    return text(row, "session_id", where) or (where,)


def key_of(row: Row, *names: str) -> str:
    """The name that a row has for a value that has several."""
    return next((name for name in names if name in row), names[0])


def _turns(where: str, row: Row) -> Iterator[tuple[str, Row]]:
    if "turns" not in row:
        yield where, row
        return
    for number, turn in enumerate(a_list(row, "turns", where), 1):
        place = f"{where}, turn {number}"
        yield place, an_object(turn, place, "an object with text and output_length")


def _new_tokens(turn: Row, where: str) -> int:
    """The tokens that a turn adds. Texts are counted by their characters."""
    if any(key in turn for key in INPUT):
        return whole(turn, key_of(turn, *INPUT), where, required=True)
    texts = list(_texts(turn))
    if not texts:
        raise TraceError(f"{where}: there is no prompt; expected input_length, text_input, text or texts.")
    return tokens_of("\n".join(texts))


def _texts(turn: Row) -> Iterator[str]:
    for key in ("text", "text_input", "texts", "contents"):
        value = turn.get(key)
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, str):
                yield each
            elif isinstance(each, dict):
                yield from _texts(each)
