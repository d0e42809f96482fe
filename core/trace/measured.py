"""What an engine measured of a recorded call: the key `measured` of a trace."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any, Final

from weft.core.accounts import MOST_WAITS
from weft.core.errors import TraceError
from weft.core.program.graph import CallNode, CallState
from weft.core.trace.fields import object_of, seconds, text, whole


@dataclass(frozen=True, slots=True)
class Measured:
    """What an engine measured of a call that was recorded. Times are seconds from the program's arrival."""

    thread: str  # its thread: all calls of a thread have the same text
    arrival_s: float
    end_s: float  # not before the arrival
    service_s: float = 0.0
    wait_s: float = 0.0
    preemptions: int = 0
    cached_tokens: int = 0
    label: str = ""
    engine: str = ""  # the replica
    state: str = CallState.FINISHED
    waits: tuple[tuple[float, float], ...] = ()  # as in `Account.waits`


def measured_of(node: CallNode, threads: dict[str, str], start_s: float) -> Measured | None:
    """What was measured of a call that has left; None if it has not.

    Args:
        threads: the numbers of the program's threads so far. The call's thread is added to it.
        start_s: when the program arrived, in seconds of the engine's clock.
    """
    if node.arrival_s is None or node.completion_s is None:
        return None
    account = node.account
    return Measured(
        thread=threads.setdefault(node.thread_id, str(len(threads))),  # the ids are long
        arrival_s=max(0.0, node.arrival_s - start_s),
        end_s=max(0.0, node.completion_s - start_s),
        service_s=account.service_s,
        wait_s=account.wait_s,
        preemptions=account.preemptions,
        cached_tokens=account.cached_tokens,
        label=node.label,
        engine=node.engine_id or "",
        state=str(node.state),
        waits=account.waits,
    )


_KEYS: Final = tuple(each.name for each in fields(Measured))
_DEFAULTS: Final = {each.name: each.default for each in fields(Measured)}


def read_measured(row: object, where: str) -> Measured:
    """Read the key `measured` of a call, or raise TraceError with a message that begins with `where`."""
    where = f"{where}, measured"
    data = object_of(row, where, _KEYS)
    state = text(data, "state", where) or CallState.FINISHED
    if state not in tuple(CallState):
        raise TraceError(f"{where}: state is {state!r:.40}; give one of {', '.join(CallState)}.")
    arrival_s, end_s = seconds(data, "arrival_s", where), seconds(data, "end_s", where)
    if end_s < arrival_s:
        raise TraceError(f"{where}: end_s is {end_s:g}, before arrival_s, {arrival_s:g}; give a later time.")
    return Measured(
        thread=text(data, "thread", where, required=True) or "",
        arrival_s=arrival_s,
        end_s=end_s,
        service_s=seconds(data, "service_s", where),
        wait_s=seconds(data, "wait_s", where),
        preemptions=whole(data, "preemptions", where),
        cached_tokens=whole(data, "cached_tokens", where),
        label=text(data, "label", where, empty=True) or "",
        engine=text(data, "engine", where, empty=True) or "",
        state=state,
        waits=_waits(data.get("waits", []), where),
    )


def dump_measured(measured: Measured) -> dict[str, Any]:
    """The value of the key `measured`. Keys that have their default value are left out."""
    return {name: value for name, value in asdict(measured).items() if value != _DEFAULTS[name]}


def _waits(rows: object, where: str) -> tuple[tuple[float, float], ...]:
    if not isinstance(rows, list) or len(rows) > MOST_WAITS:
        raise TraceError(f"{where}: waits is {rows!r:.40}; give a list of at most {MOST_WAITS} waits.")
    for row in rows:
        if not isinstance(row, list) or len(row) != 2:
            raise TraceError(f"{where}: a wait is {row!r:.40}; give its start and its length in seconds.")
    pairs = [{"start": row[0], "length": row[1]} for row in rows]
    return tuple(
        (seconds(pair, "start", f"{where}, waits"), seconds(pair, "length", f"{where}, waits")) for pair in pairs
    )
