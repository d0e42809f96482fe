"""The host process and vLLM's child processes: what a start leaves in the host is undone, and children are ended."""

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
def host_untouched() -> Iterator[None]:
    """Put environment variables back as they were.

    vLLM sets LD_PRELOAD, LOCAL_WORLD_SIZE and others for the processes it starts; they must not reach other children of
    the host.
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
    return set(multiprocessing.active_children())


def end_processes(processes: set[multiprocessing.process.BaseProcess], grace_s: float = 10.0) -> None:
    """Ask processes to end, and kill those that do not within `grace_s` seconds."""
    for process in processes:
        process.terminate()
    for process in processes:
        process.join(grace_s)
        if process.is_alive():
            process.kill()
            process.join(grace_s)


def end_with_parent() -> None:
    """End this process, and with it those it has started, when the process that started it is gone, however it ended.

    Without it, `kill -9` of the host would leave the engine running. A process that nobody spawned is left alone.
    """
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def watch() -> None:
        connection.wait([parent.sentinel])
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="weft-parent", daemon=True).start()


def is_spawned_main() -> bool:
    """Whether this is a child process that is only now re-running the user's main module."""
    return bool(getattr(multiprocessing.current_process(), "_inheriting", False))


def shut_down(llm: Any, loop: LoopThread, children: set[Any]) -> None:
    """End vLLM's front end, its event loop and its processes; also at interpreter exit, for a forgotten engine."""

    async def stop() -> None:
        llm.shutdown()

    try:
        loop.submit(stop()).result(timeout=30)
    finally:
        loop.stop()
        end_processes(children)
