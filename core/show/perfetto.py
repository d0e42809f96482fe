"""Timelines in the JSON trace event format, which Perfetto (ui.perfetto.dev) and chrome://tracing open.

A program is a process of the trace. Its critical path, its tools and its lanes are threads of that process. A call is a
slice that contains its waits and services. An arrow leads from each call to the calls that follow it. The slices of a
thread must not overlap in part, so all times are rounded to whole microseconds in the same way.
https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU describes the format.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from weft.core.show.program_timeline import Span, Timeline, TimelineCall

_PATH, _TOOLS, _FIRST_LANE = 1, 2, 1_000  # numbers of threads in the trace; rows of tools take the numbers in between


def perfetto(programs: Iterable[tuple[Timeline, float]]) -> dict[str, Any]:
    """Return a trace as values that JSON can hold.

    Args:
        programs: timelines, each with the start of its program in seconds of the trace.
    """
    flows = itertools.count(1)
    events: list[dict[str, Any]] = []
    for pid, (timeline, start_s) in enumerate(programs, 1):
        events += _Process(timeline, pid, start_s, flows).events()
    return {"displayTimeUnit": "ms", "otherData": {"source": "weft"}, "traceEvents": events}


class _Process:
    """The events of one program."""

    def __init__(self, timeline: Timeline, pid: int, start_s: float, flows: Iterator[int]) -> None:
        self._timeline = timeline
        self._pid = pid
        self._start_s = start_s
        self._flows = flows
        self._first_row: list[int] = []  # of each lane: the thread number of its first row
        number = _FIRST_LANE
        for lane in timeline.lanes:
            self._first_row.append(number)
            number += lane.rows

    def events(self) -> Iterator[dict[str, Any]]:
        timeline = self._timeline
        yield self._named("process_name", 0, f"{timeline.name} {timeline.program_id}")
        yield self._meta("process_sort_index", 0, {"sort_index": self._pid})
        yield from self._path()
        yield from self._tools()
        for number, lane in enumerate(timeline.lanes):
            for row in range(lane.rows):
                tid = self._first_row[number] + row
                yield from self._thread(tid, f"thread {number + 1}" + (f" ({row + 1})" if lane.rows > 1 else ""))
        calls = {call.call_id: call for call in timeline.calls}
        for call in timeline.calls:
            yield from self._call(call, self._tid(call), "call")
            yield from self._arrows(call, calls)

    def _path(self) -> Iterator[dict[str, Any]]:
        if not self._timeline.critical_path.calls:
            return
        yield from self._thread(_PATH, "critical path")
        on_path = sorted((call for call in self._timeline.calls if call.is_critical), key=lambda call: call.start_s)
        last_s = 0.0
        for call in on_path:  # a call may begin before a guessed parent has ended
            if call.start_s >= last_s:
                last_s = self._end_s(call)
                yield self._slice(_title(call), "critical path", _PATH, Span(call.start_s, last_s), _figures(call))

    def _tools(self) -> Iterator[dict[str, Any]]:
        for row in sorted({tool.row for tool in self._timeline.tools}):
            yield from self._thread(_TOOLS + row, "tools" + (f" ({row + 1})" if row else ""))
        for tool in self._timeline.tools:
            end_s = self._timeline.length_s if tool.end_s is None else tool.end_s
            yield self._slice(tool.name or "tool", "tool", _TOOLS + tool.row, Span(tool.start_s, end_s), {})

    def _call(self, call: TimelineCall, tid: int, category: str) -> Iterator[dict[str, Any]]:
        category += ",critical path" if call.is_critical else ""
        yield self._slice(_title(call), category, tid, Span(call.start_s, self._end_s(call)), _figures(call))
        for span in call.waits:
            yield self._slice("wait", "wait", tid, span, {})
        for span in call.services:
            yield self._slice("service", "service", tid, span, {})
        if call.is_placed:
            for span in (span for span in call.waits if span.start_s > call.start_s):
                yield {**self._event("i", "stops", tid, self._us(span.start_s)), "cat": "preemption", "s": "t"}

    def _arrows(self, call: TimelineCall, calls: Mapping[str, TimelineCall]) -> Iterator[dict[str, Any]]:
        for parent in call.parents:
            before = calls.get(parent.call_id)
            if before is None or before.start_s > call.start_s:  # the call is left out, or the guess was wrong
                continue
            name, number = "then" if parent.is_exact else "then (a guess)", next(self._flows)
            begin_us, end_us, to_us = (self._us(at_s) for at_s in (before.start_s, self._end_s(before), call.start_s))
            from_us = min(max(begin_us, end_us - 1), to_us)  # inside the slice of the parent
            yield {**self._event("s", name, self._tid(before), from_us), "cat": "parent", "id": number}
            yield {**self._event("f", name, self._tid(call), to_us), "cat": "parent", "id": number, "bp": "e"}

    def _tid(self, call: TimelineCall) -> int:
        return self._first_row[call.lane] + call.row

    def _end_s(self, call: TimelineCall) -> float:
        return max(call.start_s, self._timeline.length_s) if call.end_s is None else call.end_s

    def _us(self, at_s: float) -> int:
        return round((self._start_s + at_s) * 1e6)

    def _slice(self, name: str, category: str, tid: int, span: Span, args: Mapping[str, Any]) -> dict[str, Any]:
        start_us = self._us(span.start_s)
        event = self._event("X", name, tid, start_us)
        return {**event, "dur": max(0, self._us(span.end_s) - start_us), "cat": category, "args": dict(args)}

    def _event(self, phase: str, name: str, tid: int, at_us: int) -> dict[str, Any]:
        return {"ph": phase, "name": name, "pid": self._pid, "tid": tid, "ts": at_us}

    def _thread(self, tid: int, name: str) -> Iterator[dict[str, Any]]:
        yield self._named("thread_name", tid, name)
        yield self._meta("thread_sort_index", tid, {"sort_index": tid})

    def _named(self, kind: str, tid: int, name: str) -> dict[str, Any]:
        return self._meta(kind, tid, {"name": name})

    def _meta(self, kind: str, tid: int, args: Mapping[str, Any]) -> dict[str, Any]:
        return {"ph": "M", "name": kind, "pid": self._pid, "tid": tid, "args": dict(args)}


def _title(call: TimelineCall) -> str:
    return call.label or "call"


def _figures(call: TimelineCall) -> dict[str, Any]:
    figures = {
        "call_id": call.call_id,
        "state": call.state,
        "replica": call.replica or "",
        **({"earlier_replicas": ", ".join(call.earlier_replicas)} if call.earlier_replicas else {}),
        "wait_s": call.wait_s,
        "service_s": call.service_s,
        "preemptions": call.preemptions,
        "prompt_tokens": call.prompt_tokens,
        "output_tokens": call.output_tokens,
        "cached_tokens": call.cached_tokens,
    }
    return figures if call.is_placed else {**figures, "note": "only the sums are known: the wait is drawn first"}
