"""Ids that strangers send: which are taken as they are, which by their digest, and which are ignored."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

MOST_CHARACTERS: Final = 1024
_PLAIN: Final = re.compile(r"[A-Za-z0-9._~:@/+=-]{1,128}")
_MOST_BAGGAGE_BYTES: Final = 8192  # W3C Baggage, limits
_TRACEPARENT: Final = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(?:-.*)?")
_SESSION_OF_USER: Final = re.compile(r"_session_([0-9a-fA-F-]{36})$")  # Claude Code's older form


class Found(NamedTuple):
    """A value of a request, and the name of what carried it."""

    name: str
    value: object


def foreign_id(value: object) -> str | None:
    """An id that another system made. None: it is malformed.

    Up to 128 letters, digits and characters of `._~:@/+=-` stay as they are. Up to 1024 printable characters become a
    digest of 32 hexadecimal digits, so that no id gets long or strange in tables and logs.
    """
    if not isinstance(value, str) or not 0 < len(value) <= MOST_CHARACTERS or not value.isprintable():
        return None
    if _PLAIN.fullmatch(value):
        return value
    return "digest-" + hashlib.blake2b(value.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def trace_id(traceparent: str) -> str | None:
    """The trace's id in a W3C `traceparent`. None: the header is malformed."""
    found = _TRACEPARENT.fullmatch(traceparent) if len(traceparent) <= MOST_CHARACTERS else None
    return found[1] if found else None


def baggage_of(header: str) -> dict[str, str]:
    """The members of a W3C `baggage` header; empty if it is longer than the 8192 bytes that W3C demands to be taken."""
    from urllib.parse import unquote

    if len(header) > _MOST_BAGGAGE_BYTES:
        return {}
    members: dict[str, str] = {}
    for member in header.split(","):
        key, equals, value = member.partition(";")[0].partition("=")
        if equals:
            members.setdefault(key.strip(), unquote(value.strip()))
    return members


def object_in(value: object) -> Mapping[str, Any] | None:
    """A JSON object, or one in a string. None: it is neither, or longer than 8192 characters."""
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
