"""A script with one engine, which `weft record` records: what the engine knows, prints and leaves behind.

    weft record runs.jsonl -- python tests/support/recorded_host.py MODEL

It prints a report as JSON. Its engine shuts down with a program that goes on afterwards, and with a call in flight.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from background import TINY, CommandResult
from tiny_engine import ENDLESS_TOKENS, ENGINE_ARGS

import weft
from weft.core.policies.history import History, ProgramEnd

recorded_host = pytest.mark.background("-m", "weft", "record", "runs.jsonl", "--", sys.executable, Path(__file__), TINY)


def report_of(command_result: CommandResult) -> dict[str, Any]:
    """What the script printed."""
    assert command_result.exit_code == 9, command_result.stderr
    report: dict[str, Any] = json.loads(command_result.stdout)
    return report


def body(tokens: int) -> dict[str, Any]:
    """A request for so many tokens."""
    return {"messages": [{"role": "user", "content": "hello"}], "max_tokens": tokens, "ignore_eos": True}


def call(engine: weft.Engine, program: weft.Program, tokens: int) -> None:
    """Make one call."""
    engine.chat_sync(body(tokens), program, program.reports.start_call("run"))


def main(model: str) -> None:
    """Use the engine, and print what there is to see."""
    os.environ["XDG_STATE_HOME"] = str(Path.cwd())
    os.environ["TMPDIR"] = str(Path.cwd() / "temporary")
    Path("temporary").mkdir()
    past = History()
    for _ in range(3):
        past[model].add(ProgramEnd(None, "chat", 100, is_known=True))
    Path("weft-history.json").write_text(past.to_json())
    with weft.Engine(model, policy="auto", history="weft-history.json", **ENGINE_ARGS) as engine:
        processes = [each for each in psutil.Process().children(recursive=True) if each.name().startswith("VLLM")]
        for _ in range(2):
            with weft.Program("chat") as program:
                call(engine, program, 9)
        while sum(row.ended for row in engine.table.classes) < 5:
            time.sleep(0.05)
        table = str(engine.table)
        with weft.Program("late") as program:
            call(engine, program, 9)
            fingerprint = engine.row(program.program_id).fingerprint
        open_, unfinished = weft.Program("open"), weft.Program("unfinished")
        call(engine, open_, 4)
        call(engine, unfinished, 5)
        next(engine.chat_stream_sync(body(ENDLESS_TOKENS), unfinished, unfinished.reports.start_call("run")))
    open_.end()
    (log,) = Path("weft", "log").iterdir()
    report = {
        "table": table,
        "fingerprint": fingerprint,
        "processes": len(processes),
        "left": [each.pid for each in processes if each.is_running() and each.status() != psutil.STATUS_ZOMBIE],
        # torch names a folder for the user, whatever is compiled
        "files_left": [each.name for each in Path("temporary").iterdir() if not each.name.startswith("torchinductor_")],
        "log": log.read_text(),
    }
    sys.stdout.write(json.dumps(report))


if __name__ == "__main__":
    main(sys.argv[1])
    sys.exit(9)
