"""A program's timeline: what each of its calls and tools did, and when."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any, Final, NamedTuple

from weft.core.accounts import Account
from weft.core.ids import CallId, EngineId, ThreadId
from weft.core.program.graph import CallNode, CriticalPath, Interception, ProgramGraph

FORMAT: Final = "weft.timeline"
VERSION: Final = 1


class Span(NamedTuple):
    """A span of time, in seconds. JSON has a pair."""

    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Parent:
    """A call that had to end before another one."""

    call_id: str
    is_exact: bool  # False: Weft has guessed that it is a parent


@dataclass(frozen=True, slots=True)
class TimelineCall:
    """A call. It is at a replica from `start_s` to `end_s`, and waits or is served in between."""

    call_id: str
    lane: int  # its thread: an index into `Timeline.lanes`
    row: int  # within the lane; above 0 only if it overlaps another call of its thread
    label: str
    state: str
    replica: str | None
    earlier_replicas: tuple[str, ...]  # where it was before it was stolen, or before they died
    parents: tuple[Parent, ...]
    is_critical: bool  # on the critical path
    start_s: float
    end_s: float | None  # None: it has not ended
    waits: tuple[Span, ...]
    services: tuple[Span, ...]
    is_placed: bool  # False: only the sums are known, so `waits` has one wait at the start
    wait_s: float
    service_s: float
    preemptions: int
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class TimelineTool:
    """A run of a tool, or a human's answer."""

    name: str
    row: int  # tools that overlap have different rows
    start_s: float
    end_s: float | None  # None: it still runs


@dataclass(frozen=True, slots=True)
class Gap:
    """The time between a call and the last of its parents."""

    call_id: str
    start_s: float
    end_s: float
    tools: tuple[str, ...]  # the tools that are known to have run in it


@dataclass(frozen=True, slots=True)
class Lane:
    """A thread, and how many rows its calls need."""

    thread_id: str
    rows: int


@dataclass(frozen=True, slots=True)
class Path:
    """The critical path: the chain of calls with the most service, as far as they have ended."""

    service_s: float
    wait_s: float
    calls: tuple[str, ...]  # from first to last


@dataclass(frozen=True, slots=True)
class Timeline:
    """What a program did, and when."""

    program_id: str
    name: str
    state: str
    parent_program_id: str | None  # the program inside which it runs
    length_s: float  # from its start until its end, or until now
    is_open: bool
    lanes: tuple[Lane, ...]  # in the order of their first calls
    calls: tuple[TimelineCall, ...]  # in the order in which they started
    tools: tuple[TimelineTool, ...]
    gaps: tuple[Gap, ...]
    critical_path: Path
    calls_left_out: int  # older calls, and calls that reached no engine
    tools_left_out: int

    def to_dict(self) -> dict[str, Any]:
        """The document as values that JSON can hold, with its format and version."""
        return {"format": FORMAT, "version": VERSION, **asdict(self)}


def rows(spans: Iterable[tuple[float, float]]) -> list[int]:
    """Return the number of a row for each span: the first row that is free.

    Args:
        spans: start and end of each span in seconds, sorted by start.
    """
    busy: list[tuple[float, int]] = []  # the end of the last span of a row, and the row
    free: list[int] = []
    found = []
    for start_s, end_s in spans:
        while busy and busy[0][0] <= start_s:
            heapq.heappush(free, heapq.heappop(busy)[1])
        row = heapq.heappop(free) if free else len(busy)
        heapq.heappush(busy, (end_s, row))
        found.append(row)
    return found


MOST_CALLS: Final = 2_000  # calls in a timeline: the newest
MOST_TOOLS: Final = 2_000  # runs of tools in a timeline: the newest
MOST_LETTERS: Final = 200  # of a name
_MOST_PARENTS: Final = 64  # of a call, the newest


class ToolRun(NamedTuple):
    """A run of a tool, in seconds of the engine's clock."""

    name: str
    start_s: float
    end_s: float | None = None


