"""The process tree of an engine and what it leaves behind, to be cleaned up also when its top process is killed.

vLLM's workers are children of its engine process, not of this process. They are identified by file descriptors
(pidfd), because the system may give a process number to another process. Process trees are read from /proc, which only
Linux has. On other systems they are empty.
"""

from __future__ import annotations

import asyncio
import os
import select
import signal
from collections.abc import Awaitable, Callable, Collection, Iterable
from contextlib import suppress
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Final

from weft.core.errors import EngineDiedError
from weft.core.routing.liveness import Liveness, ProcessUsage
from weft.engine.processes.run_folder import RunFolder

_SHARED_MEMORY: Final = "/dev/shm/"  # noqa: S108  the kernel's folder for shared memory


def tree_of(pids: Iterable[int]) -> list[int]:
    """These processes and then all processes below them."""
    tree = list(pids)
    for pid in tree:  # the list grows while it is read: children are appended
        for children in Path(f"/proc/{pid}/task").glob("*/children"):
            with suppress(OSError):
                tree += map(int, children.read_text().split())
    return tree


def kill_tree(processes: Collection[BaseProcess]) -> None:
    """Kill children of this process and all processes below them. They may be stopped or hang."""
    below = ProcessTree(process.pid for process in processes if process.pid is not None)
    for process in processes:
        process.kill()
    below.kill()
    below.close()


class ProcessTree:
    """Processes and all processes below them, as they are when the object is made.

    Args:
        pids: the processes at the top. Their owner ends them; this class ends the processes below.
        shared_memory: files of shared memory that the tree had before.
    """

    def __init__(self, pids: Iterable[int], shared_memory: Iterable[str] = (), folder: RunFolder | None = None) -> None:
        tops = list(pids)
        tree = tree_of(tops)
        self._shared_memory = shared_memory_of(tree) | set(shared_memory)
        self._folder = folder
        self._handles: list[int] = []
        for pid in tree[len(tops) :]:
            with suppress(OSError):  # the process has ended
                self._handles.append(os.pidfd_open(pid))

    def kill(self) -> None:
        """Kill the processes below the top at once."""
        for handle in self._handles:
            with suppress(OSError):
                signal.pidfd_send_signal(handle, signal.SIGKILL)

    def end(self, grace_s: float = 10.0) -> None:
        """Wait for the processes below the top to end, and remove the tree's shared memory and its folder.

        A process that has not ended after `grace_s` seconds is killed. The processes at the top must have ended.
        """
        for handle in self._handles:
            if not _ends(handle, grace_s):
                with suppress(OSError):
                    signal.pidfd_send_signal(handle, signal.SIGKILL)
                _ends(handle, grace_s)
        self.close()
        for file in self._shared_memory:
            with suppress(FileNotFoundError):
                Path(file).unlink()
                with suppress(Exception):  # only memory made by multiprocessing is registered
                    resource_tracker.unregister(f"/{Path(file).name}", "shared_memory")
        self._shared_memory = set()
        if self._folder is not None:
            self._folder.remove()

    def close(self) -> None:
        """Forget the processes, and leave them as they are."""
        for handle in self._handles:
            os.close(handle)
        self._handles = []


def _ends(handle: int, grace_s: float) -> bool:
    poll = select.poll()
    poll.register(handle, select.POLLIN)
    return bool(poll.poll(grace_s * 1000))


def shared_memory_of(pids: Iterable[int]) -> set[str]:
    """The files of shared memory of some processes that this process does not have."""
    files: set[str] = set().union(*(_shared_memory_of(str(pid)) for pid in pids))
    return files - _shared_memory_of("self")


def _shared_memory_of(process: str) -> set[str]:
    with suppress(OSError):
        maps = Path(f"/proc/{process}/maps").read_text()
        return {line[line.index(_SHARED_MEMORY) :] for line in maps.splitlines() if _SHARED_MEMORY in line}
    return set()


# -- watching a process that should answer, and its use of the CPU


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
