"""The document of an engine's state on its way to a client."""

from __future__ import annotations

import json

from weft.core.show import LiveProgram, LiveReplica, LiveState, to_json
from weft.views.top_client import STATES

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
    assert STATES.validate_json(json.dumps({**to_json(STATE), "more": [1]}, allow_nan=False)) == STATE
