"""The ids of a request over HTTP: where vLLM's routes carry them, which are refused, and how those of clients are told
apart.

Ids are names that clients choose, and a client may guess another's. So each id of a program, session or tenant gets a
prefix, its *scope*, which no answer, metric or span shows. Clients with different keys then never share a program.
Under vLLM's server, whose processes share nothing, the scope is a digest of the request's API key. `weft serve` draws
one for each key when it starts.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from weft.core.errors import PolicyError
from weft.core.ids import check_id
from weft.engine.wire.call_header import FIELDS, SCOPE_LENGTH, check_call, figures_of
from weft.engine.wire.scheduler_config import decode_config

Headers = list[tuple[bytes, bytes]]

SESSION_HEADER: Final = b"x-session-id"  # vLLM takes the session from it where the body names none
_SCOPED: Final = ("program_id", "session_id", "tenant", "tool_ended", "tool_started")
NO_KEY: Final = "-"


def scope_of(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """The scope of a request's ids, 32 hexadecimal digits: the same for each request with the same key.

    It is one scope for all requests without a key. Nobody can compute it without the key, or find the key from it if
    the key is random.
    """
    for name, value in headers:
        if name == b"authorization":  # the first one, as in vLLM's authentication
            scheme, _, key = value.partition(b" ")
            digest = hashlib.blake2b(scheme.lower() + b" " + key, digest_size=(SCOPE_LENGTH - 1) // 2)
            return digest.hexdigest()
    return NO_KEY


def scope_headers(headers: Headers, scope: str) -> Headers:
    """The headers of a request, with the session's id in its scope. A malformed one raises InvalidIdError."""
    if not any(name == SESSION_HEADER for name, _value in headers):
        return headers
    return [
        (name, _scoped(value.decode("latin-1"), "X-Session-ID", scope).encode("latin-1"))
        if name == SESSION_HEADER and value
        else (name, value)
        for name, value in headers
    ]


def without_scope(value: object, scope: str) -> Any:
    """What an error says, a text or an object of texts, with ids as the client knows them."""
    if isinstance(value, dict):
        return {name: without_scope(each, scope) for name, each in value.items()}
    return re.sub(rf"(?<![^\s'\"(]){re.escape(scope)}/", "", value) if isinstance(value, str) else value


def figures_of_request(request: Mapping[str, Any]) -> list[str]:
    """The names of the figures in a JSON request, which only a trusted client should send."""
    return [name for arguments in _arguments_of(request) for name in figures_of(arguments)]


CHANGED: Final = ("session_id", "vllm_xargs", "sampling_params")  # the members of a request that hold ids


def scope_request(request: dict[str, Any], scope: str) -> bool:
    """Check the ids and figures of a JSON request, and put its ids into their scope. Returns whether the request has
    changed. Raises InvalidIdError or InvalidRequestError if an id or another field is malformed."""
    has_changed = _scope_ids(request, ("session_id",), scope)
    for arguments in _arguments_of(request):
        has_changed |= _scope_ids(arguments, _SCOPED, scope)
        check_call({name: value for name, value in arguments.items() if name not in _SCOPED})
    return has_changed


def fields_of_form(arguments: str) -> list[str]:
    """The fields of Weft in the value of a form's `vllm_xargs`."""
    try:
        found = json.loads(arguments)
    except (ValueError, RecursionError):
        return []  # the server refuses it itself
    return [name for name in (*FIELDS, "session_id") if name in found] if isinstance(found, dict) else []


def server_takes_figures(app: object) -> bool:
    """Whether the scheduler behind vLLM's server trusts clients. True if that is unknown: the scheduler decides anyway.

    Args:
        app: The server's application, which has the server's options in `state.args`.
    """
    options = getattr(getattr(app, "state", None), "args", None)
    config = getattr(options, "additional_config", None)
    if not isinstance(config, Mapping):
        return True
    try:
        return decode_config(config).trust_clients
    except PolicyError:  # the scheduler does not start
        return False


def _arguments_of(request: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """What becomes the `extra_args` of the request's calls."""
    sampling_params = request.get("sampling_params")  # of /inference/v1/generate
    extra_args = sampling_params.get("extra_args") if isinstance(sampling_params, dict) else None
    for arguments in (request.get("vllm_xargs"), extra_args):
        if isinstance(arguments, dict):
            yield arguments


def _scope_ids(fields: dict[str, Any], names: Iterable[str], scope: str) -> bool:
    found = {name: _scoped(fields[name], name, scope) for name in names if fields.get(name) is not None}
    fields.update(found)
    return bool(found)


def _scoped(value: object, name: str, scope: str) -> str:
    return f"{scope}/{check_id(value, name)}"
