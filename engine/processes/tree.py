"""The processes below an engine's own, and their shared memory: what is left when the engine's process is killed.

vLLM's workers are children of its engine process, not of this one. They are known here by file descriptor (pidfd),
since a number may soon be another process's. Linux only, as /proc is; elsewhere nothing is found.
"""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Iterable
from contextlib import suppress
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Final

_SHARED_MEMORY: Final = "/dev/shm/"  # noqa: S108  where the kernel has it


class ProcessTree:
    """Processes and those below them, as they are when it is made.

    Args:
        pids: the topmost, which others look after.
    """

    def __init__(self, pids: Iterable[int]) -> None:
        family = list(pids)
        tops = len(family)
        files: set[str] = set()
        for pid in family:  # grows
            for children in Path(f"/proc/{pid}/task").glob("*/children"):
                with suppress(OSError):
                    family += map(int, children.read_text().split())
            files |= _shared_memory_of(str(pid))
        self._shared_memory = files - _shared_memory_of("self")
        self._handles: list[int] = []
        for pid in family[tops:]:
            with suppress(OSError):  # it has ended
                self._handles.append(os.pidfd_open(pid))

    def end(self, grace_s: float = 10.0) -> None:
        """Wait for the processes below to end, kill those that do not within `grace_s` seconds each, and give back
        their shared memory. The topmost must have ended."""
        for handle in self._handles:
            if not _ends(handle, grace_s):
                with suppress(OSError):
                    signal.pidfd_send_signal(handle, signal.SIGKILL)
                _ends(handle, grace_s)
            os.close(handle)
        self._handles = []
        for file in self._shared_memory:
            with suppress(FileNotFoundError):
                Path(file).unlink()
                with suppress(Exception):  # it is registered only if Python's own shared memory made it
                    resource_tracker.unregister(f"/{Path(file).name}", "shared_memory")
        self._shared_memory = set()


def _ends(handle: int, grace_s: float) -> bool:
    poll = select.poll()
    poll.register(handle, select.POLLIN)
    return bool(poll.poll(grace_s * 1000))


def _shared_memory_of(process: str) -> set[str]:
    with suppress(OSError):
        maps = Path(f"/proc/{process}/maps").read_text()
        return {line[line.index(_SHARED_MEMORY) :] for line in maps.splitlines() if _SHARED_MEMORY in line}
    return set()