class Live(NamedTuple):
    """A call in flight as of its latest output."""

    account: Account
    engine_id: EngineId | None
    earlier_engine_ids: tuple[EngineId, ...] = ()


def timeline(
    graph: ProgramGraph,
    *,
    now_s: float = math.nan,
    start_s: float = math.nan,
    end_s: float | None = None,
    state: str = "",
    tools: Iterable[ToolRun] | None = None,
    tools_forgotten: int = 0,
    live: Mapping[CallId, Live] | None = None,
    scope: str = "",
) -> Timeline:
    """Return the timeline of a program.

    Args:
        graph: the graph of the program, which may go on meanwhile.
        now_s: the time on the engine's clock. Default: the last end of a call.
        start_s: when the program started. Default: when its first call arrived.
        end_s: when it ended; None if it has not ended, or its end is not known.
        tools: the runs of its tools. Without them, the tools that the graph names are used.
        tools_forgotten: how many older runs there were.
        live: what is known of calls in flight. The graph has the accounts of the other calls.
        scope: the beginning of all ids, which is left out.
    """
    graph = graph.copy()
    timed = [node for node in graph.calls if node.arrival_s is not None]
    shown = timed[-MOST_CALLS:]
    if math.isnan(start_s):
        start_s = min((_start(node) for node in shown), default=0.0)
    if math.isnan(now_s):
        now_s = max((node.completion_s or _start(node) for node in shown), default=start_s)
    last_s = now_s if end_s is None else end_s
    path = graph.critical_path()
    gaps = [gap for node in shown if (gap := graph.interception(node.call_id)) is not None]
    lanes, places = _lanes(shown, scope)
    runs = list(_named(gaps) if tools is None else tools)
    return Timeline(
        program_id=graph.program_id.removeprefix(scope),
        name=graph.name[:MOST_LETTERS],
        state=state,
        parent_program_id=graph.parent_program_id and graph.parent_program_id.removeprefix(scope),
        length_s=max(0.0, last_s - start_s),
        is_open=end_s is None,
        lanes=lanes,
        calls=_calls(shown, places, path, Span(start_s, last_s), live or {}, scope=scope),
        tools=_tools(runs[-MOST_TOOLS:], start_s, last_s),
        gaps=tuple(
            Gap(gap.before.removeprefix(scope), gap.start_s - start_s, gap.end_s - start_s, _cut(gap.tools))
            for gap in gaps
            if gap.end_s > gap.start_s
        ),
        critical_path=Path(
            path.service_s,
            sum(graph[call_id].account.wait_s for call_id in path.calls),
            tuple(call_id.removeprefix(scope) for call_id in path.calls[-MOST_CALLS:]),
        ),
        calls_left_out=len(graph) - len(shown) + graph.folded.calls,
        tools_left_out=tools_forgotten + max(0, len(runs) - MOST_TOOLS),
    )


def _lanes(nodes: Sequence[CallNode], scope: str) -> tuple[tuple[Lane, ...], dict[CallId, tuple[int, int]]]:
    """The lanes of a timeline, and for each call the number of its lane and of its row there."""
    threads: dict[ThreadId, list[CallNode]] = {}
    for node in nodes:
        threads.setdefault(node.thread_id, []).append(node)
    lanes = []
    places: dict[CallId, tuple[int, int]] = {}
    for lane, (thread_id, members) in enumerate(threads.items()):
        members.sort(key=_start)
        spans = ((_start(node), math.inf if node.completion_s is None else node.completion_s) for node in members)
        numbers = rows(spans)
        places |= {node.call_id: (lane, row) for node, row in zip(members, numbers, strict=True)}
        lanes.append(Lane(thread_id.removeprefix(scope), max(numbers) + 1))
    return tuple(lanes), places


