"""What a call carries to the scheduler."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Final

from weft.core.accounts import Attained
from weft.core.errors import InvalidIdError, InvalidRequestError
from weft.core.ids import MAX_ID_LENGTH, CallId, ProgramId, SessionId, ThreadId, check_id, is_id, shown
from weft.core.process_rows import CallIdentity
from weft.core.program.reports import MOST_PARENTS_SENT
from weft.engine.wire.values import MAX_FIGURE, count, seconds, seconds_or_inf, strings

ExtraArgs = dict[str, str | int | float]


@dataclass(slots=True)  # not frozen, which would cost a third of the time that reading a header takes
class CallHeader:
    """What a scheduler is told of a call."""

    identity: CallIdentity
    attained: Attained = field(default_factory=Attained)  # of the program, as of the call's arrival
    session_id: SessionId | None = None  # travels as vLLM's own `session_id`, not in `extra_args`
    program_name: str = ""
    tenant: str | None = None
    program_calls: int = 0  # of the program so far, on all engines, this one included; 0 if unknown
    time_left_s: float = math.inf  # until the call's deadline
    program_time_left_s: float = math.inf  # until the program should have ended; 0 if that time has passed
    waited_s: float = 0.0  # that the call has waited before this engine got it
    ends_program: bool = False  # the program ends with this call
    fingerprint: str = ""  # of the system prompt and the tools of the program's first call
    # Where nobody sends `ProgramEvents`, a call says the same of its program.
    tool_ended: str = ""  # the tool that has run since the program's last call
    tool_started: str = ""  # the tool that begins when this call has ended
    prefetch: bool = False  # the program's next call comes soon after this one


_IDS: Final = ("program_id", "thread_id", "call_id")
_TEXTS: Final = ("program_name", "fingerprint", "tenant", "tool_ended", "tool_started")
_ATTAINED: Final = ("service_s", "total_service_s", "wait_s", "total_wait_s")
_SECONDS: Final = (*_ATTAINED, "time_left_s", "program_time_left_s", "waited_s")
_FIGURES: Final = (*_SECONDS, "program_calls")
_FLAGS: Final = ("program_end", "prefetch")
FIELDS: Final = (*_IDS, "parents", *_TEXTS, *_FIGURES, *_FLAGS)  # in the `extra_args` of a call

# What only `weft serve` reads, from its own client: the call's name, and the tools that ran before it.
SHOWN: Final = ("label", "tools")
MOST_TOOLS: Final = 64

SCOPE_LENGTH: Final = 33  # of what a server puts before the ids of its clients (weft.engine.http.identity)
_MAX_LENGTH: Final = MAX_ID_LENGTH + SCOPE_LENGTH
_SHORTEST_S: Final = 0.001  # until a deadline: 0 would say that there is none


def encode_call(header: CallHeader) -> ExtraArgs:
    """The `extra_args` of a call: what a scheduler reads. A value that is unknown or has its default is left out.

    The thread and the parents stay with the host, which alone draws the graph.
    """
    identity, attained = header.identity, header.attained
    args: ExtraArgs = {
        "program_id": identity.program_id,
        "call_id": identity.call_id,
        "service_s": attained.service_s,
        "total_service_s": attained.total_service_s,
        "wait_s": attained.wait_s,
        "total_wait_s": attained.total_wait_s,
    }
    if header.program_name:
        args["program_name"] = header.program_name
    if header.fingerprint:
        args["fingerprint"] = header.fingerprint
    if header.tenant is not None:
        args["tenant"] = header.tenant
    if header.program_calls:
        args["program_calls"] = header.program_calls
    if header.time_left_s < math.inf:
        args["time_left_s"] = header.time_left_s
    if header.program_time_left_s < math.inf:
        args["program_time_left_s"] = max(0.0, header.program_time_left_s)
    if header.waited_s:
        args["waited_s"] = header.waited_s
    if header.tool_ended:
        args["tool_ended"] = header.tool_ended
    if header.tool_started:
        args["tool_started"] = header.tool_started
    if header.prefetch:
        args["prefetch"] = 1
    if header.ends_program:
        args["program_end"] = 1
    return args


def sent_later(args: Mapping[str, Any], later_s: float) -> dict[str, Any]:
    """The `extra_args` of a call that reaches a scheduler some seconds after they were made.

    These seconds are a wait, and deadlines are so much nearer.
    """
    later: dict[str, Any] = {**args, "waited_s": args.get("waited_s", 0.0) + later_s}
    if "time_left_s" in args:
        later["time_left_s"] = max(_SHORTEST_S, args["time_left_s"] - later_s)
    if "program_time_left_s" in args:
        later["program_time_left_s"] = max(0.0, args["program_time_left_s"] - later_s)
    return later


def decode_call(extra_args: object, request_id: str, session_id: object, *, is_trusted: bool) -> CallHeader:
    """Read the header of a call inside the scheduler.

    Never raises, because an exception there ends the engine. Keeps no string that is longer than an id may be. A
    program id that is missing or malformed falls back to the session and then to the request, so that a request of a
    client without programs is a program of its own. A number that makes no sense counts as unknown.

    Args:
        is_trusted: Whether the sender's figures count. They decide over the order of programs, so that a wrong figure
            can starve a program. Without trust they are unknown.
    """
    args = extra_args if isinstance(extra_args, Mapping) else {}
    figures = args if is_trusted else {}
    session = wire_id(session_id)
    program_id, call_id = decode_key(args, request_id, session)
    parents = islice(strings(args["parents"]), MOST_PARENTS_SENT) if "parents" in args else ()
    identity = CallIdentity(
        program_id=program_id,
        thread_id=ThreadId(wire_id(args.get("thread_id")) or program_id),
        call_id=call_id,
        parents=tuple(CallId(each) for each in parents if wire_id(each)) if parents else (),
    )
    service_s, wait_s = seconds(figures.get("service_s")), seconds(figures.get("wait_s"))
    return CallHeader(
        identity,
        Attained(
            service_s=service_s,
            total_service_s=max(seconds(figures.get("total_service_s")), service_s),
            wait_s=wait_s,
            total_wait_s=max(seconds(figures.get("total_wait_s")), wait_s),
        ),
        session_id=SessionId(session) if session else None,
        program_name=wire_id(args.get("program_name")),
        fingerprint=wire_id(args.get("fingerprint")),
        tenant=wire_id(args.get("tenant")) or None,
        program_calls=count(figures.get("program_calls")),
        time_left_s=seconds(figures.get("time_left_s")) or math.inf,
        program_time_left_s=seconds_or_inf(figures.get("program_time_left_s")),
        waited_s=seconds(figures.get("waited_s")),
        ends_program=args.get("program_end") in (1, True),
        tool_ended=wire_id(args.get("tool_ended")),
        tool_started=wire_id(args.get("tool_started")),
        prefetch=args.get("prefetch") in (1, True),
    )


def decode_key(extra_args: object, request_id: str, session_id: object) -> tuple[ProgramId, CallId]:
    """Read a call's program and its own id, as `decode_call` does, which reads more and takes longer."""
    args, session = extra_args if isinstance(extra_args, Mapping) else {}, wire_id(session_id)
    named = wire_id(args.get("program_id")) or (f"session\t{session}" if session else "")
    return ProgramId(named) or program_of_request(request_id), CallId(wire_id(args.get("call_id")) or request_id)


