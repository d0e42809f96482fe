"""Messages to the scheduler that are not calls."""

from __future__ import annotations

import math
from collections.abc import Mapping
from enum import StrEnum
from typing import Any, Final, NamedTuple

from weft.core.ids import CallId, ProgramId
from weft.engine.wire.values import count, seconds, strings


class ProgramsEnded(NamedTuple):
    """A control message: these programs have ended, or were abandoned, so that it is not known how they would end."""

    program_ids: tuple[ProgramId, ...]
    abandoned: tuple[ProgramId, ...] = ()
    failed: tuple[ProgramId, ...] = ()  # of `program_ids`; a scheduler does not mind
    cancelled: tuple[ProgramId, ...] = ()  # likewise


class EventKind(StrEnum):
    """What happened in a program between two calls."""

    TOOL_STARTED = "tool_started"
    TOOL_ENDED = "tool_ended"
    PREFETCH = "prefetch"  # the program's next call comes soon


_KINDS: Final = frozenset(map(str, EventKind))


class ProgramEvent(NamedTuple):
    """An event of a program between two calls. One that is lost costs KV until a time-out, and one that comes twice
    changes nothing the second time."""

    kind: EventKind
    program_id: ProgramId
    tool: str = ""  # its name
    run: int = 0  # tells this run of a tool from others of the program
    took_s: float = 0.0  # by the host's clock, when the tool has ended


class ProgramEvents(NamedTuple):
    """A control message: events between calls, in their order."""

    events: tuple[ProgramEvent, ...]


CallKey = tuple[ProgramId, CallId]  # clients choose call ids, and two programs may choose the same


class AbortedCalls(NamedTuple):
    """A control message: these calls were aborted. The scheduler answers with their accounts."""

    calls: tuple[CallKey, ...]


class UseHistory(NamedTuple):
    """A control message: programs that ended before the scheduler's start. It uses the first one that comes.

    What it has learned before that, from the prompts of its own start, it forgets if no program has come yet.
    """

    history: str  # `History.to_json`, of all models


class TakeLearned(NamedTuple):
    """A control message: the scheduler answers with what its policy has `Learned` since the last answer."""


class TakeKvStats(NamedTuple):
    """A control message: the scheduler answers with its `KvStats`."""


class TakeScheduleStats(NamedTuple):
    """A control message: the scheduler answers with its `ScheduleStats`."""


class TakeState(NamedTuple):
    """A control message: the scheduler answers with its `SchedulerState`."""


class TakeBack(NamedTuple):
    """A control message: these calls may run on another engine. The scheduler drops those that it has not begun.

    It answers with the calls that it has dropped, which nothing more is heard of, and with the length of its queue.
    """

    calls: tuple[CallKey, ...]  # the one that has waited longest first
    most: int  # calls to drop; 0 asks for the length of the queue only
    most_cached: int = 0  # a call of which the scheduler has more prompt tokens in its KV cache stays


class SpillProgram(NamedTuple):
    """A control message: the next call of this program runs on another replica, which reads this one's host memory.

    The scheduler answers whether contexts of the program are being copied there, and if not, with the hashes of the
    program's blocks that are there, those of the context that was used last first.
    """

    program_id: ProgramId | None  # None: of each program that has no call here, because the replica leaves
    begins: bool  # the copies; otherwise it only asks


class ExchangeService(NamedTuple):
    """A control message: what tenants had on other replicas since the last one, in tokens of work.

    The scheduler answers with what they had on it.
    """

    elsewhere: Mapping[str, float]  # by tenant


class Ping(NamedTuple):
    """A control message: the scheduler is to answer. It does so between two steps."""


Question = TakeLearned | TakeKvStats | TakeScheduleStats | TakeState
Plain = UseHistory | SpillProgram | ExchangeService | Question  # they travel as their fields
Control = ProgramsEnded | ProgramEvents | AbortedCalls | TakeBack | Plain

_QUESTIONS: Final[dict[str, type[Question]]] = {
    "take_kv_stats": TakeKvStats,
    "take_learned": TakeLearned,
    "take_schedule_stats": TakeScheduleStats,
    "take_state": TakeState,
}
_NAMES: Final[dict[type[Plain | Ping], str]] = {
    UseHistory: "use_history",
    SpillProgram: "spill_program",
    ExchangeService: "exchange_service",
    Ping: "ping",
    **{kind: name for name, kind in _QUESTIONS.items()},
}


def encode_control(message: Control | Ping) -> dict[str, Any]:
    """A control message as msgpack carries it."""
    if isinstance(message, ProgramsEnded):
        return {"type": "programs_ended", **{name: list(ids) for name, ids in message._asdict().items()}}
    if isinstance(message, ProgramEvents):
        return {"type": "program_events", "events": [[str(each.kind), *each[1:]] for each in message.events]}
    if isinstance(message, AbortedCalls):
        return {"type": "aborted_calls", "calls": [list(each) for each in message.calls]}
    if isinstance(message, TakeBack):
        return {"type": "take_back", **message._asdict(), "calls": [list(each) for each in message.calls]}
    return {"type": _NAMES[type(message)], **message._asdict()}


def decode_control(data: object) -> Control | None:
    """Read a control message inside the scheduler; None if it is a ping or no control message. Never raises."""
    if not isinstance(data, Mapping):
        return None
    control: Control | None = None
    match data.get("type"):
        case "programs_ended":
            control = ProgramsEnded(*(tuple(map(ProgramId, strings(data.get(key)))) for key in ProgramsEnded._fields))
        case "program_events":
            rows = data.get("events")
            found = map(_event, rows) if isinstance(rows, list | tuple) else ()
            control = ProgramEvents(tuple(each for each in found if each is not None))
        case "aborted_calls":
            control = AbortedCalls(_call_keys(data.get("calls")))
        case "use_history":
            history = data.get("history")
            control = UseHistory(history) if isinstance(history, str) else None
        case "take_back":
            control = TakeBack(_call_keys(data.get("calls")), count(data.get("most")), count(data.get("most_cached")))
        case "spill_program":
            program_id = data.get("program_id")
            if program_id is None or isinstance(program_id, str):
                named = ProgramId(program_id) if program_id is not None else None
                control = SpillProgram(named, data.get("begins") is True)
        case "exchange_service":
            control = ExchangeService(read_service(data.get("elsewhere")))
        case str(kind) if kind in _QUESTIONS:
            control = _QUESTIONS[kind]()
    return control


def read_service(data: object) -> dict[str, float]:
    """Tokens by tenant, as an exchange and its answer have them. Never raises."""
    rows = data.items() if isinstance(data, Mapping) else ()
    return {name: each for name, each in rows if isinstance(name, str) and type(each) is float and math.isfinite(each)}


def _call_keys(calls: object) -> tuple[CallKey, ...]:
    pairs = [list(strings(each)) for each in calls] if isinstance(calls, list | tuple) else []
    return tuple((ProgramId(each[0]), CallId(each[1])) for each in pairs if len(each) == 2)


def _event(row: object) -> ProgramEvent | None:
    match row:
        case [str(kind), str(program_id), str(tool), int(run), took_s] if kind in _KINDS:
            return ProgramEvent(EventKind(kind), ProgramId(program_id), tool, run, seconds(took_s))
    return None
