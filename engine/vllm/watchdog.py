"""An engine that hangs is killed, so that it is treated like one that died. The death of an engine is logged."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from contextlib import suppress
from multiprocessing.process import BaseProcess

from weft.core.errors import EngineDiedError
from weft.core.ids import EngineId
from weft.core.log import get_logger
from weft.engine.processes.tree import can_read_usage, kill_tree, until_stuck, usage_of
from weft.engine.vllm.accounting import AccountingLLM
from weft.engine.vllm_compat.control import send_to_scheduler
from weft.engine.wire.control import Ping, encode_control


async def kill_if_stuck(llm: AccountingLLM, processes: Collection[BaseProcess], timeout_s: float | None) -> None:
    """Watch an engine until it dies, and kill it if it hangs. Run it on the engine's event loop.

    Args:
        llm: The engine. Its `why_dead` is set before it is killed.
        processes: Its engine processes, children of this process.
        timeout_s: Seconds without an answer and without use of the CPU; None: it is never killed. Nor is it on a system
            without /proc.
    """
    if timeout_s is None or not can_read_usage():
        return
    with suppress(EngineDiedError):
        pids = [process.pid for process in processes if process.pid is not None]
        message = encode_control(Ping())
        await until_stuck(lambda: send_to_scheduler(llm, message), lambda: usage_of(pids), timeout_s)
        llm.why_dead = f"it hung: no answer and no use of the CPU for {timeout_s:g} s; it was killed"
        kill_tree(processes)


async def report_death(llm: AccountingLLM, engine_id: EngineId) -> None:
    """Wait until an engine dies, and log it. Run it on the engine's event loop."""
    outputs = llm.output_handler
    if outputs is None:
        return
    await asyncio.wait([outputs])
    if not outputs.cancelled():  # as it is when the engine is shut down
        reason = llm.why_dead or "one of its processes ended"
        get_logger().error("engine died", engine_id=engine_id, reason=reason, log=str(llm.log or "unknown"))