# Programs that a client does not name have names of their own. A tab separates their parts: no id has one.


def program_of_request(request_id: str) -> ProgramId:
    """The program of a request that names neither a program nor a session."""
    return ProgramId(f"request\t{request_id}")


def figures_of(extra_args: object) -> list[str]:
    """The names of the figures that a call carries, which only a trusted sender should send."""
    return [name for name in _FIGURES if name in extra_args] if isinstance(extra_args, Mapping) else []


def check_call(extra_args: Mapping[str, Any], session_id: object = None) -> None:
    """Check the header that a client sends, where the client can still be told of a mistake.

    Raises:
        InvalidIdError: An id, name or tenant cannot travel, or `parents` is not a list of at most 64 ids.
        InvalidRequestError: A time is not a number of seconds from 0 to `MAX_FIGURE`, `program_calls` is not a number
            of calls in that range, or `program_end` or `prefetch` is not 0 or 1.
    """
    for name in (*_IDS, *_TEXTS):
        if name in extra_args:
            check_id(extra_args[name], name)
    if session_id is not None:
        check_id(session_id, "session_id")
    _check_list(extra_args, "parents", "call ids", MOST_PARENTS_SENT)
    for name in _SECONDS:
        value = extra_args.get(name, 0.0)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MAX_FIGURE:
            raise InvalidRequestError(f"{name} must be a number of seconds from 0 to {MAX_FIGURE}, not {shown(value)}.")
    calls = extra_args.get("program_calls", 0)
    if isinstance(calls, bool) or not isinstance(calls, int) or not 0 <= calls <= MAX_FIGURE:
        raise InvalidRequestError(
            f"program_calls must be a number of calls from 0 to {MAX_FIGURE}, not {shown(calls)}."
        )
    for name, meaning in (
        ("program_end", "on a program's last call"),
        ("prefetch", "if the next call comes soon after this one"),
    ):
        if (flag := extra_args.get(name, 0)) not in (0, 1):
            raise InvalidRequestError(f"{name} must be 1 {meaning}, not {shown(flag)}.")


def check_shown(extra_args: Mapping[str, Any]) -> None:
    """Raise InvalidIdError unless what a client sends for `weft serve` to show is a name, and a list of at most 64
    names."""
    if extra_args.get("label") is not None:
        check_id(extra_args["label"], "label")
    _check_list(extra_args, "tools", "names", MOST_TOOLS)


def refuse_priority(priority: object) -> None:
    """Raise InvalidRequestError for a priority, unless it is 0 or None. vLLM documents an error for a priority where no
    priority scheduling runs, and then ignores it."""
    if priority and priority != "0":
        raise InvalidRequestError(
            f"the request has the priority {priority!r:.40}, which has no effect here: the policy ranks calls "
            "by their programs. Leave out priority and x-vllm-priority; a tenant's weight gives a larger share."
        )


def _check_list(extra_args: Mapping[str, Any], name: str, what: str, most: int) -> None:
    values = extra_args.get(name, [])
    if not isinstance(values, list):
        raise InvalidIdError(f"{name} must be a list of {what}, not {type(values).__name__}.")
    if len(values) > most:
        raise InvalidIdError(f"{name} must have at most {most} {what}, not {len(values)}. Send the newest ones.")
    for value in values:
        check_id(value, f"each of {name}")


def wire_id(value: object) -> str:
    """An id, or nothing if the value is none. It may have a server's scope in front."""
    return value if value and is_id(value, _MAX_LENGTH) else ""
