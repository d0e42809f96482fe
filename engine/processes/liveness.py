"""Watching a process that should answer, and its use of the CPU."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from weft.core.errors import EngineDiedError
from weft.core.routing.liveness import Liveness, ProcessUsage
from weft.engine.processes.tree import tree_of


async def until_stuck(ping: Callable[[], Awaitable[Any]], usage: Callable[[], ProcessUsage], timeout_s: float) -> None:
    """Wait until a process is stuck (`weft.core.routing.liveness`): for `timeout_s` seconds without an answer and
    without use of the CPU. An error of `ping` is an answer, too, except EngineDiedError, which passes through."""
    rule, clock = Liveness(timeout_s), asyncio.get_running_loop().time
    asked: asyncio.Future[Any] | None = None
    is_stuck = False
    try:
        while not is_stuck:
            asked = asked or asyncio.ensure_future(ping())
            await asyncio.sleep(rule.period_s)
            answered = asked.done()
            if answered:
                if not asked.cancelled() and isinstance(asked.exception(), EngineDiedError):
                    asked.result()
                asked = None
            is_stuck = rule.observe(clock(), usage(), answered=answered)
    finally:
        if asked is not None:
            asked.cancel()


def can_read_usage() -> bool:
    """Whether this system says what processes use. Only Linux does so, in /proc."""
    return Path("/proc/self/stat").is_file()


def usage_of(pids: Iterable[int]) -> ProcessUsage:
    """What these processes and all processes below them have used. Processes that have ended are left out."""
    ticks, is_stopped = 0, False
    for pid in tree_of(pids):
        with suppress(OSError):
            # The name in brackets may hold spaces and brackets. The state follows it; see proc_pid_stat(5).
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            is_stopped |= fields[0] == "T"
            ticks += sum(map(int, fields[11:15]))  # user and system time, of children that have ended, too
    return ProcessUsage(ticks / os.sysconf("SC_CLK_TCK"), is_stopped)
