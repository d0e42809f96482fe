"""Which program a request over HTTP belongs to, by the ids that its headers and its body carry.

Agents send ids under many names. `identity_of` tries them in the order of `SOURCES`; docs/reference/program-ids.md
lists them.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, NamedTuple

from weft.core.errors import InvalidIdError
from weft.core.ids import ProgramId, SessionId, ThreadId, check_id

MOST_CHARACTERS: Final = 1024
_PLAIN: Final = re.compile(r"[A-Za-z0-9._~:@/+=-]{1,128}")
_MOST_BAGGAGE_BYTES: Final = 8192  # W3C Baggage, limits
_TRACEPARENT: Final = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(?:-.*)?")
_SESSION_OF_USER: Final = re.compile(r"_session_([0-9a-fA-F-]{36})$")  # Claude Code's older form


def foreign_id(value: object) -> str | None:
    """Return an id that another system made, or None if it is malformed.

    Up to 128 letters, digits and characters of `._~:@/+=-` stay as they are. Up to 1024 printable characters become a
    digest of 32 hexadecimal digits, so that no id gets long or strange in tables and logs.
    """
    if not isinstance(value, str) or not 0 < len(value) <= MOST_CHARACTERS or not value.isprintable():
        return None
    if _PLAIN.fullmatch(value):
        return value
    return "digest-" + hashlib.blake2b(value.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def trace_id(traceparent: str) -> str | None:
    """Return the trace's id in a W3C `traceparent`, or None if the header is malformed."""
    found = _TRACEPARENT.fullmatch(traceparent) if len(traceparent) <= MOST_CHARACTERS else None
    return found[1] if found else None


def baggage_of(header: str) -> dict[str, str]:
    """The members of a W3C `baggage` header; empty if it is longer than the 8192 bytes that W3C demands to be taken."""
    from urllib.parse import unquote

    if len(header) > _MOST_BAGGAGE_BYTES:
        return {}
    members = (member.partition(";")[0].partition("=") for member in reversed(header.split(",")))  # the first counts
    return {key.strip(): unquote(value.strip()) for key, equals, value in members if equals}


def object_in(value: object) -> Mapping[str, Any] | None:
    """Return a JSON object, which may be in a string of up to 8192 characters, or None for anything else."""
    if isinstance(value, str) and len(value) <= _MOST_BAGGAGE_BYTES:
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return None
    return value if isinstance(value, Mapping) else None


def session_of_user(user_id: object) -> object:
    """The session that Claude Code writes into Anthropic's `metadata.user_id`; None for a plain user."""
    if not isinstance(user_id, str) or len(user_id) > MOST_CHARACTERS:
        return None
    if found := _SESSION_OF_USER.search(user_id):
        return found[1]
    fields = object_in(user_id) if user_id.startswith("{") else None
    return fields.get("session_id") if fields else None


_CLIENT: Final = re.compile(r"(?:Async)?([A-Za-z][A-Za-z0-9._-]{0,31})/(?:[0-9]|([A-Za-z]{1,16}) [0-9])")
_CODING_AGENTS: Final = {  # how they call themselves in their ids
    "x-claude-code-session-id": "claude-code",
    "x-codex-turn-metadata": "codex",
}


def client_of(headers: Mapping[str, str]) -> str | None:
    """The name of the client that sent a request, such as `claude-code` or `openai-python`; None if it sends no name.

    A program is named so if nobody gives it a name. Words of prompts are not shown.
    """
    name = next((name for header, name in _CODING_AGENTS.items() if headers.get(header)), None)
    found = _CLIENT.match(headers.get("user-agent", ""))
    return name or ("-".join(part.lower() for part in found.groups() if part) if found else None)


_RETRIES: Final = re.compile(  # of OpenAI's and Anthropic's SDKs; attempts, as of AWS's SDKs and Envoy, count from one
    r"x-(?:[a-z0-9]+-)?retry-count: 0*[1-9][0-9]*|(?:x-envoy-attempt-count: |amz-sdk-request: attempt=)(?:[2-9]|1\d).*"
)
_VENDOR: Final = re.compile(r"x-(?!(?:[a-z0-9-]+-)?parent-session-id)([a-z0-9][a-z0-9-]{0,63})-session-id")
HTTPHeaders = Iterable[tuple[bytes, bytes]]


class Source(StrEnum):
    """What named the program of a request."""

    WEFT = "weft"
    CLAUDE_CODE = "claude-code"
    CODEX = "codex"
    THUNDERAGENT = "thunderagent"
    OPENCODE = "opencode"
    SESSION = "session"
    DYNAMO = "dynamo"
    AFFINITY = "affinity"
    AGENTIC_CONTEXT = "agentic-context"
    BAGGAGE = "baggage"
    CONVERSATION = "conversation"
    METADATA = "metadata"
    VENDOR = "vendor"  # any x-NAME-session-id
    GATEWAY = "gateway"  # the keys by which gateways of SGLang and AIBrix keep a session in one place
    PREVIOUS_RESPONSE = "previous-response"
    CORRELATION = "correlation"
    LINEAGE = "lineage"
    TRACE = "trace"
    NEW = "new"  # nothing: the request begins a program


