"""The wire format: the only module that reads or writes what travels between the host and vLLM's scheduler process.

- A call carries a `CallHeader` to the scheduler, in `SamplingParams.extra_args` (`vllm_xargs` of a chat request), which
  takes scalars and flat lists.
- Outputs carry a `Report` back, in `RequestOutput.kv_transfer_params`, the one field of an output that a scheduler
  plugin can fill.
- Control messages go to the scheduler on a channel of their own (`weft.engine.vllm_compat.control`).
- The scheduler's own settings reach it in `additional_config["weft"]`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final, NamedTuple

from weft.core.class_rows import Branch, ClassRow, together
from weft.core.errors import InvalidIdError, InvalidRequestError, PolicyError
from weft.core.ids import MAX_ID_LENGTH, CallId, ProgramId, SessionId, ThreadId, check_id, is_id, shown
from weft.core.kv_cache.policies import KvPolicyConfig, check_kv_policy
from weft.core.kv_cache.stats import COUNTS, KvStats, SwapStats, ToolStats
from weft.core.policies.history import ProgramEnd
from weft.core.process_table import Account, Attained, CallIdentity

ExtraArgs = dict[str, str | int | float | list[str | int | float]]

# -- to the scheduler, at its start


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """The settings of a scheduler: `additional_config["weft"]`."""

    policy: Mapping[str, Any]  # of a `PolicyConfig`
    # The scheduler serves one engine of Weft. Behind a server it must not tell one client of another one's calls.
    one_client: bool = False
    trust_clients: bool = False  # Weft's own engine is always trusted; see `decode_call`
    model: str = ""  # the name by which the engine serves the model
    kv_policy: KvPolicyConfig | None = None  # None: as the policy says


def encode_config(config: SchedulerConfig) -> dict[str, Any]:
    """The settings as `additional_config["weft"]` carries them."""
    flags = {"one_client": config.one_client, "trust_clients": config.trust_clients}
    model = {"model": config.model} if config.model else {}
    kv_policy = {"kv_policy": config.kv_policy.to_dict()} if config.kv_policy is not None else {}
    return {**config.policy, **{name: True for name, is_set in flags.items() if is_set}, **model, **kv_policy}


def decode_config(additional_config: object) -> SchedulerConfig:
    """Read vLLM's `additional_config`.

    Raises:
        PolicyError: `weft` is no mapping, one of the two flags is neither true nor false, or the model has no name.
        KvPolicyError: `kv_policy` is neither the name of a KV policy nor a mapping with a name and parameters.
    """
    config = additional_config.get("weft", {}) if isinstance(additional_config, Mapping) else {}
    if not isinstance(config, Mapping):
        raise PolicyError(f'"weft" in additional_config must be a policy, such as {{"name": "atlas"}}, not {config!r}.')
    policy = dict(config)
    flags = {name: policy.pop(name, False) for name in ("one_client", "trust_clients")}
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise PolicyError(f'"{name}" in additional_config["weft"] must be true or false, not {value!r:.80}.')
    model = policy.pop("model", "")
    if not isinstance(model, str):
        raise PolicyError(f'"model" in additional_config["weft"] must be a name, not {model!r:.80}.')
    kv_policy = check_kv_policy(policy.pop("kv_policy", None))
    return SchedulerConfig(policy, flags["one_client"], flags["one_client"] or flags["trust_clients"], model, kv_policy)


# -- to the scheduler, with a call


@dataclass(frozen=True, slots=True)
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
    ends_program: bool = False  # the program ends with this call
    fingerprint: str = ""  # of the system prompt and the tools of the program's first call
    # Where nobody sends `ProgramEvents`, a call says the same of its program.
    tool_ended: str = ""  # the tool that has run since the program's last call
    tool_started: str = ""  # the tool that begins when this call has ended
    prefetch: bool = False  # the program's next call comes soon after this one


_IDS: Final = ("program_id", "thread_id", "call_id")
_TEXTS: Final = ("program_name", "fingerprint", "tenant", "tool_ended", "tool_started")
_SECONDS: Final = ("service_s", "total_service_s", "wait_s", "total_wait_s", "time_left_s", "program_time_left_s")
_FIGURES: Final = (*_SECONDS, "program_calls")
_FLAGS: Final = ("program_end", "prefetch")
FIELDS: Final = (*_IDS, "parents", *_TEXTS, *_FIGURES, *_FLAGS)  # in the `extra_args` of a call

MAX_FIGURE: Final = 10**8  # of seconds, three years, and of calls; sums with it stay exact to less than a microsecond
SCOPE_LENGTH: Final = 33  # of what a server puts before the ids of its clients (weft.engine.server.identity)
_MAX_LENGTH: Final = MAX_ID_LENGTH + SCOPE_LENGTH


def encode_call(header: CallHeader) -> ExtraArgs:
    """The `extra_args` of a call. A value that is unknown or has its default is left out."""
    identity, attained = header.identity, header.attained
    args: ExtraArgs = {
        "program_id": identity.program_id,
        "thread_id": identity.thread_id,
        "call_id": identity.call_id,
        "parents": list(identity.parents),
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
    if header.tool_ended:
        args["tool_ended"] = header.tool_ended
    if header.tool_started:
        args["tool_started"] = header.tool_started
    if header.prefetch:
        args["prefetch"] = 1
    if header.ends_program:
        args["program_end"] = 1
    return args


def decode_call(extra_args: object, request_id: str, session_id: object, *, is_trusted: bool) -> CallHeader:
    """Read the header of a call inside the scheduler.

    Never raises, because an exception there ends the engine. Keeps no string that is longer than an id may be. A
    program id that is missing or malformed falls back to the session and then to the request, so that a request of a
    client without programs is a program of its own. A number that makes no sense counts as unknown.

    Args:
        extra_args: Whatever vLLM passes on.
        request_id: vLLM's id of the request.
        session_id: vLLM's id of the session, None if there is none.
        is_trusted: Whether the sender's figures count. They decide over the order of programs, so that a wrong figure
            can starve a program. Without trust they are unknown.
    """
    args = extra_args if isinstance(extra_args, Mapping) else {}
    figures = args if is_trusted else {}
    session = _id(session_id)
    program_id = (
        ProgramId(_id(args.get("program_id"))) or _program_of_session(session) or program_of_request(request_id)
    )
    parents = args.get("parents")
    identity = CallIdentity(
        program_id=program_id,
        thread_id=ThreadId(_id(args.get("thread_id")) or program_id),
        call_id=CallId(_id(args.get("call_id")) or request_id),
        parents=tuple(CallId(p) for p in parents if _id(p)) if isinstance(parents, list) else (),
    )
    service_s, wait_s = _seconds(figures.get("service_s")), _seconds(figures.get("wait_s"))
    return CallHeader(
        identity,
        Attained(
            service_s=service_s,
            total_service_s=max(_seconds(figures.get("total_service_s")), service_s),
            wait_s=wait_s,
            total_wait_s=max(_seconds(figures.get("total_wait_s")), wait_s),
        ),
        session_id=SessionId(session) if session else None,
        program_name=_id(args.get("program_name")),
        fingerprint=_id(args.get("fingerprint")),
        tenant=_id(args.get("tenant")) or None,
        program_calls=_calls(figures.get("program_calls")),
        time_left_s=_seconds(figures.get("time_left_s")) or math.inf,
        program_time_left_s=_time_left_s(figures.get("program_time_left_s")),
        ends_program=args.get("program_end") in (1, True),
        tool_ended=_id(args.get("tool_ended")),
        tool_started=_id(args.get("tool_started")),
        prefetch=args.get("prefetch") in (1, True),
    )


# Programs that a client does not name have names of their own. A tab separates their parts: no id has one.


def program_of_request(request_id: str) -> ProgramId:
    """The program of a request that names neither a program nor a session."""
    return ProgramId(f"request\t{request_id}")


def _program_of_session(session_id: str) -> ProgramId:
    return ProgramId(f"session\t{session_id}" if session_id else "")


def figures_of(extra_args: object) -> list[str]:
    """The names of the figures that a call carries, which only a trusted sender should send."""
    return [name for name in _FIGURES if name in extra_args] if isinstance(extra_args, Mapping) else []


def check_call(extra_args: Mapping[str, Any], session_id: object = None) -> None:
    """Check the header that a client sends, where the client can still be told of a mistake.

    Raises:
        InvalidIdError: An id, name or tenant cannot travel, or `parents` is not a list of ids.
        InvalidRequestError: A time is not a number of seconds from 0 to `MAX_FIGURE`, `program_calls` is not a number
            of calls in that range, or `program_end` or `prefetch` is not 0 or 1.
    """
    for name in (*_IDS, *_TEXTS):
        if name in extra_args:
            check_id(extra_args[name], name)
    if session_id is not None:
        check_id(session_id, "session_id")
    parents = extra_args.get("parents", [])
    if not isinstance(parents, list):
        raise InvalidIdError(f"parents must be a list of call ids, not {type(parents).__name__}.")
    for parent in parents:
        check_id(parent, "each of parents")
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


# -- back from the scheduler, with an output

_ACCOUNT: Final = "weft"
_SWAP: Final = "weft_swap"

CallAccount = dict[str, Any]  # the part of an account that only the scheduler knows


class Report(NamedTuple):
    """What an output brings from the scheduler."""

    account: CallAccount | None  # of the output's own call so far
    swap: SwapStats | None  # of the engine's swap, as of this output


_NO_REPORT: Final = Report(None, None)


def encode_account(account: Account) -> CallAccount:
    """The part of an account that only the scheduler knows."""
    return {
        "service_s": account.service_s,
        "wait_s": account.wait_s,
        "preemptions": account.preemptions,
        "swapped_tokens": account.swapped_tokens,
        "recomputed_tokens": account.recomputed_tokens,
        "fetched_tokens": account.fetched_tokens,
    }


def attach_account(params: dict[str, Any] | None, account: CallAccount) -> dict[str, Any]:
    """Add a call's account to the `kv_transfer_params` of its output."""
    params = {} if params is None else params
    params[_ACCOUNT] = account
    return params


