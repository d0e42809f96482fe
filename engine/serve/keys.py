"""The API keys of a server: who may use it, for which tenant, and within which limits."""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import stat
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

from fastapi import Depends
from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError
from starlette.requests import HTTPConnection

from weft.core.errors import InvalidIdError, KeyFileError
from weft.core.ids import check_id
from weft.core.log import get_logger
from weft.core.routing.admission import Refused
from weft.engine.http.check_ids import App, Receive, Scope, Send
from weft.engine.http.http_errors import path_of, refuse
from weft.engine.http.identity import NO_KEY
from weft.engine.watch.page import PATHS
from weft.engine.wire.call_header import SCOPE_LENGTH

_MOST_BYTES: Final = 16 << 20
_EXAMPLE: Final = "docs/how-to/api-keys.md shows such a file."


@dataclass(frozen=True, slots=True)
class ApiKey:
    """Who sends a request. It holds nothing secret.

    Attributes:
        scope: What the ids of its programs and sessions begin with. It differs from key to key, and tells nothing about
            the key.
        tenant: The tenant for whom its programs run, which several keys may share. With None the client may name one.
        weight: The weight of the tenant's share under the policy `fair`.
        is_trusted: Whether the figures and the tenants that the client sends are believed.
        max_calls: How many calls it may have in flight; None allows as many as the server takes.
        max_programs: How many programs it may have open; None allows as many as the server keeps.
        max_body_bytes: The largest body of a request; None sets the server's limit.
    """

    scope: str
    tenant: str | None = None
    weight: float = 1.0
    is_trusted: bool = False
    max_calls: int | None = None
    max_programs: int | None = None
    max_body_bytes: int | None = None


class KeyRing:
    """The keys that a server takes.

    Args:
        keys: The keys by their secrets. Without any, everybody is served, and all are one client, whatever key they
            send. The SDKs of OpenAI and Anthropic must send one, and a user without a key wants to see their programs.
    """

    def __init__(self, keys: Mapping[str, ApiKey]) -> None:
        self._pepper = secrets.token_bytes(32)  # with it nobody learns from the time of a look-up which digests exist
        self._keys = {self._digest(secret.encode()): key for secret, key in keys.items()}

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[ApiKey]:
        return iter(self._keys.values())

    @property
    def tenants(self) -> frozenset[str]:
        return frozenset(key.tenant for key in self if key.tenant is not None)

    @property
    def weights(self) -> dict[str, float]:
        """The weights of the tenants that have one, for the policy `fair`."""
        return {key.tenant: key.weight for key in self if key.tenant is not None and key.weight != 1.0}

    def find(self, headers: Iterable[tuple[bytes, bytes]]) -> ApiKey | None:
        """Return the key of a request, or None for an unknown one. The time does not tell how much of it is right."""
        if not self._keys:
            return ApiKey(NO_KEY)
        secret = _secret_of(headers)
        return self._keys.get(self._digest(secret)) if secret is not None else None

    def _digest(self, secret: bytes) -> bytes:
        return hashlib.blake2b(secret, key=self._pepper).digest()


def _secret_of(headers: Iterable[tuple[bytes, bytes]]) -> bytes | None:
    """The key that a request carries: as OpenAI's clients send it, or else as Anthropic's do. The first one counts."""
    found: dict[bytes, bytes] = {}
    for name, value in headers:
        found.setdefault(name, value)
    scheme, _, token = found.get(b"authorization", b"").partition(b" ")
    return token.strip() if scheme.lower() == b"bearer" else found.get(b"x-api-key")


class _Entry(BaseModel):
    """A key in the file."""

    model_config = ConfigDict(extra="forbid", strict=True, hide_input_in_errors=True)

    key: SecretStr
    tenant: str | None = None
    weight: Annotated[float, Field(ge=1e-6, le=1e6)] | None = None
    trusted: bool = False
    max_calls: Annotated[int, Field(ge=1)] | None = None
    max_programs: Annotated[int, Field(ge=1)] | None = None
    max_body_bytes: Annotated[int, Field(ge=1)] | None = None


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, hide_input_in_errors=True)

    key: Annotated[list[_Entry], Field(min_length=1)]


