"""The timeline of one program as a document. All times are seconds from the program's start."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Final, NamedTuple

FORMAT: Final = "weft.timeline"
VERSION: Final = 1


class Span(NamedTuple):
    """A piece of time; in JSON a pair."""

    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Parent:
    """A call that had to end before another one."""

    call_id: str
    is_exact: bool  # False: a guess


@dataclass(frozen=True, slots=True)
class TimelineCall:
    """A call. It is on an engine from `start_s` to `end_s`, and waits or is served within."""

    call_id: str
    lane: int  # its thread: an index into `Timeline.lanes`
    row: int  # within the lane; above 0 only if it overlaps another call of its thread
    label: str
    state: str
    replica: str | None
    earlier_replicas: tuple[str, ...]  # that it was on before: it was stolen, or they died
    parents: tuple[Parent, ...]
    is_critical: bool  # on the critical path
    start_s: float
    end_s: float | None  # None: it has not ended
    waits: tuple[Span, ...]
    services: tuple[Span, ...]
    is_placed: bool  # False: only the sums are known, and the wait is drawn before the service
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
    row: int  # rows of tools that overlap differ
    start_s: float
    end_s: float | None  # None: it still runs


@dataclass(frozen=True, slots=True)
class Gap:
    """The time between a call and the last of its parents."""

    call_id: str
    start_s: float
    end_s: float
    tools: tuple[str, ...]  # that are known to have run in it


@dataclass(frozen=True, slots=True)
class Lane:
    """A thread."""

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
    parent_program_id: str | None  # of the program inside one of whose runs it runs
    length_s: float  # until its end, or until now
    is_open: bool
    lanes: tuple[Lane, ...]  # in the order of their first calls
    calls: tuple[TimelineCall, ...]  # in the order in which they started
    tools: tuple[TimelineTool, ...]
    gaps: tuple[Gap, ...]
    critical_path: Path
    calls_left_out: int  # older ones, and those that reached no engine
    tools_left_out: int

    def to_dict(self) -> dict[str, Any]:
        """The document as values that JSON can hold, with its format and version."""
        return {"format": FORMAT, "version": VERSION, **asdict(self)}
