"""The dynamic DAG of a program's calls as it unfolds (Autellix §4.2.1).

It has calls with parents and service, threads, forks, joins, interceptions and the critical path (eq. 2). Times are
seconds of the engine's monotonic clock, passed in by the caller; durations are seconds.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import asdict, dataclass, field, fields, replace
from enum import StrEnum
from typing import Any, Final, NamedTuple

from weft.core.errors import TraceError
from weft.core.ids import CallId, ProgramId, SessionId, ThreadId
from weft.core.process_table import Account
from weft.core.program import drawing

FORMAT: Final = "weft.graph"
VERSION: Final = 1


class CallState(StrEnum):
    """The state of a call."""

    NAMED = "named"  # it has ids, but has not reached an engine
    RUNNING = "running"  # it waits or runs on an engine
    FINISHED = "finished"  # it has a result
    FAILED = "failed"  # the engine refused it, or failed on it
    CANCELLED = "cancelled"  # its caller or its program aborted it


class Edge(NamedTuple):
    """An edge of the DAG, from a parent to the call that holds the edge."""

    parent: CallId
    exact: bool  # False: a guess. The parent had ended, but the call may not depend on it


@dataclass(frozen=True, slots=True)
class CallNode:
    """A call. The graph replaces a node when the call changes, so a node that was read stays as it was."""

    call_id: CallId
    thread_id: ThreadId
    parents: tuple[Edge, ...] = ()  # the oldest first
    label: str = ""  # the name of the run or agent that made the call
    tools: tuple[str, ...] = ()  # the tools known to have run between the parents and the call
    state: CallState = CallState.NAMED
    arrival_s: float | None = None
    completion_s: float | None = None
    account: Account = field(default_factory=Account)

    @property
    def service_s(self) -> float:
        """Seconds on the model executor."""
        return self.account.service_s

    @property
    def caption(self) -> tuple[str, ...]:
        """The lines that a picture shows for the call: label, service, and the state unless it is finished."""
        lines = (self.label or "call", f"{self.service_s:.3f} s")
        return lines if self.state is CallState.FINISHED else (*lines, str(self.state))


class Interception(NamedTuple):
    """The time between calls: from the end of the last of a call's parents to the call's arrival."""

    after: CallId  # the parent that ended last
    before: CallId  # the call
    start_s: float
    end_s: float
    tools: tuple[str, ...]  # the tools that a framework has reported for this time; "human" for a human's answer

    @property
    def duration_s(self) -> float:
        """Seconds from `start_s` to `end_s`."""
        return self.end_s - self.start_s


class CriticalPath(NamedTuple):
    """The longest chain of calls by service."""

    service_s: float  # the sum over the calls
    calls: tuple[CallId, ...]  # from first to last


class ProgramGraph:
    """The DAG of one program. Only one thread at a time may write to it; any thread may read meanwhile."""

    def __init__(self, program_id: ProgramId, session_id: SessionId, name: str) -> None:
        self.program_id = program_id
        self.session_id = session_id
        self.name = name
        self._calls: dict[CallId, CallNode] = {}  # in the order in which they started, so parents come first
        # For each call that has left: the service of the longest chain that ends with it, and its predecessor there.
        self._longest: dict[CallId, tuple[float, CallId | None]] = {}
        self._last: CallId | None = None  # the end of the critical path

    # -- writing

    def open(self, node: CallNode) -> None:
        """Add a call that starts. Its parents must have been opened before."""
        self._calls[node.call_id] = node

    def arrive(self, call_id: CallId, now_s: float) -> None:
        """Note that a call reaches an engine. A call that was not opened changes nothing."""
        if call_id in self._calls:
            self._calls[call_id] = replace(self[call_id], state=CallState.RUNNING, arrival_s=now_s)

    def leave(self, call_id: CallId, now_s: float, account: Account, state: CallState) -> None:
        """Note that a call leaves the engine, or that the engine refuses it. An unknown call changes nothing."""
        if call_id in self._calls:
            left_s = None if self[call_id].arrival_s is None else now_s
            self._calls[call_id] = replace(self[call_id], state=state, completion_s=left_s, account=account)
            self._extend(call_id)

    def settle(self, call_id: CallId, account: Account) -> None:
        """Replace the account of a call that has left. An unknown call changes nothing."""
        if call_id in self._calls:
            self._calls[call_id] = replace(self[call_id], account=account)
            for other in self._calls:  # calls that come after it may have left already
                if other in self._longest:
                    self._extend(other)

    def _extend(self, call_id: CallId) -> None:
        """Equation 2: p(c) = max over parents k of p(k) + t(k), and 0 for a root."""
        node = self[call_id]
        known = ((self._longest[edge.parent][0], edge.parent) for edge in node.parents if edge.parent in self._longest)
        before_s, before = max(known, key=lambda each: each[0], default=(0.0, None))
        self._longest[call_id] = (before_s + node.service_s, before)
        if self._last is None or self._longest[call_id][0] > self._longest[self._last][0]:
            self._last = call_id

    # -- reading

    @property
    def calls(self) -> tuple[CallNode, ...]:
        """All calls, in the order in which they started."""
        return tuple(self._calls.values())

    def __getitem__(self, call_id: CallId) -> CallNode:
        return self._calls[call_id]

    def __len__(self) -> int:
        return len(self._calls)

    @property
    def threads(self) -> dict[ThreadId, tuple[CallId, ...]]:
        """The calls of each thread in order. Threads are in the order of their first calls."""
        threads: dict[ThreadId, list[CallId]] = {}
        for node in self.calls:
            threads.setdefault(node.thread_id, []).append(node.call_id)
        return {thread_id: tuple(calls) for thread_id, calls in threads.items()}

    @property
    def forks(self) -> tuple[CallId, ...]:
        """The calls that are a parent of several calls."""
        children = Counter(edge.parent for node in self.calls for edge in node.parents)
        return tuple(node.call_id for node in self.calls if children[node.call_id] > 1)

    @property
    def joins(self) -> tuple[CallId, ...]:
        """The calls that have several parents."""
        return tuple(node.call_id for node in self.calls if len(node.parents) > 1)

    @property
    def interceptions(self) -> tuple[Interception, ...]:
        """The interception before each call that has parents, if the call and a parent were on an engine."""
        found = []
        for node in self.calls:
            ends = [(self[edge.parent].completion_s, edge.parent) for edge in node.parents]
            known = [(end_s, parent) for end_s, parent in ends if end_s is not None]
            if known and node.arrival_s is not None:
                start_s, after = max(known, key=lambda each: each[0])
                found.append(Interception(after, node.call_id, start_s, node.arrival_s, node.tools))
        return tuple(found)

    def critical_path(self) -> CriticalPath:
        """Return the longest chain of calls that have left the engine (eq. 2). Guesses count as parents."""
        calls: list[CallId] = []
        call_id = self._last
        while call_id is not None:
            calls.append(call_id)
            call_id = self._longest[call_id][1]
        return CriticalPath(self._longest[calls[0]][0] if calls else 0.0, tuple(reversed(calls)))

    # -- JSON

    def to_json(self) -> str:
        """Return the graph as one line of JSON, so that a file may hold many graphs::

            {"format": "weft.graph", "version": 1,
             "program": {"program_id", "session_id", "name"},
             "calls": [{"call_id", "thread_id", "label", "state",
                        "parents": [{"call_id", "exact"}],           # the oldest first
                        "tools": [name],
                        "arrival_s", "completion_s",                 # null: has not reached, or not left, an engine
                        "service_s", "wait_s", "preemptions",
                        "prompt_tokens", "output_tokens", "cached_tokens",
                        "swapped_tokens", "recomputed_tokens"}]}

        Times are seconds of the engine's monotonic clock. Keys are in this order, and calls are in the order in which
        they started.
        """
        program = {"program_id": self.program_id, "session_id": self.session_id, "name": self.name}
        calls = [
            {
                "call_id": node.call_id,
                "thread_id": node.thread_id,
                "label": node.label,
                "state": node.state,
                "parents": [{"call_id": edge.parent, "exact": edge.exact} for edge in node.parents],
                "tools": node.tools,
                "arrival_s": node.arrival_s,
                "completion_s": node.completion_s,
                **asdict(node.account),
            }
            for node in self.calls
        ]
        return json.dumps({"format": FORMAT, "version": VERSION, "program": program, "calls": calls})

    @classmethod
    def from_json(cls, text: str) -> ProgramGraph:
        """Return the graph that `to_json` wrote as `text`.

        Raises:
            TraceError: the text is not such a graph.
        """
        try:
            data = json.loads(text)
            if (data["format"], data["version"]) != (FORMAT, VERSION):
                raise ValueError(f"format {data['format']!r}, version {data['version']!r}")
            graph = cls(**{key: _typed(data["program"][key], str) for key in ("program_id", "session_id", "name")})
            for call in data["calls"]:
                node = _node(call)
                if node.call_id in graph._calls or any(edge.parent not in graph._calls for edge in node.parents):
                    raise ValueError(f"call {node.call_id} is there twice or before its parents")
                graph.open(node)
                if node.state not in (CallState.NAMED, CallState.RUNNING):
                    graph._extend(node.call_id)
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            detail = " ".join(f"{type(error).__name__}: {error}".split())
            raise TraceError(
                f"not a graph that `program.graph.to_json()` wrote ({detail:.200}). Give the text of one."
            ) from None
        return graph

    # -- pictures in text: a box for each thread, guesses dashed, the critical path thick, tools at the edges

    def to_mermaid(self) -> str:
        """Return the graph as a Mermaid flowchart."""
        return drawing.mermaid(self)

    def to_dot(self) -> str:
        """Return the graph in the DOT language of Graphviz."""
        return drawing.dot(self)


def _node(data: dict[str, Any]) -> CallNode:
    times = {key: _typed(data[key], float, int, type(None)) for key in ("arrival_s", "completion_s")}
    return CallNode(
        **{key: _typed(data[key], str) for key in ("call_id", "thread_id", "label")},
        parents=tuple(Edge(_typed(each["call_id"], str), _typed(each["exact"], bool)) for each in data["parents"]),
        tools=tuple(_typed(tool, str) for tool in data["tools"]),
        state=CallState(data["state"]),
        **times,
        account=Account(**{each.name: _typed(data[each.name], float, int) for each in fields(Account)}),
    )


def _typed(value: Any, *kinds: type) -> Any:
    if type(value) not in kinds or (isinstance(value, float) and not math.isfinite(value)):
        raise TypeError(f"{value!r:.80} is not of type {kinds[0].__name__}")
    return value
