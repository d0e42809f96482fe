"""What a scheduler answers about its calls and about the KV of its programs, when the host process asks."""

from __future__ import annotations

from typing import Final, NamedTuple

from weft.core.ids import CallId, ProgramId

MOST_CALLS: Final = 10_000  # calls in one answer of a scheduler, and programs in it


class LiveCall(NamedTuple):
    """A call that waits or runs."""

    call_id: CallId
    program_id: ProgramId
    level: int | None  # of the policy's queue, 0 is served first; None: the policy has one queue only
    runs: bool
    service_s: float  # so far
    wait_s: float  # so far, the present wait included
    prompt_tokens: int
    output_tokens: int  # so far, of all its sequences
    place: int | None = None  # among the calls that wait here, 1 starts next; None: it runs


class ProgramKv(NamedTuple):
    """The tokens of KV that a program holds: in its calls and, if the KV policy knows them, between its calls."""

    program_id: ProgramId
    device_tokens: int
    host_tokens: int


class SchedulerState(NamedTuple):
    """The state of one scheduler between two steps."""

    running: int  # calls, all of them
    waiting: int
    kv_used: float  # share of the device's KV cache that is in use, 0 to 1
    calls: tuple[LiveCall, ...]  # the earliest `MOST_CALLS`
    programs: tuple[ProgramKv, ...]  # programs whose KV is known; at most `MOST_CALLS`, those with calls first

    @property
    def is_cut(self) -> bool:
        """Whether there are more calls than `calls` has."""
        return self.running + self.waiting > len(self.calls)
