"""The host process and vLLM's child processes, which end with their engine or with the host."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterable
from contextlib import suppress
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from typing import Any

from weft.engine.processes.launch import end_processes
from weft.engine.processes.loop_thread import LoopThread
from weft.engine.processes.tree import ProcessTree


def end_with_parent() -> None:
    """Begin to watch the parent process, and end this process, and so its children, when the parent has ended.

    Without this watch, `kill -9` of the host would leave the engine running. Nothing happens in a process that
    multiprocessing did not start.
    """
    parent = multiprocessing.parent_process()
    if parent is None:
        return
    watched: list[int] = [parent.sentinel]
    # A forked child of the host keeps the pipe of the sentinel open. A pidfd tells of the host alone.
    with suppress(AttributeError, OSError):  # another system than Linux, or the host has ended already
        handle = os.pidfd_open(os.getppid())
        if os.getppid() == parent.pid:
            watched.append(handle)

    def watch() -> None:
        connection.wait(watched)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="weft-parent", daemon=True).start()


def is_spawned_main() -> bool:
    """Whether this is a child process that is still importing the user's main module."""
    return bool(getattr(multiprocessing.current_process(), "_inheriting", False))


def shut_down(llm: Any, loop: LoopThread, children: Iterable[BaseProcess], tree: ProcessTree) -> None:
    """End vLLM's front end, its event loop and its processes, with the processes and shared memory below them.

    For an engine that was not shut down, it is called when the interpreter exits.
    """

    async def stop() -> None:
        llm.shutdown()

    try:
        loop.submit(stop()).result(timeout=30)
    finally:
        loop.stop()
        end_processes(children)
        tree.end()
