"""What people look at: an engine now, and the timeline of a program, as typed documents."""

from __future__ import annotations

from weft.core.show.compose import LiveRow, compose
from weft.core.show.documents import (
    MOST_CALLS,
    LiveCall,
    LiveProgram,
    LiveReplica,
    LiveState,
    ProgramKv,
    SchedulerState,
    to_json,
)
from weft.core.show.program_timeline import Gap, Lane, Path, Span, Timeline, TimelineCall, TimelineTool, timeline

__all__ = [
    "MOST_CALLS",
    "Gap",
    "Lane",
    "LiveCall",
    "LiveProgram",
    "LiveReplica",
    "LiveRow",
    "LiveState",
    "Path",
    "ProgramKv",
    "SchedulerState",
    "Span",
    "Timeline",
    "TimelineCall",
    "TimelineTool",
    "compose",
    "timeline",
    "to_json",
]
