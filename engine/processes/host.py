"""The host process and vLLM's child processes, which end with their engine or with the host."""

from __future__ import annotations

import atexit
import functools
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterable
from contextlib import suppress
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from typing import Any

from weft.engine.processes.launch import SHUTDOWN_S, end_processes, no_main_guard, report_no_main_guard
from weft.engine.processes.logs import EngineLog
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


@functools.cache
def keep_exit_code_of_ctrl_c() -> None:
    """Let a script that Ctrl-C ends have the exit code 130. Call this before vLLM is imported.

    Python ends such a script by SIGINT. It forgets that it must when other code is evaluated after the traceback was
    printed, which functions do that vLLM's packages have registered for the exit. This one is called after them.
    """
    atexit.register(_end_by_sigint)


def _end_by_sigint() -> None:
    is_interactive = hasattr(sys, "ps1") or sys.flags.interactive
    if getattr(sys, "last_type", None) is not KeyboardInterrupt or is_interactive:
        return
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # it is closed, or there is none
            stream.flush()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGINT)


def check_main_guard() -> None:
    """Check that this is not a child process that is still importing the user's script.

    A process of an engine reports it and ends at once, and the engine's host raises the error. No handler of the script
    may catch it, and nothing is printed above the host's error.

    Raises:
        EngineStartError: It is one that the user has started.
    """
    child = multiprocessing.current_process()
    if getattr(child, "_inheriting", False):
        if child.name.startswith("EngineCore"):  # vLLM's name
            report_no_main_guard()
            os._exit(1)
        raise no_main_guard()


def shut_down(
    llm: Any, loop: LoopThread, children: Iterable[BaseProcess], tree: ProcessTree, log: EngineLog | None
) -> None:
    """End vLLM's front end, its event loop and its processes, with the processes and shared memory below them.

    For an engine that was not shut down, it is called when the interpreter exits.
    """

    async def stop() -> None:
        llm.shutdown(timeout=SHUTDOWN_S)

    try:
        loop.submit(stop()).result(timeout=30)
    finally:
        loop.stop()
        end_processes(children)
        tree.end()
        if log is not None:
            log.close()
