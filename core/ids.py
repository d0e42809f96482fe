"""Typed ids, and the source that makes them."""

from __future__ import annotations

import random
import reprlib
from dataclasses import dataclass
from typing import Final, NewType, TypeGuard

from weft.core.errors import InvalidIdError

SessionId = NewType("SessionId", str)
ProgramId = NewType("ProgramId", str)
ThreadId = NewType("ThreadId", str)
CallId = NewType("CallId", str)
EngineId = NewType("EngineId", str)


@dataclass(frozen=True, slots=True)
class CallIdentity:
    """The ids that travel with one call, passed explicitly from the program to the engine."""

    program_id: ProgramId
    thread_id: ThreadId
    call_id: CallId
    parents: tuple[CallId, ...] = ()  # the calls that had to finish first


MAX_ID_LENGTH: Final = 256


def is_id(value: object, max_length: int = MAX_ID_LENGTH) -> TypeGuard[str]:
    """Whether `value` is a printable string of 1 to `max_length` characters."""
    return isinstance(value, str) and 0 < len(value) <= max_length and value.isprintable()


def plain_name(name: str) -> str:
    """The name as every table, metric and message can carry it: at most 256 characters, all printable.

    Names come from users' code and from frameworks, which may take any text. A longer one is cut off, and each control
    character and each half of a surrogate pair becomes a question mark.
    """
    kept = name if len(name) <= MAX_ID_LENGTH else f"{name[: MAX_ID_LENGTH - 1]}…"
    return kept if kept.isprintable() else "".join(each if each.isprintable() else "?" for each in kept)


def shown(value: object) -> str:
    """The value for an error message: at most 80 characters, whatever its size, depth and type."""
    try:
        return f"{reprlib.repr(value):.80}"
    except (ValueError, RecursionError):  # an int of more than 4,300 digits has no text
        return f"a value of type {type(value).__name__}"


def check_id(value: object, what: str) -> str:
    """Return `value` if it can travel as an id, a printable string of 1 to 256 characters. Otherwise InvalidIdError
    names `what` and shows the value."""
    if not isinstance(value, str):
        raise InvalidIdError(f"{what} must be a string, not {type(value).__name__} ({shown(value)}).")
    if not is_id(value):
        raise InvalidIdError(
            f"{what} must be 1 to {MAX_ID_LENGTH} printable characters, not {len(value)}: {value!r:.80}."
        )
    return value


class IdSource:
    """Makes ids: a readable prefix and 64 random bits in hexadecimal.

    Args:
        rng: the source of the bits. A seeded `random.Random` makes the same ids again. The default is the operating
            system's generator.

    Attributes:
        scope: what the ids begin with that came from a client of a server; see `ProgramInfo.scope`.
    """

    scope = ""

    def __init__(self, rng: random.Random | None = None) -> None:
        self._rng = rng if rng is not None else random.SystemRandom()

    def _new(self, prefix: str) -> str:
        return f"{prefix}-{self._rng.getrandbits(64):016x}"

    def session(self) -> SessionId:
        return SessionId(self._new("sess"))

    def program(self) -> ProgramId:
        return ProgramId(self._new("prog"))

    def thread(self) -> ThreadId:
        return ThreadId(self._new("thr"))

    def call(self) -> CallId:
        return CallId(self._new("call"))
