"""The state of an engine as a document: what `GET /weft/state` answers, and what `weft top` and the web page show.

Durations are seconds; `at_s` is a time on the engine's monotonic clock.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class LiveReplica:
    """A replica, and what its scheduler does. None: the scheduler did not answer."""

    engine_id: str
    model: str
    state: str  # starting, ready, draining or down
    running: int | None  # calls
    waiting: int | None
    calls: int  # in flight, of which some may be on their way
    deaths: int
    kv_used: float | None  # share of the device's KV cache that is in use, 0 to 1
    stolen: int = 0  # calls that it has taken over from busier replicas so far


@dataclass(frozen=True, slots=True)
class LiveProgram:
    """A program that is open, or one that has ended.

    Attributes:
        program_id, name, session_id, tenant, parent_program_id: Its ids and names. The maker of the program chose them,
            and long ones are cut off: show them with care.
        state: running, waiting (for a scheduler), tool or idle; of one that has ended finished, failed, cancelled or
            abandoned.
        tools: The tools that it waits for, each name once.
        level: The best queue of its calls, 0 is served first. None: it has no call there, or the policy has one queue.
        threads: Concurrent chains of calls so far.
        calls: So far.
        calls_in_flight: Of these, those that wait or run.
        prompt_tokens, output_tokens: Of all calls so far, those in flight included.
        service_s: Time on the model executor along the longest chain of calls.
        wait_s: Time in schedulers' queues, over all calls.
        tools_s: Time between calls with none in flight.
        kv_tokens: KV on devices and in host memory. None: no scheduler knows.
        preemptions: Of its calls.
        engine_ids: The replicas that may hold its KV.
        age_s: Since its start; of one that has ended, until its end.
        due_in_s: Until it should have ended, negative when it is late. None: it may take any time.
        ended_ago_s: Since its end. None: it is open.
        place: The best place of its calls among all that wait at their replica, 1 starts next. None: none waits.
    """

    program_id: str
    name: str
    session_id: str
    tenant: str | None
    state: str
    tools: tuple[str, ...]
    level: int | None
    threads: int
    calls: int
    calls_in_flight: int
    prompt_tokens: int
    output_tokens: int
    service_s: float
    wait_s: float
    tools_s: float
    kv_tokens: int | None
    preemptions: int
    engine_ids: tuple[str, ...]
    age_s: float
    due_in_s: float | None
    parent_program_id: str | None
    ended_ago_s: float | None = None
    place: int | None = None

    @property
    def queue(self) -> str:
        """Where its calls are: the queue under a policy with several, else the place of the first one that waits."""
        if self.level is not None:
            return f"Q{self.level + 1}"
        return f"#{self.place}" if self.place is not None else ""

    @property
    def is_open(self) -> bool:
        """Whether it has not ended."""
        return self.ended_ago_s is None


@dataclass(frozen=True, slots=True)
class LiveState:
    """What an engine does now."""

    at_s: float
    model: str
    policy: str
    replicas: tuple[LiveReplica, ...]
    programs: tuple[LiveProgram, ...]  # the open ones that were used last, the earliest start first
    programs_total: int  # that are open
    ended: tuple[LiveProgram, ...]  # the newest first


def to_json(state: LiveState) -> dict[str, Any]:
    """The document as JSON carries it."""
    rows = {name: [_plain(row) for row in getattr(state, name)] for name in ("replicas", "programs", "ended")}
    return {**_plain(state), **rows}


def _plain(row: LiveState | LiveReplica | LiveProgram) -> dict[str, Any]:
    """Its fields; `asdict` would copy each of them, which takes ten times as long."""
    return {name: getattr(row, name) for name in row.__slots__}
