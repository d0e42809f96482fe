"""The workload of Astraea (§5.1).

The number of calls and the mean times of three tools are the paper's. All other figures are Weft's choice.
"""

from __future__ import annotations

import math
import random
from typing import Final

from weft.core.trace.format import TraceProgram
from weft.core.trace.workloads.parts import chain, long_tail
from weft.core.trace.workloads.saga import tool_time_s

_SYSTEM_TOKENS: Final = 1024
_INTERCEPTIONS: Final[dict[str, str | float]] = {  # the tool of `TOOL_TIMES_S`, or the mean in seconds
    "arithmetic": 9e-5,
    "questions": "web",
    "environment": "code",
    "chatbot": 28.6,
    "image": 20.03,
    "speech": "web",
}


def intercepted(rng: random.Random, program: str) -> TraceProgram:
    """Make a program of one of six classes, each of which waits for one kind of tool between its calls.

    Means: 5.17 calls; arithmetic takes 0.09 ms, a human's answer in a chat 28.6 s and an image 20.03 s. The paper does
    not give the means of the other three. Questions and speech have SAGA's times of "web", and a virtual environment
    those of "code".
    """
    kind = rng.choice(list(_INTERCEPTIONS))
    of = _INTERCEPTIONS[kind]
    count = long_tail(5.17, 40, 0.6).draw(rng)
    later, output = long_tail(64, 1024, 0.8), long_tail(96, 1024, 0.8)

    def pause() -> tuple[str, float]:
        part = rng.random()
        return kind, tool_time_s(of, part) if isinstance(of, str) else -of * math.log1p(-part)

    calls = chain(rng, count, later.draw, output.draw, system=_SYSTEM_TOKENS, pause=pause)
    return TraceProgram(program, tuple(calls), name=kind)
