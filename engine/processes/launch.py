"""Launches of vLLM: the lock by which they take turns, and the processes that each one has made."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Final, TypeVar

from weft.core.errors import EngineStartError
from weft.core.locks import fork_safe
from weft.engine.processes.run_folder import VARIABLE, RunFolder
from weft.engine.processes.tree import ProcessTree, shared_memory_of, tree_of

Config = TypeVar("Config")
Engine = TypeVar("Engine")

_POLL_S: Final = 0.1
_NOTE_S: Final = 0.5
_GRACE_S: Final = 2.0
SHUTDOWN_S: Final = 10.0  # an engine needs less than a second for an orderly end, and more on a busy machine
# The file by which an engine's process says that it could not import the user's script. Its exit code may get lost:
# vLLM notices the end before the code is known, and the process may be gone before the launch has noted it.
REPORT_VARIABLE: Final = "WEFT_NO_MAIN_GUARD"


class LaunchLock:
    """Lets one launch run at a time, because the processes of a launch inherit the host's environment variables."""

    def __init__(self) -> None:
        self._lock = fork_safe(threading.Lock())

    @contextmanager
    def held(self, abandoned: threading.Event) -> Iterator[None]:
        """Wait for the lock, and hold it during the block. If `abandoned` is set meanwhile, it raises
        EngineStartError."""
        while not self._lock.acquire(timeout=_POLL_S):
            if abandoned.is_set():
                raise start_cancelled()
        try:
            yield
        finally:
            self._lock.release()

    @asynccontextmanager
    async def held_async(self) -> AsyncIterator[None]:
        """`held` for a coroutine, which ends the wait by its cancellation."""
        while not self._lock.acquire(blocking=False):  # noqa: ASYNC110  other engines have other event loops
            await asyncio.sleep(_POLL_S)
        try:
            yield
        finally:
            self._lock.release()


launch_lock: Final = LaunchLock()


class Launch:
    """One construction of a vLLM engine. It blocks the thread that runs it, and another thread can abandon it.

    Attributes:
        engine: the vLLM engine, once it is constructed.
    """

    def __init__(self) -> None:
        self.engine: Any = None
        self.processes: set[BaseProcess] = set()
        self._shared_memory: set[str] = set()
        self._folder: RunFolder | None = None
        self._abandoned = threading.Event()
        self._end_noting = threading.Event()
        self._over = threading.Event()
        self._thread_id: int | None = None

    def run(self, make_config: Callable[[], Config], construct: Callable[[Config], Engine]) -> Engine:
        """Construct the engine on the calling thread.

        Args:
            make_config: makes vLLM's configuration, which takes seconds.
            construct: constructs the engine from the configuration. It launches the processes.

        Raises:
            EngineStartError: the launch was abandoned before it launched processes, or the user's script has no main
                guard.
            Exception: what vLLM raises. No process is left then.
        """
        self._thread_id = threading.get_native_id()
        _running.add(self)
        noting = threading.Thread(target=self._note_all, name="weft-launch", daemon=True)
        noting.start()
        try:
            self._check()
            config = make_config()
            self._check()
            self._folder = RunFolder()
            with _main_guard_checked(self._folder.path):
                self.engine = engine = construct(config)
        except BaseException:
            self._end_noting.set()
            noting.join()
            self._end_processes()
            raise
        finally:
            self.note_processes()
            _running.discard(self)
            self._end_noting.set()
            self._over.set()
        return engine

    def _check(self) -> None:
        if self._abandoned.is_set():
            raise start_cancelled()

    def _note_all(self) -> None:
        """Note what must be known of processes before they end by themselves: that they exist, and shared memory."""
        while not self._end_noting.wait(_NOTE_S):
            pids = [process.pid for process in tuple(self.note_processes()) if process.pid is not None]
            self._shared_memory |= shared_memory_of(tree_of(pids))

    def note_processes(self) -> set[BaseProcess]:
        """Note and return the processes that have been launched until now."""
        if self._thread_id is not None and not self._over.is_set():
            self.processes |= launched_by(self._thread_id)
            launched_processes.update(self.processes)
        return self.processes

    def abandon(self) -> None:
        """End the launch and all of its processes. Blocks until they are gone.

        vLLM's constructor cannot be interrupted, but it fails when its processes are gone.
        """
        self._abandoned.set()
        while self._thread_id is not None and not self._over.wait(timeout=2 * _POLL_S):
            self._end_processes()
        self._end_processes()

    def _end_processes(self) -> None:
        processes = self.note_processes()
        tree = self.tree()
        if self.engine is not None:
            with suppress(Exception):  # parts of it are gone; the rest is done below
                self.engine.shutdown()
        end_processes(processes, _GRACE_S)
        tree.end(_GRACE_S)

    def tree(self) -> ProcessTree:
        """The processes as they are now, with what they leave behind."""
        pids = [process.pid for process in tuple(self.processes) if process.pid is not None]
        return ProcessTree(pids, self._shared_memory, self._folder)


