"""An engine without host memory that hangs and dies, and is shut down: `hung_engine.py MODEL`.

It prints what its KV cache has, and fails where something is wrong.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from background import TINY
from observers import vllm_requests
from polling import until
from tiny_engine import ENDLESS_TOKENS, ENGINE_ARGS

import weft
from weft.core.errors import EngineClosedError, EngineDiedError

hung_engine = pytest.mark.background(Path(__file__), TINY)
HANG_TIMEOUT_S = 15.0  # next to other tests an engine that works may be silent for some seconds


async def call(engine: weft.Engine, program: weft.Program) -> dict[str, Any]:
    """Make an endless call."""
    body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": ENDLESS_TOKENS, "ignore_eos": True}
    return await engine.chat(body, program, program.reports.start_call("run"))


async def main(model: str) -> None:
    """Stop the processes of an engine with a call in flight, and shut it down."""
    engine = await weft.Engine.create(model, swap=None, hang_timeout_s=HANG_TIMEOUT_S, **ENGINE_ARGS)
    stats = engine.kv_stats
    assert stats is not None
    sys.stdout.write(json.dumps([stats.policy, stats.host_capacity_bytes, engine.host_kv_gib]))
    tops = [psutil.Process(child.pid) for child in engine._children]
    processes = [*tops, *(process for top in tops for process in top.children(recursive=True))]
    try:
        with weft.Program("victim") as program:
            in_flight = asyncio.create_task(call(engine, program))
            await until(lambda: vllm_requests(engine))
            for top in tops:
                top.suspend()
            with pytest.raises(
                EngineDiedError, match=r"it hung: no answer .* for 15 s; it was killed.*start a new one"
            ):
                await asyncio.wait_for(in_flight, 300)  # the timeout only prevents a hang
            with pytest.raises(EngineDiedError):
                await call(engine, program)
            assert not engine.is_alive
        assert len(engine.table) == 0
    finally:
        await asyncio.to_thread(engine.shutdown)
    with weft.Program("late") as late, pytest.raises(EngineClosedError):
        await call(engine, late)
    _, alive = await asyncio.to_thread(psutil.wait_procs, processes, timeout=120)
    assert alive == []


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
