"""The `weft` command, whose server writes the sizes of what it keeps to the file WEFT_TEST_SIZES at each SIGUSR1."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Any

from weft.engine.serve import server
from weft.engine.serve.client import ServedEngine

_made: list[ServedEngine] = []


class _NotedEngine(ServedEngine):
    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        _made.append(self)


def _sizes(served: Any) -> dict[str, int]:
    engine, programs, requests = served._engine, served.programs, served.requests
    return {
        "requests": len(requests._requests),
        "admitted": requests._admission.calls,
        "calls": len(engine._in_flight),
        "calls of keys": sum(each.calls for each in requests._of_keys.values()),
        "keys with calls": len(requests._of_keys),
        "programs": len(programs),
        "rows": len(engine.table),
        "busy programs": len(programs._calls),
        "ending programs": len(programs._ending),
        "programs that left": len(programs._left_s),
        "sessions": len(engine.sessions),
        "idle times": len(programs._times),
        "lineage": len(served.lineage._lineage),
    }


def _write(_number: int, _frame: FrameType | None) -> None:
    path = Path(os.environ["WEFT_TEST_SIZES"])
    part = path.with_suffix(".part")
    part.write_text(json.dumps(_sizes(_made[0])))
    part.rename(path)


if __name__ == "__main__":
    from weft.commands.cli import app

    server.ServedEngine = _NotedEngine  # type: ignore[misc]  # so that it can be found
    signal.signal(signal.SIGUSR1, _write)
    app(sys.argv[1:], prog_name="weft")
