"""The document of an engine's state on its way to a client."""

from __future__ import annotations

import json

import pytest

from weft.core.errors import StateError
from weft.core.show import LiveProgram, LiveReplica, LiveState, to_json
from weft.views.top_client import from_json

PROGRAM = LiveProgram(
    *(
        "p",
        "name",
        "s",
        None,
        "tool",
        ("search",),
        1,
        2,
        3,
        1,
        10,
        5,
        1.5,
        0.5,
        2.0,
        96,
        0,
        ("engine-0",),
        9.0,
        -1.0,
        None,
    )
)
STATE = LiveState(20.0, "m", "atlas", (LiveReplica("engine-0", "m", "ready", 1, 0, 1, 0, 0.5),), (PROGRAM,), 1, ())


def test_a_document_survives_json() -> None:
    """What the server sends is what its clients read. A newer server may send more."""
    assert from_json(json.dumps({**to_json(STATE), "more": [1]}, allow_nan=False)) == STATE


@pytest.mark.parametrize("text", ["", "[]", '{"at_s": 1}', "<html>" * 10_000, "NaN"])
def test_something_else_is_refused_in_one_line(text: str) -> None:
    """It may be another server's answer."""
    with pytest.raises(StateError, match=r"^this is no state of a Weft engine: [^\n]{1,250}$"):
        from_json(text)