_running: Final[set[Launch]] = set()
launched_processes: Final[weakref.WeakSet[BaseProcess]] = weakref.WeakSet()  # of all launches


def running_launches() -> list[Launch]:
    """The launches that construct an engine now."""
    return list(_running)


def start_cancelled() -> EngineStartError:
    """The error of a start that was abandoned. Its caller was cancelled, and sees the cancellation instead."""
    return EngineStartError("the start was cancelled.")


def no_main_guard() -> EngineStartError:
    """The error of a start by a script that starts an engine whenever it is imported."""
    return EngineStartError(
        "the engine's processes import your script, which starts an engine again when it is imported. Put the code "
        'that starts the engine under `if __name__ == "__main__":`.'
    )


def report_no_main_guard() -> None:
    """Tell the launch of this process that the user's script has no main guard."""
    with suppress(KeyError, OSError):  # another program has started this process
        Path(os.environ[REPORT_VARIABLE]).touch()


@contextmanager
def _main_guard_checked(folder: Path) -> Iterator[None]:
    """Let the processes that the block launches use the folder of the launch. Replace an error of the block by
    `no_main_guard` if one of them has reported it."""
    report = folder / "no-main-guard"
    try:
        with launch_environment((), {REPORT_VARIABLE: str(report), VARIABLE: str(folder)}):
            yield
    except Exception:
        if report.exists():
            raise no_main_guard() from None
        raise


def launched_by(thread_id: int) -> set[BaseProcess]:
    """The living processes that a running thread of this process has started through multiprocessing.

    Linux lists the children of each thread. So a process that the host starts meanwhile on another thread is never
    among them. On other systems the set is empty, and vLLM alone ends its processes.

    Args:
        thread_id: `threading.get_native_id()` of the thread.
    """
    try:
        children = Path(f"/proc/self/task/{thread_id}/children").read_text()
    except OSError:
        return set()
    pids = set(map(int, children.split()))
    return {process for process in multiprocessing.active_children() if process.pid in pids}


def end_processes(processes: Iterable[BaseProcess], grace_s: float = SHUTDOWN_S) -> None:
    """Ask processes to end. Kill each one that has not ended after `grace_s` seconds."""
    ending = list(processes)
    for process in ending:
        process.terminate()
    for process in ending:
        process.join(grace_s)
        if process.is_alive():
            process.kill()
            process.join(grace_s)


@contextmanager
def launch_environment(written: Iterable[str], ours: Mapping[str, str] | None = None) -> Iterator[None]:
    """Set environment variables for the processes of a launch, and restore what the launch changed at the end.

    Args:
        written: the variables that vLLM writes. They get back their values from before the block.
        ours: variables to set during the block. One that the host has changed meanwhile keeps the host's value.
    """
    ours = ours or {}
    before = {name: os.environ.get(name) for name in {*written, *ours}}
    os.environ.update(ours)
    try:
        yield
    finally:
        for name, value in before.items():
            now = os.environ.get(name)
            if now == value or (name in ours and now != ours[name]):
                continue
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
