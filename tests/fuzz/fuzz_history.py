"""Any bytes in a history file are a history, or a `HistoryError` with a short message."""

from __future__ import annotations

import json
from typing import Any, Final

from values import ByteReader, value

from weft.core.errors import HistoryError
from weft.core.ids import CallId, ProgramId, ThreadId
from weft.core.policies.history import History, ProgramEnd
from weft.core.prediction import Cost
from weft.core.process_rows import CallIdentity

_CHANGES: Final = b"\x00\x00"  # before the bytes that change a good history


def one_input(data: bytes) -> None:
    """Read a history. One that was read is the same after it is written again."""
    if data.startswith(_CHANGES):
        data = changed(data[len(_CHANGES) :])
    try:
        found = History.from_json(data)
    except HistoryError as error:
        found, message = None, str(error)
    if found is None:
        assert len(message) < 1000
        return
    text = found.to_json()
    assert History.from_json(text.encode()).to_json() == text


def good() -> dict[str, Any]:
    """A history with each member that a file may have."""
    history = History()
    for number in range(3):
        history["model"].add(ProgramEnd("t", "chat", 100 + number, is_known=number < 2))
        identity = CallIdentity(ProgramId(f"p{number}"), ThreadId("t"), CallId(f"c{number}"))
        history.graphs.arrive("chat", identity, now_s=0.0)
        history.graphs.leave(identity.program_id, identity.call_id, Cost(1.0, 9, 3), 1.0)
        history.graphs.end(identity.program_id)
    found: dict[str, Any] = json.loads(history.to_json())
    return found


def changed(data: bytes) -> bytes:
    """A good history with other values at places that the bytes choose."""
    reader, whole = ByteReader(data), good()
    while not reader.is_at_end:
        at: Any = whole
        for _ in range(reader.byte() % 12):
            inner = at[_place(reader, at)]
            if not isinstance(inner, dict | list) or not inner:
                break
            at = inner
        if at:
            at[_place(reader, at)] = value(reader, ("", "chat", "\ud800"))
    try:
        return json.dumps(whole).encode()
    except (ValueError, RecursionError):  # a number or a depth that Python does not write
        return b"[" * 100_000


def _place(reader: ByteReader, at: Any) -> Any:
    places = list(at) if isinstance(at, dict) else range(len(at))
    return places[reader.byte() % len(places)]


def seeds() -> list[bytes]:
    """A good history, ends of it, and odd numbers and texts in the place of each of its values."""
    whole = json.dumps(good())
    texts = [whole, *(whole[:length] for length in range(0, len(whole), 40))]
    for odd in (
        f"1{'0' * 400}",
        f"-1{'0' * 400}",
        "1e400",
        "NaN",
        "-Infinity",
        '"\\ud800"',
        "null",
        "true",
        "[]",
        "{}",
    ):
        for member in ("ended", "weight", "name", "finished", "nodes", "version", "models", "names", "graphs"):
            head, colon, tail = whole.rpartition(f'"{member}": ')
            end = min(place for place in map(tail.find, ",}]") if place >= 0)
            texts.append(f"{head}{colon}{odd}{tail[end:]}")
    deep = "[" * 900 + "]" * 900
    texts += [whole.replace(json.dumps(each), deep) for each in (1, "chat", "t")]
    return [*(text.encode() for text in texts), b"\xff\xfe", b"[" * 100_000, _CHANGES + bytes(range(256))]