def _calls(
    nodes: Sequence[CallNode],
    places: Mapping[CallId, tuple[int, int]],
    path: CriticalPath,
    program: Span,  # from its start until its end or until now, in seconds of the engine's clock
    live: Mapping[CallId, Live],
    *,
    scope: str,
) -> tuple[TimelineCall, ...]:
    critical = set(path.calls)
    calls = []
    for node in nodes:
        known = live.get(node.call_id) if node.completion_s is None else None
        account = node.account if known is None else known.account
        lane, row = places[node.call_id]
        begin = _start(node) - program.start_s
        end = None if node.completion_s is None else node.completion_s - program.start_s
        waits, services = _pieces(Span(begin, program.end_s - program.start_s if end is None else end), account)
        calls.append(
            TimelineCall(
                call_id=node.call_id.removeprefix(scope),
                lane=lane,
                row=row,
                label=node.label[:MOST_LETTERS],
                state=str(node.state),
                replica=node.engine_id if known is None else known.engine_id,
                earlier_replicas=(node if known is None else known).earlier_engine_ids,
                parents=tuple(
                    Parent(edge.parent.removeprefix(scope), edge.exact) for edge in node.parents[-_MOST_PARENTS:]
                ),
                is_critical=node.call_id in critical,
                start_s=begin,
                end_s=end,
                waits=waits,
                services=services,
                is_placed=_is_placed(account),
                wait_s=account.wait_s,
                service_s=account.service_s,
                preemptions=account.preemptions,
                prompt_tokens=account.prompt_tokens,
                output_tokens=account.output_tokens,
                cached_tokens=account.cached_tokens,
            )
        )
    return tuple(calls)


def _pieces(bar: Span, account: Account) -> tuple[tuple[Span, ...], tuple[Span, ...]]:
    """Return the waits and the times of service between a call's arrival and its end.

    The service fills the time between the waits, until its sum is used up. `bar` is the time from the call's arrival to
    its end.
    """
    places = account.waits or (((0.0, account.wait_s),) if account.wait_s > 0 else ())
    waits, services = [], []
    at_s, left_s = bar.start_s, account.service_s
    for start_s, length_s in (*places, (math.inf, 0.0)):
        wait = Span(max(at_s, min(bar.start_s + start_s, bar.end_s)), min(bar.start_s + start_s + length_s, bar.end_s))
        until_s = min(at_s + left_s, wait.start_s)
        if until_s > at_s:
            services.append(Span(at_s, until_s))
            left_s -= until_s - at_s
        if wait.end_s > wait.start_s:
            waits.append(wait)
        at_s = max(at_s, wait.end_s)
    return tuple(waits), tuple(services)


def _is_placed(account: Account) -> bool:
    """Whether the times of all waits are known. A call without `waits` and preemptions waited only before its start."""
    if account.waits:
        return math.isclose(sum(length_s for _, length_s in account.waits), account.wait_s, abs_tol=1e-6)
    return not account.preemptions


def _named(gaps: Iterable[Interception]) -> list[ToolRun]:
    """The tools that a graph names between calls. A gap is one run, however many calls follow it."""
    found = {(gap.start_s, gap.end_s, gap.tools) for gap in gaps if gap.tools and gap.end_s > gap.start_s}
    return [ToolRun(", ".join(tools), start_s, end_s) for start_s, end_s, tools in sorted(found)]


def _tools(runs: Sequence[ToolRun], start_s: float, last_s: float) -> tuple[TimelineTool, ...]:
    ordered = sorted(runs, key=lambda run: run.start_s)
    numbers = rows((run.start_s, max(last_s, run.start_s) if run.end_s is None else run.end_s) for run in ordered)
    return tuple(
        TimelineTool(
            run.name[:MOST_LETTERS], row, run.start_s - start_s, None if run.end_s is None else run.end_s - start_s
        )
        for run, row in zip(ordered, numbers, strict=True)
    )


def _cut(tools: Sequence[str]) -> tuple[str, ...]:
    return tuple(tool[:MOST_LETTERS] for tool in islice(tools, _MOST_PARENTS))


def _start(node: CallNode) -> float:
    return node.arrival_s if node.arrival_s is not None else math.inf
