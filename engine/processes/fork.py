"""Engines in a forked child, in which they cannot work: the child has none of their threads, and none of the processes.

A child must end without harm to the engines of its parent, with which it shares sockets, file descriptors and the
numbers of processes. So nothing of an engine may be finalised there.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import weakref
from collections.abc import Callable
from typing import Any, Final, ParamSpec

from weft.engine.processes.launch import launched_processes, running_launches

P = ParamSpec("P")

_engines: Final[weakref.WeakSet[Any]] = weakref.WeakSet()


def survive_forks(engine: object) -> None:
    """Keep forked children from finalising an engine and its parts. Call this before the engine is started."""
    _engines.add(engine)


def not_in_forks(function: Callable[P, object]) -> Callable[P, None]:
    """A finaliser that does nothing in a forked child."""
    process = os.getpid()

    def call(*args: P.args, **kwargs: P.kwargs) -> None:
        if os.getpid() == process:
            function(*args, **kwargs)

    return call


def _before_fork() -> None:
    for launch in running_launches():
        launch.note_processes()


def _after_fork_in_child() -> None:
    for engine in list(_engines):
        # Never collected, also not when the interpreter ends. Closing vLLM's sockets would remove them from the epoll
        # object of the engine's event loop, which the parent uses.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(engine))
    # When an os.fork()ed child ends, multiprocessing terminates or joins the processes that its parent had started.
    children: set[Any] = getattr(multiprocessing.process, "_children", set())
    children -= set(launched_processes)
    if _engines:
        _detach_vllms_finalizers()


def _detach_vllms_finalizers() -> None:
    """Keep vLLM's finalisers from running. They end the engine's processes by their numbers."""
    for finalizer in list(getattr(weakref.finalize, "_registry", ())):
        called = finalizer.peek()
        if called is not None and (_is_vllms(type(called[0])) or _is_vllms(called[1])):
            finalizer.detach()


def _is_vllms(thing: object) -> bool:
    return str(getattr(thing, "__module__", "")).partition(".")[0] == "vllm"


os.register_at_fork(before=_before_fork, after_in_child=_after_fork_in_child)
