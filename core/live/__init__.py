"""What an engine does now, as typed documents: for `weft top`, the web page, metrics and clients over HTTP."""

from weft.core.live.compose import LiveRow, compose
from weft.core.live.documents import LiveProgram, LiveReplica, LiveState, to_json
from weft.core.live.schedulers import MOST_CALLS, LiveCall, ProgramKv, SchedulerState

__all__ = [
    "MOST_CALLS",
    "LiveCall",
    "LiveProgram",
    "LiveReplica",
    "LiveRow",
    "LiveState",
    "ProgramKv",
    "SchedulerState",
    "compose",
    "to_json",
]