@dataclass(frozen=True, slots=True, kw_only=True)
class Described:
    """What a request says in addition. Its ids are in the scope of the API key."""

    session_id: SessionId | None = None
    program_name: str | None = None
    tenant: str | None = None
    label: str | None = None  # the call's name, such as that of the agent that makes it
    ends: bool = False  # this is the program's last call
    flow: str | None = None  # what gateways share an engine fairly by: a tenant, if the key may name one


@dataclass(frozen=True, slots=True)
class Identity(Described):
    """What a request says of its program."""

    source: Source
    program_id: ProgramId
    thread_id: ThreadId | None = None
    parent_thread_id: ThreadId | None = None
    parent_program_id: ProgramId | None = None  # the program that started this one
    starter_id: ProgramId | None = None  # the session that started this one, of which it is a thread; see `Families`
    agent: int = 0  # where the client names no thread: which of the program's agents makes the call, as they came
    opening: bytes = b""  # a digest of how the first message begins, the same for agents that hand a conversation on


@dataclass(frozen=True, slots=True)
class Evidence(Described):
    """What a request carries that says less than an id: with it, lineage finds the program."""

    previous_response_id: str | None = None
    correlation_id: str | None = None  # of a session with AIPerf, of each request with others, so it only joins
    trace_id: str | None = None
    prompt_cache_key: str | None = None  # clients that share a prefix share it, so it separates programs and joins none
    is_retry: bool = False  # its client says that it sends it again
    body_bytes: int = 0  # of the request


@dataclass(frozen=True, slots=True)
class _Request:
    headers: Mapping[str, str]
    body: Mapping[str, Any]
    arguments: Mapping[str, Any]  # `vllm_xargs`


class _Ids(NamedTuple):
    """What a source says, checked by nobody yet."""

    program: object
    thread: object = None
    parent_thread: object = None
    parent_program: object = None
    starter: object = None


_Finder = Callable[[_Request], Iterator[_Ids]]


def identity_of(headers: HTTPHeaders, body: Mapping[str, Any], scope: str) -> Identity | Evidence:
    """The identity that a request carries, or what helps to find its program.

    Weft's own fields and vLLM's session are refused if they are malformed (InvalidIdError). Those of others are then
    ignored, and the next source counts. The headers' names are in lower case, as ASGI hands them over, and the first
    one of a name counts. The ids of an API key begin with its scope; see `weft.engine.http.identity.scope_of`.
    """
    arguments = body.get("vllm_xargs")
    texts = {name.decode("latin-1"): value.decode("latin-1").strip() for name, value in reversed([*headers])}
    request = _Request(texts, body, arguments if isinstance(arguments, Mapping) else {})
    name, tenant = _own(request, "program-name") or client_of(request.headers), _own(request, "tenant")
    session = _session(request)
    fields: dict[str, Any] = {
        "program_name": name,
        "tenant": tenant,
        "session_id": SessionId(f"{scope}/{session}") if session else None,
        "label": _own(request, "label"),
        "ends": _ends(request),
        "flow": foreign_id(request.headers.get("x-llm-d-inference-fairness-id")),
    }
    program = _own(request, "program-id")
    if program:
        thread, parent = _own(request, "thread-id"), _own(request, "parent-program-id")
        return Identity(
            Source.WEFT,
            ProgramId(f"{scope}/{program}"),
            thread_id=ThreadId(thread) if thread else None,
            parent_program_id=ProgramId(f"{scope}/{parent}") if parent else None,
            **fields,
        )
    for source, find in SOURCES:
        for ids in find(request):
            found, thread, parent_thread, parent, starter = map(foreign_id, ids)
            if found is not None:
                own = f"{scope}/{source}:"
                return Identity(
                    source,
                    ProgramId(own + found),
                    thread_id=ThreadId(thread) if thread else None,
                    parent_thread_id=ThreadId(parent_thread) if parent_thread else None,
                    # An agent at the root may name itself as its parent.
                    parent_program_id=ProgramId(own + parent) if parent and parent != found else None,
                    starter_id=ProgramId(own + starter) if starter and starter != found else None,
                    **fields,
                )
    return Evidence(
        previous_response_id=foreign_id(body.get("previous_response_id")),
        correlation_id=foreign_id(request.headers.get("x-correlation-id")),
        trace_id=trace_id(request.headers.get("traceparent", "")),
        prompt_cache_key=foreign_id(body.get("prompt_cache_key")),
        is_retry=any(_RETRIES.fullmatch(f"{name}: {value}") for name, value in request.headers.items()),
        **fields,
    )


