"""The host process and vLLM's child processes.

A start of vLLM changes the host's environment variables, which are restored. Child processes are ended with their
engine or with the host.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import connection
from typing import Any

from weft.engine.processes.loop_thread import LoopThread


@contextmanager
def restored_environment() -> Iterator[None]:
    """Restore the environment variables at the end of the block.

    vLLM sets LD_PRELOAD, LOCAL_WORLD_SIZE and other variables for the processes that it starts. Other children of the
    host must not inherit these variables.
    """
    environment = dict(os.environ)
    try:
        yield
    finally:
        for name in set(os.environ) - set(environment):
            del os.environ[name]
        for name, value in environment.items():
            if os.environ.get(name) != value:
                os.environ[name] = value


def child_processes() -> set[multiprocessing.process.BaseProcess]:
    """The living processes that this process has started through multiprocessing."""
    return set(multiprocessing.active_children())


def end_processes(processes: set[multiprocessing.process.BaseProcess], grace_s: float = 10.0) -> None:
    """Ask processes to end. Kill each one that has not ended after `grace_s` seconds."""
    for process in processes:
        process.terminate()
    for process in processes:
        process.join(grace_s)
        if process.is_alive():
            process.kill()
            process.join(grace_s)


def end_with_parent() -> None:
    """Begin to watch the parent process, and end this process, and so its children, when the parent has ended.

    Without this watch, `kill -9` of the host would leave the engine running. Nothing happens in a process that
    multiprocessing did not start.
    """
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def watch() -> None:
        connection.wait([parent.sentinel])
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="weft-parent", daemon=True).start()


def is_spawned_main() -> bool:
    """Whether this is a child process that is still importing the user's main module."""
    return bool(getattr(multiprocessing.current_process(), "_inheriting", False))


def shut_down(llm: Any, loop: LoopThread, children: set[Any]) -> None:
    """End vLLM's front end, its event loop and its processes.

    For an engine that was not shut down, it is called when the interpreter exits.
    """

    async def stop() -> None:
        llm.shutdown()

    try:
        loop.submit(stop()).result(timeout=30)
    finally:
        loop.stop()
        end_processes(children)
