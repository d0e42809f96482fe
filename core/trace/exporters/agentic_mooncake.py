"""Dynamo's agentic Mooncake rows, version 2, which its replay and its simulator read."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from weft.core.files import write_whole
from weft.core.trace.exporters.contract import MODEL, NotExported, begin_of, block_ids, block_size, sessions_of
from weft.core.trace.format import TraceCall, TraceProgram, dump, ordered
from weft.core.trace.importers.agentic_mooncake import SCHEMA, VERSION

_MS: Final = 1000


def write(programs: Sequence[TraceProgram], path: Path) -> NotExported:
    """Write a file with a header and a row for each call. A program is a play.

    A play begins with one request; calls that begin beside it wait for its dispatch. A request has an id for each begun
    block of its prompt. That of a block that is not full is shared with nothing.
    """
    left = NotExported()
    block_tokens = block_size(programs)
    write_whole((json.dumps(row) + "\n" for row in _rows(programs, block_tokens, left)), path)
    return left


def _rows(programs: Sequence[TraceProgram], block_tokens: int, left: NotExported) -> Iterator[dict[str, Any]]:
    digest = hashlib.sha256()
    for program in programs:
        digest.update(dump(program).encode())
    yield {
        "schema": SCHEMA,
        "version": VERSION,
        "block_size": block_tokens,
        "hash_id_scope": "local",
        "source": {"format": "weft", "digest": digest.hexdigest()},
    }
    for program in programs:
        left.note(program)
        left.lost["tools"] += sum(call.tool is not None for call in program.calls)
        yield from _play(program, block_tokens, left)


def _play(program: TraceProgram, block_tokens: int, left: NotExported) -> Iterator[dict[str, Any]]:
    play, calls = program.program, ordered(program.calls, program.program)
    ids = block_ids(program, block_tokens)
    root = min((call for call in calls if not call.parents), key=lambda call: (call.gap_s, call.agent is not None))
    names: dict[str, str] = {}  # of the sessions, by call
    sessions = sorted(sessions_of(calls), key=lambda session: session[0] is not root)
    starts = {session[0].call_id for session in sessions}
    for number, session in enumerate(sessions):
        name = f"{play}:{session[0].agent or ''}#{number}" if number else play
        names |= {call.call_id: name for call in session}
    left.lost["agents of first calls"] += root.agent is not None
    fresh = max((each for chain in ids.values() for each in chain), default=-1) + 1
    for call in calls:
        chain = ids[call.call_id]
        if len(chain) * block_tokens < call.prompt_tokens:
            chain, fresh = [*chain, fresh], fresh + 1
        at_s = begin_of(call)
        if at_s is None and call is root:
            at_s = root.gap_s
        yield {
            "request_id": f"{play}:{call.call_id}",
            "play_id": play,
            "session_id": names[call.call_id],
            "model": MODEL,
            "input_length": call.prompt_tokens,
            "output_length": call.output_tokens,
            "hash_ids": chain,
            "not_before_ms": 0.0 if at_s is None else _ms(program.arrival_s + at_s),
            "dependencies": list(_dependencies(call, root, names, starts, play)),
        }


def _dependencies(
    call: TraceCall, root: TraceCall, names: dict[str, str], starts: set[str], play: str
) -> Iterator[dict[str, Any]]:
    for parent in call.parents:
        relation = "spawn" if call.call_id in starts else "join"
        if names[parent] == names[call.call_id]:
            relation = "sequence"
        yield {
            "request_id": f"{play}:{parent}",
            "trigger": "completion",
            "delay_ms": _ms(call.gap_s),
            "relation": relation,
        }
    if not call.parents and call is not root:
        yield {
            "request_id": f"{play}:{root.call_id}",
            "trigger": "dispatch",
            "delay_ms": _ms(call.gap_s - root.gap_s),
            "relation": "spawn",
        }


def _ms(seconds: float) -> float:
    return round(seconds * _MS, 6)
