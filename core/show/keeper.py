"""Keeps what timelines are made from, for the open programs of an engine and for those that ended last."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final

from weft.core.ids import ProgramId
from weft.core.locks import fork_safe
from weft.core.process_rows import CallIdentity, ProgramInfo, ProgramRow, ProgramState, RunningTool
from weft.core.program.graph import ProgramGraph
from weft.core.program.observer import ProgramObserver
from weft.core.show.program_timeline import MOST_TOOLS, Live, Timeline, ToolRun, timeline

MOST_ENDED: Final = 1_000  # programs that have ended
MOST_ENDED_BYTES: Final = 64 << 20  # memory that these take, estimated
_CALL_BYTES, _TOOL_BYTES = 3_000, 300  # measured; a call with 16 waits, which few have, and a tool


@dataclass(slots=True)
class _Kept:
    """What is kept of one program."""

    start_s: float
    graph: ProgramGraph | None = None  # from its first call on
    tools: OrderedDict[int, ToolRun] = field(default_factory=OrderedDict)  # by number of the run, the oldest first
    tools_forgotten: int = 0
    end_s: float | None = None
    state: str = ""

    @property
    def bytes(self) -> int:
        return _CALL_BYTES * (1 + len(self.graph or ())) + _TOOL_BYTES * len(self.tools)


class Timelines(ProgramObserver):
    """Keeps the graphs and the runs of tools of programs. May be used from any thread.

    `row` returns the row of an open program; None if the program is not open.
    """

    def __init__(self, row: Callable[[ProgramId], ProgramRow | None], clock: Callable[[], float]) -> None:
        self._row = row
        self._clock = clock
        self._lock = fork_safe(threading.Lock())
        self._open: dict[ProgramId, _Kept] = {}
        self._ended: OrderedDict[ProgramId, _Kept] = OrderedDict()  # the longest ended first
        self._ended_bytes = 0

    # -- as an observer

    def program_started(self, info: ProgramInfo, now_s: float) -> None:
        with self._lock:
            self._open[info.program_id] = _Kept(now_s)

    def call_arrived(self, identity: CallIdentity, graph: ProgramGraph, now_s: float) -> None:
        with self._lock:
            kept = self._open.get(identity.program_id)
            if kept is None:  # the program began before it was observed
                kept = self._open[identity.program_id] = _Kept(now_s)
            kept.graph = graph

    def tool_started(self, program_id: ProgramId, tool: RunningTool) -> None:
        with self._lock:
            kept = self._open.get(program_id)
            if kept is None:
                return
            kept.tools[tool.number] = ToolRun(tool.name, tool.start_s)
            if len(kept.tools) > MOST_TOOLS:
                kept.tools.popitem(last=False)
                kept.tools_forgotten += 1

    def tool_ended(self, program_id: ProgramId, tool: RunningTool, now_s: float) -> None:
        with self._lock:
            kept = self._open.get(program_id)
            if kept is not None and tool.number in kept.tools:
                kept.tools[tool.number] = ToolRun(tool.name, tool.start_s, now_s)

    def program_ended(self, row: ProgramRow, state: ProgramState, now_s: float) -> None:
        with self._lock:
            kept = self._open.pop(row.info.program_id, None)
            if kept is None or kept.graph is None:
                return
            kept.end_s, kept.state = now_s, str(state)
            for number, tool in kept.tools.items():  # nobody waits for the tools that still run
                if tool.end_s is None:
                    kept.tools[number] = tool._replace(end_s=now_s)
            before = self._ended.pop(row.info.program_id, None)  # an earlier program of this id
            self._ended_bytes += kept.bytes - (before.bytes if before is not None else 0)
            self._ended[row.info.program_id] = kept
            while len(self._ended) > MOST_ENDED or (self._ended_bytes > MOST_ENDED_BYTES and len(self._ended) > 1):
                self._ended_bytes -= self._ended.popitem(last=False)[1].bytes

    # -- reading

    def timeline(self, program_id: ProgramId, scope: str = "") -> Timeline | None:
        """The timeline of a program as of now. None: the program has made no call, or is forgotten.

        `scope` is the beginning of its ids, which is left out.
        """
        with self._lock:
            kept = self._open.get(program_id) or self._ended.get(program_id)
            if kept is None or kept.graph is None:
                return None
            tools = list(kept.tools.values())
            forgotten = kept.tools_forgotten
        row = self._row(program_id) if kept.end_s is None else None
        active = row.active if row is not None else {}
        return timeline(
            kept.graph,
            now_s=self._clock(),
            start_s=kept.start_s,
            end_s=kept.end_s,
            state=str(row.state) if row is not None else kept.state,
            tools=tools or None,  # None: take the names from the graph, because some frameworks report no runs
            tools_forgotten=forgotten,
            live={
                call_id: Live(call.account, call.engine_id, call.earlier_engine_ids) for call_id, call in active.items()
            },
            scope=scope,
        )

    def ended(self) -> Iterator[ProgramId]:
        """The programs that have ended and are not forgotten, the newest first."""
        with self._lock:
            return iter(list(reversed(self._ended)))
