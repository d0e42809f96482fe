"""The dynamic DAG of a program's calls, as it unfolds: calls with parents and service, threads, forks, joins,
interceptions and the critical path (Autellix §4.2.1, eq. 2).

Times are seconds of the engine's monotonic clock, handed in; durations are seconds.
"""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields, replace
from enum import StrEnum
from typing import Any, Final, NamedTuple

from weft.core.errors import TraceError
from weft.core.ids import CallId, ProgramId, SessionId, ThreadId
from weft.core.process_table import Account

FORMAT: Final = "weft.graph"
VERSION: Final = 1


class CallState(StrEnum):
    """Where a call is in its life."""

    NAMED = "named"  # it has its ids, and has not reached an engine
    RUNNING = "running"  # it waits or runs on an engine
    FINISHED = "finished"
    FAILED = "failed"  # refused, or the engine failed on it
    CANCELLED = "cancelled"  # aborted: its caller or its program gave up on it


class Edge(NamedTuple):
    """From a parent to the call that has it."""

    parent: CallId
    exact: bool  # False: a guess. The parent had ended, and may have had nothing to do with it


@dataclass(frozen=True, slots=True)
class CallNode:
    """A call. A node is replaced when it changes, so one that was read stays as it was."""

    call_id: CallId
    thread_id: ThreadId
    parents: tuple[Edge, ...] = ()  # the oldest first
    label: str = ""  # the name of its run or agent
    tools: tuple[str, ...] = ()  # that ran, as far as known, between its parents and it
    state: CallState = CallState.NAMED
    arrival_s: float | None = None
    completion_s: float | None = None
    account: Account = field(default_factory=Account)

    @property
    def service_s(self) -> float:
        """Time on the model executor."""
        return self.account.service_s


class Interception(NamedTuple):
    """Time between calls: from the end of the last of a call's parents to its arrival."""

    after: CallId
    before: CallId
    start_s: float
    end_s: float
    tools: tuple[str, ...]  # what ran then, where a framework says so; "human" for a human's answer

    @property
    def duration_s(self) -> float:
        return self.end_s - self.start_s


class CriticalPath(NamedTuple):
    """The longest chain of calls by service."""

    service_s: float
    calls: tuple[CallId, ...]  # from first to last