def attach_swap(params: dict[str, Any] | None, swap: SwapStats) -> dict[str, Any]:
    """Add the swap's figures to the `kv_transfer_params` of an output."""
    params = {} if params is None else params
    params[_SWAP] = tuple(swap)
    return params


def read_report(params: Mapping[str, Any] | None) -> Report:
    """Read the `kv_transfer_params` of an output."""
    if not params:
        return _NO_REPORT
    swap = params.get(_SWAP)
    return Report(params.get(_ACCOUNT), None if swap is None else SwapStats(*swap))


# -- to the scheduler, on the control channel, and its answers


class ProgramsEnded(NamedTuple):
    """A control message: these programs have ended, or were abandoned, so that it is not known how they would end."""

    program_ids: tuple[ProgramId, ...]
    abandoned: tuple[ProgramId, ...] = ()


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


class AbortedCalls(NamedTuple):
    """A control message: these calls were aborted. The scheduler answers with their accounts."""

    call_ids: tuple[CallId, ...]


class UseHistory(NamedTuple):
    """A control message: programs that ended before the scheduler's start. It uses the first one that comes.

    What it has learned before that, from the prompts of its own start, it forgets if no program has come yet.
    """

    history: str  # `History.to_json`, of all models


class TakeLearned(NamedTuple):
    """A control message: the scheduler answers with what its policy has `Learned` since the last answer."""


