"""The account of a call in its answer: the member `"weft"`, in whole answers and in streams."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from weft.engine.frontend.calls import InFlight

_ENDS: Final = b'"finish_reason":"'  # in a string the quotation marks would be escaped
_EVENT: Final = b"data: {"
_ERROR: Final = b'data: {"error"'
_NAMED_ERROR: Final = b"event: error\ndata: "  # Anthropic's


def report_of(call: InFlight, scope: str) -> dict[str, Any]:
    """A call's ids as its client knows them, and its account: seconds and tokens."""
    identity, prefix = call.identity, f"{scope}/"
    return {
        **call.report(),
        "program_id": identity.program_id.removeprefix(prefix),
        "thread_id": identity.thread_id.removeprefix(prefix),
        "call_id": identity.call_id.removeprefix(prefix),
        "parents": [parent.removeprefix(prefix) for parent in identity.parents],
    }


def add_report(answer: bytes, report: Mapping[str, Any]) -> bytes:
    """Add a report to a JSON object. What is none stays as it is."""
    body = answer.rstrip()
    if not body.endswith(b"}") or body == b"{}":
        return answer
    return body[:-1] + b',"weft":' + _dumped(report) + b"}"


def choices_that_end(events: bytes) -> int:
    """How many choices of the answer end with these events."""
    return sum(map(_ends_choice, events.split(b"\n\n")))


def add_report_to_events(events: bytes, report: Mapping[str, Any]) -> bytes:
    """Add a report to the last of the events that end a choice."""
    found = events.split(b"\n\n")
    last = max(place for place, event in enumerate(found) if _ends_choice(event))
    found[last] = add_report(found[last], report)
    return b"\n\n".join(found)


def _ends_choice(event: bytes) -> bool:
    return event.startswith(_EVENT) and _ENDS in event


def replace_error(events: bytes, body: Mapping[str, Any]) -> bytes:
    """The events with another error in the place of theirs."""
    return b"\n\n".join(_with_error(event, body) for event in events.split(b"\n\n"))


def _with_error(event: bytes, body: Mapping[str, Any]) -> bytes:
    if event.startswith(_NAMED_ERROR):
        return _NAMED_ERROR + _dumped(body)
    return b"data: " + _dumped(body) if event.startswith(_ERROR) else event


def _dumped(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()