class ProgramGraph:
    """The DAG of one program. One thread at a time may write to it; any may read meanwhile."""

    def __init__(self, program_id: ProgramId, session_id: SessionId, name: str) -> None:
        self.program_id = program_id
        self.session_id = session_id
        self.name = name
        self._calls: dict[CallId, CallNode] = {}  # in the order they started, so parents come first
        # Of each call that has left: the service of the longest chain up to and with it, and the call before it there.
        self._longest: dict[CallId, tuple[float, CallId | None]] = {}
        self._last: CallId | None = None  # of the longest chain of all

    # -- writing

    def open(self, node: CallNode) -> None:
        """A call starts. Its parents must have been opened before it."""
        self._calls[node.call_id] = node

    def arrive(self, call_id: CallId, now_s: float) -> None:
        """A call reaches an engine. A call that was not opened changes nothing, here and below."""
        if call_id in self._calls:
            self._calls[call_id] = replace(self[call_id], state=CallState.RUNNING, arrival_s=now_s)

    def leave(self, call_id: CallId, now_s: float, account: Account, state: CallState) -> None:
        """A call leaves the engine, or is refused by it."""
        if call_id in self._calls:
            left_s = None if self[call_id].arrival_s is None else now_s
            self._calls[call_id] = replace(self[call_id], state=state, completion_s=left_s, account=account)
            self._extend(call_id)

    def settle(self, call_id: CallId, account: Account) -> None:
        """A call that has left turns out to have cost more."""
        if call_id in self._calls:
            self._calls[call_id] = replace(self[call_id], account=account)
            for other in self._calls:  # calls after it may have left already
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
        """Every call, in the order they started."""
        return tuple(self._calls.values())

    def __getitem__(self, call_id: CallId) -> CallNode:
        return self._calls[call_id]

    def __len__(self) -> int:
        return len(self._calls)

    @property
    def threads(self) -> dict[ThreadId, tuple[CallId, ...]]:
        """The calls of each thread, in order; threads in the order of their first calls."""
        threads: dict[ThreadId, list[CallId]] = {}
        for node in self.calls:
            threads.setdefault(node.thread_id, []).append(node.call_id)
        return {thread_id: tuple(calls) for thread_id, calls in threads.items()}

    @property
    def forks(self) -> tuple[CallId, ...]:
        """The calls that several calls come right after."""
        children = Counter(edge.parent for node in self.calls for edge in node.parents)
        return tuple(node.call_id for node in self.calls if children[node.call_id] > 1)

    @property
    def joins(self) -> tuple[CallId, ...]:
        """The calls that come right after several calls."""
        return tuple(node.call_id for node in self.calls if len(node.parents) > 1)

    @property
    def interceptions(self) -> tuple[Interception, ...]:
        """The time before each call that has parents; where its parents or it never were on an engine, none."""
        found = []
        for node in self.calls:
            ends = [(self[edge.parent].completion_s, edge.parent) for edge in node.parents]
            known = [(end_s, parent) for end_s, parent in ends if end_s is not None]
            if known and node.arrival_s is not None:
                start_s, after = max(known, key=lambda each: each[0])
                found.append(Interception(after, node.call_id, start_s, node.arrival_s, node.tools))
        return tuple(found)

    def critical_path(self) -> CriticalPath:
        """The longest chain of calls that have left the engine (eq. 2); guesses count as parents."""
        calls: list[CallId] = []
        call_id = self._last
        while call_id is not None:
            calls.append(call_id)
            call_id = self._longest[call_id][1]
        return CriticalPath(self._longest[calls[0]][0] if calls else 0.0, tuple(reversed(calls)))

    # -- a trace on disk

    def to_json(self) -> str:
        """The graph as one line of JSON, so that a file may hold many::

            {"format": "weft.graph", "version": 1,
             "program": {"program_id", "session_id", "name"},
             "calls": [{"call_id", "thread_id", "label", "state",
                        "parents": [{"call_id", "exact"}],           # opened before it, the oldest first
                        "tools": [name],
                        "arrival_s", "completion_s",                 # null: never on an engine, or not yet off it
                        "service_s", "wait_s", "preemptions",
                        "prompt_tokens", "output_tokens", "cached_tokens",
                        "swapped_tokens", "recomputed_tokens"}]}

        Times are seconds of the engine's monotonic clock. Keys stand in this order, calls in the order they started.
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
        """Read what `to_json` wrote.

        Raises:
            TraceError: it is something else.
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
            raise TraceError(f"no graph as `program.graph.to_json()` writes it ({detail:.200}).") from None
        return graph

    # -- pictures in text: a box for each thread, guesses dashed, the critical path thick, tools beside the edges

    def to_mermaid(self) -> str:
        """The graph as a Mermaid flowchart."""
        lines = ["flowchart TD"]
        for number, calls in enumerate(self._drawn_threads()):
            lines.append(f'    subgraph t{number}["thread {number}"]')
            lines += [f'        {call}["{"<br/>".join(map(_mermaid, caption))}"]' for call, caption in calls]
            lines.append("    end")
        thick = []
        for number, (parent, call, exact, critical, text) in enumerate(self._drawn_edges()):
            arrow = "-->" if exact else "-.->"
            lines.append(f"    {parent} {arrow}" + (f'|"{_mermaid(text)}"|' if text else "") + f" {call}")
            thick += [str(number)] if critical else []
        if thick:
            lines.append(f"    linkStyle {','.join(thick)} stroke-width:4px")
        return "\n".join(lines) + "\n"

    def to_dot(self) -> str:
        """The graph in Graphviz' DOT language."""
        lines = [f'digraph "{_dot(self.name)}" {{', "    node [shape=box];"]
        for number, calls in enumerate(self._drawn_threads()):
            lines.append(f'    subgraph cluster_{number} {{ label="thread {number}";')
            captions = ((call, "\\n".join(map(_dot, caption))) for call, caption in calls)
            lines += [f'        {call} [label="{caption}"];' for call, caption in captions]
            lines.append("    }")
        for parent, call, exact, critical, text in self._drawn_edges():
            style = [f'label="{_dot(text)}"'] if text else []
            style += [] if exact else ["style=dashed"]
            style += ["penwidth=3"] if critical else []
            lines.append(f"    {parent} -> {call}" + (f" [{', '.join(style)}]" if style else "") + ";")
        return "\n".join([*lines, "}"]) + "\n"

    def _drawn_threads(self) -> Iterator[list[tuple[str, list[str]]]]:
        """For each thread its calls, each with a short name and the lines of its caption."""
        names = self._short_names()
        for calls in self.threads.values():
            yield [(names[call_id], self.caption(self[call_id])) for call_id in calls]

    def _drawn_edges(self) -> Iterator[tuple[str, str, bool, bool, str]]:
        """Parent, call, whether exact, whether on the critical path, and what ran in between."""
        names = self._short_names()
        critical = set(itertools.pairwise(self.critical_path().calls))
        between = {(gap.after, gap.before): gap for gap in self.interceptions if gap.tools}
        for node in self.calls:
            for edge in node.parents:
                pair = (edge.parent, node.call_id)
                gap = between.get(pair)
                text = f"{', '.join(gap.tools)} {gap.duration_s:.3f} s" if gap else ""
                yield names[edge.parent], names[node.call_id], edge.exact, pair in critical, text

    def _short_names(self) -> dict[CallId, str]:
        return {node.call_id: f"c{number}" for number, node in enumerate(self.calls)}

    @staticmethod
    def caption(node: CallNode) -> list[str]:
        """What a picture says of a call, in lines."""
        lines = [node.label or "call", f"{node.service_s:.3f} s"]
        return lines if node.state is CallState.FINISHED else [*lines, str(node.state)]


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


def _mermaid(text: str) -> str:
    """Mermaid reads `#code;` as a character; what it would take for markup is written so."""
    return "".join(each if each.isalnum() or each in " .,-_:()/" else f"#{ord(each)};" for each in text)


def _dot(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return "".join(each if each.isprintable() else " " for each in escaped)