class TakeKvStats(NamedTuple):
    """A control message: the scheduler answers with its `KvStats`."""


class Ping(NamedTuple):
    """A control message: the scheduler is to answer. It does so between two steps."""


Control = ProgramsEnded | ProgramEvents | AbortedCalls | UseHistory | TakeLearned | TakeKvStats


_QUESTIONS: Final[dict[str, type[TakeKvStats | TakeLearned]]] = {
    "take_kv_stats": TakeKvStats,
    "take_learned": TakeLearned,
}


def encode_control(message: Control | Ping) -> dict[str, Any]:
    """A control message as msgpack carries it."""
    if isinstance(message, ProgramsEnded):
        return {
            "type": "programs_ended",
            "program_ids": list(message.program_ids),
            "abandoned": list(message.abandoned),
        }
    if isinstance(message, ProgramEvents):
        return {"type": "program_events", "events": [[str(each.kind), *each[1:]] for each in message.events]}
    if isinstance(message, AbortedCalls):
        return {"type": "aborted_calls", "call_ids": list(message.call_ids)}
    if isinstance(message, UseHistory):
        return {"type": "use_history", "history": message.history}
    return {"type": next((name for name, kind in _QUESTIONS.items() if isinstance(message, kind)), "ping")}


def decode_control(data: object) -> Control | None:
    """Read a control message inside the scheduler; None if it is a ping or no control message. Never raises."""
    if not isinstance(data, Mapping):
        return None
    if data.get("type") == "programs_ended":
        ended, abandoned = (_strings(data.get(key)) for key in ("program_ids", "abandoned"))
        return ProgramsEnded(tuple(map(ProgramId, ended)), tuple(map(ProgramId, abandoned)))
    if data.get("type") == "program_events":
        rows = data.get("events")
        found = map(_event, rows) if isinstance(rows, list | tuple) else ()
        return ProgramEvents(tuple(each for each in found if each is not None))
    if data.get("type") == "aborted_calls":
        return AbortedCalls(tuple(CallId(each) for each in _strings(data.get("call_ids"))))
    if data.get("type") == "use_history":
        history = data.get("history")
        return UseHistory(history) if isinstance(history, str) else None
    question = _QUESTIONS.get(str(data.get("type")))
    return question() if question is not None else None