def make_key_ring(plain: Sequence[str] = (), file: str | os.PathLike[str] | None = None) -> KeyRing:
    """The keys of vLLM's `--api-key`, which have defaults for all else, and those of a file. Raises KeyFileError if
    it cannot be read, makes no sense, or has a key twice."""
    entries = [_Entry(key=SecretStr(secret)) for secret in dict.fromkeys(plain)]
    if file is not None:
        entries += _read(Path(file))
    weights = _weights(entries)
    keys: dict[str, ApiKey] = {}
    for number, entry in enumerate(entries, 1):
        secret, tenant = entry.key.get_secret_value(), entry.tenant or f"key-{number}"
        if not (secret.isascii() and secret.isprintable() and secret and " " not in secret):
            raise KeyFileError(f"API key {number} is empty, or has characters that no header carries. Use plain ASCII.")
        if secret in keys:
            raise KeyFileError(f"API key {number} was given before. Leave one of them out.")
        try:
            check_id(tenant, "tenant")
        except InvalidIdError as error:
            raise KeyFileError(f"API key {number}: {error}") from error
        keys[secret] = ApiKey(
            scope=secrets.token_hex((SCOPE_LENGTH - 1) // 2),
            tenant=tenant,
            weight=weights.get(tenant, 1.0),
            is_trusted=entry.trusted,
            max_calls=entry.max_calls,
            max_programs=entry.max_programs,
            max_body_bytes=entry.max_body_bytes,
        )
    return KeyRing(keys)


def _weights(entries: Iterable[_Entry]) -> dict[str, float]:
    """By tenant. Of several keys of a tenant one is enough to name its weight."""
    weights: dict[str, float] = {}
    for entry in entries:
        if entry.weight is None:
            continue
        if entry.tenant is None:
            raise KeyFileError("a key has a weight and no tenant. Name the tenant whose share it is.")
        if weights.setdefault(entry.tenant, entry.weight) != entry.weight:
            raise KeyFileError(
                f"the tenant {entry.tenant!r:.60} has the weights {weights[entry.tenant]:g} and {entry.weight:g}. "
                "Give it one."
            )
    return weights


def _read(path: Path) -> list[_Entry]:
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            data = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise KeyFileError(f"the API keys in {path} cannot be read: {error.strerror or error}. {_EXAMPLE}") from error
    if len(data) > _MOST_BYTES:
        raise KeyFileError(f"{path} has more than {_MOST_BYTES >> 20} MiB. Is it the file of API keys?")
    if mode & (stat.S_IRGRP | stat.S_IROTH):
        get_logger().warning(
            f"other users of this machine may read the API keys in {path}: run chmod 600 {path}", mode=oct(mode & 0o777)
        )
    try:
        found = tomllib.loads(data.decode())
    except (ValueError, RecursionError) as error:
        # tomllib names the place; it quotes a character at most, never a key
        raise KeyFileError(f"{path} is not TOML in UTF-8 ({type(error).__name__}{_place(error)}). {_EXAMPLE}") from None
    try:
        return _File.model_validate(found).key
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        place = ".".join(str(part + 1 if isinstance(part, int) else part) for part in first["loc"])
        raise KeyFileError(f"{path}: {place}: {first['msg']}. {_EXAMPLE}") from None


def _place(error: Exception) -> str:
    """Where TOML is broken. The error's own text may quote what is there."""
    found = re.search(r"\(at (line \d+, column \d+|end of document)\)", str(error))
    return f", {found[1]}" if found else ""


# Served without a key. Probes and Prometheus send none, as under vLLM's server, and a browser cannot send one with a
# page's address. Nothing here may show what a client sent, or take a body: `shown_to_strangers` is all of the metrics.
OPEN_PATHS: Final = frozenset({"/health", "/ping", "/metrics", "/metrics/"}) | PATHS
_KEY: Final = "weft.key"
_MISSING: Final = "this server needs an API key: send `Authorization: Bearer KEY` or `x-api-key: KEY`."
_WRONG: Final = "this is no API key of this server. Compare the key with its operator's."


class Authenticate:
    """Lets requests with a key pass, and those to `OPEN_PATHS`.

    Args:
        root_path: What a proxy in front of the server puts before each path, as FastAPI takes it.
    """

    def __init__(self, app: App, keys: KeyRing, root_path: str = "", *, on_refused: Callable[[Refused], None]) -> None:
        self._app = app
        self._keys = keys
        self._root_path = root_path
        self._on_refused = on_refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        if self._root_path:
            scope = {**scope, "root_path": self._root_path}
        key = self._keys.find(scope["headers"])
        if key is None and not _is_open(scope):
            has_key = any(name in (b"authorization", b"x-api-key") for name, _value in scope["headers"])
            self._on_refused(Refused.WRONG_API_KEY if has_key else Refused.NO_API_KEY)
            message, code = (_WRONG, "invalid_api_key") if has_key else (_MISSING, "missing_api_key")
            await refuse(scope, send, 401, message, code, (b"www-authenticate", b"Bearer"))
            return
        await self._app({**scope, _KEY: key}, receive, send)


def key_of(scope: Scope) -> ApiKey | None:
    """Return the key of a request that passed `Authenticate`. A request for an open path may have none."""
    key = scope[_KEY]
    return key if isinstance(key, ApiKey) else None


def _key_of_request(connection: HTTPConnection) -> ApiKey:
    key = key_of(connection.scope)
    assert key is not None, "a route of OPEN_PATHS knows no key"  # noqa: S101  a mistake in the code
    return key


RequestKey = Annotated[ApiKey, Depends(_key_of_request)]


def _is_open(scope: Scope) -> bool:
    if scope["type"] != "http":
        return False
    if scope["method"] == "OPTIONS":  # a browser asks before it sends a key, and vLLM's application answers
        return any(name == b"access-control-request-method" for name, _value in scope["headers"])
    return scope["method"] in ("GET", "HEAD") and path_of(scope) in OPEN_PATHS
