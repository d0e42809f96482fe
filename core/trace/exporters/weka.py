"""Sessions in the form of Weka's kv-cache-tester, which AIPerf and Dynamo replay."""

from __future__ import annotations

import itertools
import json
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from weft.core.errors import TraceError
from weft.core.trace.exporters.contract import BLOCK_TOKENS, MODEL, NotExported, block_ids, sessions_of
from weft.core.trace.format import TraceCall, TraceProgram, ordered
from weft.core.trace.importers.weka import IN_BACKGROUND


def write(programs: Sequence[TraceProgram], path: Path) -> NotExported:
    """Write a folder, which must not be there or be empty, with a session for each program.

    The calls of a program must be a chain with sub-agents that the next call waits for. Sub-agents that nobody waits
    for are in the background. Times count from the first call. Where a trace has no times, calls take none, and only
    their gaps pass.
    """
    left = NotExported()
    try:
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise TraceError(f"{path} is there already; choose a new folder.")
        with tempfile.TemporaryDirectory(dir=path.absolute().parent, prefix=f".{path.name}-") as folder:
            made = Path(folder) / "made"
            made.mkdir()
            for number, program in enumerate(programs):
                _write_one(program, made, number, left)
            if len(left.programs) == len(programs):
                raise TraceError(f"no program can be said in this format. {left.programs[0]}")
            made.rename(path)
    except OSError as error:
        raise TraceError(f"{path} cannot be written: {error.strerror or error}. Choose another folder.") from None
    return left


def _write_one(program: TraceProgram, folder: Path, number: int, left: NotExported) -> None:
    try:
        session = _session(program)
    except TraceError as error:
        left.programs.append(str(error))
        return
    left.note(program)
    left.lost["arrivals"] += program.arrival_s > 0
    left.lost["names of tools"] += sum(call.tool not in (None, "tool", "human") for call in program.calls)
    name = re.sub(r"[^\w.-]", "_", program.program)[:80]
    (folder / f"{number:05}-{name}.json").write_text(json.dumps(session), encoding="utf-8")


def _session(program: TraceProgram) -> dict[str, Any]:
    calls = ordered(program.calls, program.program)
    block_tokens = program.block_tokens or BLOCK_TOKENS
    requests = list(_requests(program, _Writer(calls, block_ids(program, block_tokens)), sessions_of(calls)))
    agents = [request for request in requests if request["type"] == "subagent"]
    for number, agent in enumerate(agents, 1):
        agent["agent_id"] = f"agent_{number:03}"
    return {
        "id": program.program,
        "models": [MODEL],
        "block_size": block_tokens,
        "hash_id_scope": "local",
        "tool_tokens": 0,
        "system_tokens": 0,
        "requests": requests,
    }


def _requests(program: TraceProgram, writer: _Writer, sessions: list[list[TraceCall]]) -> Iterator[dict[str, Any]]:
    """Yield the requests of the main agent, each with the sub-agents that it started after it."""
    main, *others = sessions
    if main[0].agent is not None:
        raise _refused(program, main[0], f"is of the sub-agent {main[0].agent!r:.40} and begins the program")
    started: dict[str, list[list[TraceCall]]] = {call.call_id: [] for call in main}
    for session in sorted(others, key=lambda session: writer.begin_s[session[0].call_id]):
        first = session[0]
        if len(first.parents) != 1 or first.parents[0] not in started:
            raise _refused(program, first, f"begins after {_listed(first.parents)} and not after one of the main agent")
        for before, call in itertools.pairwise(session):
            if call.parents != (before.call_id,):
                raise _refused(program, call, f"of a sub-agent waits for {_listed(call.parents)}")
        started[first.parents[0]].append(session)
    yield writer.request(main[0], is_first=True)
    for before, call in itertools.pairwise(main):
        agents = {session[-1].call_id: session for session in started[before.call_id]}
        waits = set(call.parents) - {before.call_id}
        if before.call_id not in call.parents or not waits <= set(agents):
            raise _refused(program, call, f"waits for {_listed(call.parents)}")
        yield from (writer.agent(session, is_joined=last in waits) for last, session in agents.items())
        yield writer.request(call)
    yield from (writer.agent(session) for session in started[main[-1].call_id])


def _refused(program: TraceProgram, call: TraceCall, why: str) -> TraceError:
    return TraceError(
        f"Program {program.program!r:.60}: call {call.call_id!r:.60} {why}, which a Weka session cannot say; export it "
        "as agentic-mooncake."
    )


def _listed(calls: Sequence[str]) -> str:
    return f"{', '.join(calls)!r:.80}" if calls else "nothing"


class _Writer:
    """Writes the requests of a session.

    Attributes:
        begin_s: when each call began, in seconds from the first one.
    """

    def __init__(self, calls: Sequence[TraceCall], ids: Mapping[str, list[int]]) -> None:
        self._ids = ids
        self.begin_s, self._end_s = _times(calls)

    def request(self, call: TraceCall, *, is_first: bool = False) -> dict[str, Any]:
        begin_s = self.begin_s[call.call_id]
        return {
            "t": round(begin_s, 6),
            "type": "n",
            "model": MODEL,
            "in": call.prompt_tokens,
            "out": call.output_tokens,
            "hash_ids": self._ids[call.call_id],
            "input_types": ["text" if is_first or call.tool == "human" else "tool_result"],
            "output_types": ["text"],
            "stop": "",
            "api_time": round(self._end_s[call.call_id] - begin_s, 6),
            "think_time": round(call.gap_s, 6),
        }

    def agent(self, calls: Sequence[TraceCall], *, is_joined: bool = False) -> dict[str, Any]:
        """The entry of a sub-agent."""
        begin_s, end_s = self.begin_s[calls[0].call_id], self._end_s[calls[-1].call_id]
        requests = [self.request(call, is_first=number == 0) for number, call in enumerate(calls)]
        return {
            "t": round(begin_s, 6),
            "type": "subagent",
            "subagent_type": calls[0].agent or "subagent",
            "duration_ms": round((end_s - begin_s) * 1000),
            "total_tokens": sum(call.prompt_tokens + call.output_tokens for call in calls),
            "tool_use_count": max(0, len(calls) - 1),
            "status": "completed" if is_joined else IN_BACKGROUND,
            "requests": requests,
            "models": [MODEL],
        }


def _times(calls: Sequence[TraceCall]) -> tuple[dict[str, float], dict[str, float]]:
    """When calls began and ended, in seconds from the first one: as measured, as recorded, or as their gaps say."""
    begin_s: dict[str, float] = {}
    end_s: dict[str, float] = {}
    measured = {call.call_id: call.measured for call in calls}
    timed = all(call.at_s is not None for call in calls)
    for call in calls:
        found = measured[call.call_id]
        if found is not None:
            begin_s[call.call_id], end_s[call.call_id] = found.arrival_s, found.end_s
        elif timed:
            begin_s[call.call_id] = call.at_s or 0.0
        else:
            before = max((end_s[parent] for parent in call.parents), default=0.0)
            begin_s[call.call_id] = end_s[call.call_id] = before + call.gap_s
    for call in calls:
        for parent in call.parents:
            if measured[parent] is None and timed:  # a call's end is when the gap after it begins
                ended_s = max(begin_s[parent], begin_s[call.call_id] - call.gap_s)
                end_s[parent] = min(end_s.get(parent, ended_s), ended_s)
    start_s = min(begin_s.values())
    begin_s = {call_id: at_s - start_s for call_id, at_s in begin_s.items()}
    return begin_s, {call_id: end_s.get(call_id, at_s + start_s) - start_s for call_id, at_s in begin_s.items()}
