"""The process tree of an engine and its shared memory, so that both can be cleaned up when its top process is killed.

vLLM's workers are children of its engine process, not of this process. They are identified by file descriptors
(pidfd), because the system may give a process number to another process. Process trees are read from /proc, which only
Linux has. On other systems they are empty.
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

_SHARED_MEMORY: Final = "/dev/shm/"  # noqa: S108  the kernel's folder for shared memory


class ProcessTree:
    """Processes and all processes below them, as they are when the object is made.

    Args:
        pids: the processes at the top. Their owner ends them; this class ends the processes below.
    """

    def __init__(self, pids: Iterable[int]) -> None:
        tree = list(pids)
        tops = len(tree)
        files: set[str] = set()
        for pid in tree:  # the list grows while it is read: children are appended
            for children in Path(f"/proc/{pid}/task").glob("*/children"):
                with suppress(OSError):
                    tree += map(int, children.read_text().split())
            files |= _shared_memory_of(str(pid))
        self._shared_memory = files - _shared_memory_of("self")
        self._handles: list[int] = []
        for pid in tree[tops:]:
            with suppress(OSError):  # the process has ended
                self._handles.append(os.pidfd_open(pid))

    def end(self, grace_s: float = 10.0) -> None:
        """Wait for the processes below the top to end, and remove the shared memory of the whole tree.

        A process that has not ended after `grace_s` seconds is killed. The processes at the top must have ended.
        """
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
                with suppress(Exception):  # only memory made by multiprocessing is registered
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