def _own(request: _Request, name: str) -> str | None:
    """One of Weft's own fields: the header, or the field of `vllm_xargs`."""
    if header := request.headers.get(f"weft-{name}"):
        return check_id(header, f"weft-{name}")
    value = request.arguments.get(field := name.replace("-", "_"))
    return None if value is None else check_id(value, field)


def _session(request: _Request) -> str | None:
    if own := _own(request, "session-id"):
        return own
    if (value := request.body.get("session_id")) is not None:
        return check_id(value, "session_id")
    header = request.headers.get("x-session-id")
    return check_id(header, "X-Session-ID") if header else None


def _ends(request: _Request) -> bool:
    for name in ("weft-program-end", "x-dynamo-session-final", "x-dynamo-trajectory-final"):
        value = request.headers.get(name, "").lower()
        if name.startswith("weft-") and value not in ("", "0", "1", "true", "false"):
            raise InvalidIdError(f"{name} must be true or false, not {value!r:.80}.")
        if value in ("1", "true"):
            return True
    return request.arguments.get("program_end") in (1, True)


def _header(request: _Request, *names: str) -> str | None:
    return next((request.headers[name] for name in names if request.headers.get(name)), None)


def _claude_code(request: _Request) -> Iterator[_Ids]:
    agent, parent = (_header(request, f"x-claude-code-{name}") for name in ("agent-id", "parent-agent-id"))
    yield _Ids(_header(request, "x-claude-code-session-id"), thread=agent, parent_thread=parent)


def _codex(request: _Request) -> Iterator[_Ids]:
    thread = _header(request, "thread-id", "thread_id")
    parent = _header(request, "x-codex-parent-thread-id")
    for program in (_header(request, "session-id", "session_id"), thread):
        yield _Ids(program, thread=thread, parent_thread=parent)


def _by_header(*names: str, starters: tuple[str, ...] = ("x-parent-session-id",)) -> _Finder:
    """Finds the program in the first of some headers, and the session that started it in others."""

    def find(request: _Request) -> Iterator[_Ids]:
        yield from (_Ids(_header(request, name), starter=_header(request, *starters)) for name in names)

    return find


def _dynamo(request: _Request) -> Iterator[_Ids]:
    for kind in ("session", "trajectory"):
        names = (f"x-dynamo-parent-{kind}-id", f"x-dynamo-{kind}-parent", f"x-dynamo-{kind}-parent-id")
        yield _Ids(_header(request, f"x-dynamo-{kind}-id"), starter=_header(request, *names))


def _vendor(request: _Request) -> Iterator[_Ids]:
    for name, value in request.headers.items():
        if value and (found := _VENDOR.fullmatch(name)):
            yield _Ids(value, starter=_header(request, f"x-{found[1]}-parent-session-id", "x-parent-session-id"))


def _agentic_context(request: _Request) -> Iterator[_Ids]:
    context = object_in(request.arguments.get("agentic_context")) or {}
    for name in ("program_id", "session_id"):
        yield _Ids(context.get(name), parent_program=context.get("parent_program_id"))


def _baggage(request: _Request) -> Iterator[_Ids]:
    members = baggage_of(request.headers.get("baggage", ""))
    yield from map(_Ids, map(members.get, ("gen_ai.conversation.id", "session.id")))


def _conversation(request: _Request) -> Iterator[_Ids]:
    conversation = request.body.get("conversation")
    yield _Ids(conversation.get("id") if isinstance(conversation, Mapping) else conversation)


def _metadata(request: _Request) -> Iterator[_Ids]:
    metadata = request.body.get("metadata")
    if isinstance(metadata, Mapping):
        yield from map(_Ids, map(metadata.get, ("session_id", "conversation_id", "thread_id")))
        yield _Ids(session_of_user(metadata.get("user_id")))


SOURCES: Final[tuple[tuple[Source, _Finder], ...]] = (
    (Source.CLAUDE_CODE, _claude_code),
    (Source.CODEX, _codex),
    (Source.THUNDERAGENT, lambda request: iter([_Ids(request.body.get("program_id"))])),
    (Source.OPENCODE, _by_header("x-opencode-session")),
    (Source.SESSION, lambda request: iter([_Ids(_session(request), starter=_header(request, "x-parent-session-id"))])),
    (Source.DYNAMO, _dynamo),
    (Source.AFFINITY, _by_header("x-session-affinity")),
    (Source.AGENTIC_CONTEXT, _agentic_context),
    (Source.BAGGAGE, _baggage),
    (Source.CONVERSATION, _conversation),
    (Source.METADATA, _metadata),
    (Source.VENDOR, _vendor),
    (Source.GATEWAY, _by_header("x-smg-routing-key", "x-aibrix-session-key", starters=())),
)
