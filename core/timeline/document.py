"""The timeline of one program as a document. All times are seconds from the program's start."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Final, NamedTuple

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