def read_aborted(answer: Mapping[str, Any] | None) -> dict[CallId, Account]:
    """Read a scheduler's answer to `AbortedCalls`: the accounts of those that it knows; the tokens are not counted.

    Args:
        answer: The answer. None: There was none, because the scheduler's process does not run.
    """
    accounts = (answer or {}).get("aborted") or {}
    return {CallId(call_id): Account(**account) for call_id, account in accounts.items()}


class Learned(NamedTuple):
    """What the policy of one scheduler has learned."""

    model: str
    classes: tuple[ClassRow, ...]  # of many classes, those with programs in progress first
    ends: tuple[ProgramEnd, ...]  # since the last answer
    has_history: bool  # the scheduler got a `UseHistory`


_MOST_CLASSES: Final = 100  # in an answer


def encode_learned(learned: Learned) -> dict[str, Any]:
    """A scheduler's answer to `TakeLearned`."""
    return {
        "model": learned.model,
        "classes": [
            [
                *(row.tenant, row.name, row.ended, row.live, row.median_tokens, row.p95_tokens),
                *(row.branch.value, row.held),
            ]
            for row in together(learned.classes)[:_MOST_CLASSES]
        ],
        "ends": [list(end) for end in learned.ends],
        "has_history": learned.has_history,
    }


def read_learned(answer: Mapping[str, Any] | None) -> Learned | None:
    """Read a scheduler's answer to `TakeLearned`.

    Args:
        answer: The answer. None: There was none, because the scheduler's process does not run.
    """
    if not answer:
        return None
    return Learned(
        answer["model"],
        tuple(
            ClassRow(tenant, name, ended, live, median_tokens, p95_tokens, Branch(branch), held)
            for tenant, name, ended, live, median_tokens, p95_tokens, branch, held in answer["classes"]
        ),
        tuple(ProgramEnd(*end) for end in answer["ends"]),
        answer["has_history"],
    )


def encode_kv_stats(stats: KvStats) -> dict[str, Any]:
    """A scheduler's answer to `TakeKvStats`."""
    counts = {name: getattr(stats, name) for name in COUNTS}
    return {"policy": stats.policy, **counts, "tools": [list(tool) for tool in stats.tools]}


def read_kv_stats(answer: Mapping[str, Any] | None) -> KvStats | None:
    """Read a scheduler's answer to `TakeKvStats`.

    Args:
        answer: The answer. None: There was none, because the scheduler's process does not run.
    """
    return KvStats(**{**answer, "tools": tuple(ToolStats(*tool) for tool in answer["tools"])}) if answer else None


def _event(row: object) -> ProgramEvent | None:
    match row:
        case [str(kind), str(program_id), str(tool), int(run), took_s] if kind in _KINDS:
            return ProgramEvent(EventKind(kind), ProgramId(program_id), tool, run, _seconds(took_s))
    return None


def _strings(values: object) -> Iterable[str]:
    return (value for value in values if isinstance(value, str)) if isinstance(values, list | tuple) else ()


def _id(value: object) -> str:
    return value if is_id(value, _MAX_LENGTH) else ""


def _seconds(value: object) -> float:
    # An int may be too large for a float. A comparison takes it, and min returns the smaller value.
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf:
        return float(min(value, MAX_FIGURE))
    return 0.0


def _time_left_s(value: object) -> float:
    """Like `_seconds`, but 0 is a time, and inf unknown."""
    is_zero = isinstance(value, int | float) and not isinstance(value, bool) and value == 0
    return 0.0 if is_zero else _seconds(value) or math.inf


def _calls(value: object) -> int:
    return min(value, MAX_FIGURE) if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0
