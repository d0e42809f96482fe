"""Recorded coding sessions in the form of Weka's kv-cache-tester, the corpus of the AgentX benchmark.

A file is a session. Its requests follow one another; between two of them are the sub-agents that the first one started
and the second one waited for.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from weft.core.errors import TraceError
from weft.core.trace.format import TraceCall, TraceProgram, seconds, text, whole
from weft.core.trace.importers.contract import Blocks, BlockScope, Importer, begins
from weft.core.trace.importers.reading import a_list, an_object, documents, hash_ids, optional_seconds
from weft.core.trace.prefixes import with_block_hashes

NAME: Final = "claude-code"  # of all programs: the sessions have no names of their own
IN_BACKGROUND: Final = "async_launched"  # the status of a sub-agent that nobody waited for
_EXPECTED: Final = "a Weka session, an object with id, block_size and requests"


def _read(path: Path, blocks: Blocks, advance: Callable[[int], object]) -> Iterator[TraceProgram]:
    """Reads sessions; a file has one, or one on each line."""
    for where, data in documents(path, advance, _EXPECTED):
        yield _session(an_object(data, where, _EXPECTED), where, blocks)


WEKA: Final = Importer(
    "weka", "sessions of Weka's kv-cache-tester, as in AgentX", begins("{", "requests", "hash_ids", "in"), _read
)


def _session(data: dict[str, Any], where: str, blocks: Blocks) -> TraceProgram:
    program = text(data, "id", where, required=True) or ""
    block_tokens = whole(data, "block_size", where, least=1, required=True)
    scope = text(data, "hash_id_scope", where) or "local"
    if scope not in ("local", "global"):
        raise TraceError(f"{where}: hash_id_scope is {scope!r:.40}; expected local or global.")
    reader = _Requests(blocks.scope(("weka", block_tokens) if scope == "global" else None), block_tokens)
    try:
        reader.add(a_list(data, "requests", where), where)
    except RecursionError:
        raise TraceError(f"{where}: sub-agents are nested too deeply; expected some levels at most.") from None
    if not reader.calls:
        raise TraceError(f"{where}: the session has no request; expected at least one.")
    return with_block_hashes(
        TraceProgram(program, tuple(reader.calls), name=NAME), reader.prompts, block_tokens=block_tokens
    )


class _Requests:
    """Collects the calls of a session and of its sub-agents."""

    def __init__(self, scope: BlockScope, block_tokens: int) -> None:
        self.calls: list[TraceCall] = []
        self.prompts: dict[str, array[int]] = {}
        self._scope = scope
        self._block_tokens = block_tokens

    def add(
        self,
        requests: list[Any],
        where: str,
        start_s: float = 0.0,
        after: tuple[str, float] | None = None,
        agent: str | None = None,
    ) -> tuple[str, float] | None:
        """Add the requests of an agent, and of the sub-agents between them.

        Args:
            start_s: when it started, in seconds from the session's start. Its times count from then.
            after: the call that started it, and when that call ended.
            agent: the sub-agent's type; None for the session's own agent.

        Returns:
            Its last call, and when that ended, or None if it made no call.
        """
        ends_marked = _ends_marked(requests, where)
        previous, is_first, is_timed = after, True, False
        joined: list[tuple[str, float]] = []
        for number, row in enumerate(requests, 1):
            place = f"{where}, request {number}"
            request = an_object(row, place, "an object with t, in, out and hash_ids, or a sub-agent")
            if request.get("type") == "subagent":
                begin_s = start_s + _start_s(request, place, ends_marked)
                kind = text(request, "subagent_type", place) or text(request, "agent_id", place) or "subagent"
                last = self.add(a_list(request, "requests", place), place, begin_s, previous, kind)
                if last is not None and request.get("status") != IN_BACKGROUND:
                    joined.append(last)
                continue
            at_s = start_s + seconds(request, "t", place, required=True)
            parents = ([previous] if previous is not None else []) + joined
            gap_s = max(0.0, at_s - max((end_s for _, end_s in parents), default=0.0))
            think_s = optional_seconds(request, "think_time", place)
            if think_s is not None and not joined and not is_first:
                # Where the last call's end is not recorded, `think_time` counts from the end of an earlier one.
                gap_s = think_s if is_timed else min(gap_s, think_s)
            inputs = a_list(request, "input_types", place) if request.get("input_types") is not None else []
            call_id = f"c{len(self.calls)}"
            self.calls.append(
                TraceCall(
                    call_id=call_id,
                    parents=tuple(parent for parent, _ in parents),
                    output_tokens=max(1, whole(request, "out", place, required=True)),
                    prompt_tokens=whole(request, "in", place, required=True),
                    gap_s=round(gap_s, 6),
                    tool=None if is_first else "tool" if "tool_result" in inputs else "human",
                    at_s=round(at_s, 6),
                    agent=agent,
                )
            )
            ids = hash_ids(request, place, self.calls[-1].prompt_tokens, self._block_tokens)
            self.prompts[call_id] = self._scope.numbers(ids)
            duration_s = optional_seconds(request, "api_time", place)
            previous, is_first, is_timed = (call_id, at_s + (duration_s or 0.0)), False, duration_s is not None
            joined.clear()
        return previous if not is_first else None


def _ends_marked(requests: list[Any], where: str) -> bool:
    """Whether the times of sub-agents are those of their ends.

    In the public corpus they are: a sub-agent's time less its duration is the end of the call that started it. If the
    time were that of its start, it would often end after the call that waited for it.
    """
    running: list[tuple[float, float]] = []
    for number, row in enumerate(requests, 1):
        place = f"{where}, request {number}"
        if not isinstance(row, dict) or (at_s := optional_seconds(row, "t", place)) is None:
            continue
        if row.get("type") != "subagent":
            if any(begin_s + duration_s > at_s + 1.0 for begin_s, duration_s in running):
                return True
            running.clear()
        elif row.get("status") != IN_BACKGROUND:
            running.append((at_s, optional_seconds(row, "duration_ms", place, 1e-3) or 0.0))
    return False


def _start_s(subagent: dict[str, Any], where: str, ends_marked: bool) -> float:
    """When the times of a sub-agent's requests count from, in seconds from its parent's start."""
    at_s = seconds(subagent, "t", where, required=True)
    first = next((row for row in a_list(subagent, "requests", where) if isinstance(row, dict)), {})
    if at_s > 0 and seconds(first, "t", where) >= at_s:
        return 0.0  # they count from the session's start, as in later versions of the corpus
    if not ends_marked:
        return at_s
    return max(0.0, at_s - (optional_seconds(subagent, "duration_ms", where, 1e-3) or 0.0))
