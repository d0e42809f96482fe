"""Launches: the processes of a thread, environment variables, and the lock."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import threading
import time
from multiprocessing.process import BaseProcess

import pytest

from weft.core.errors import EngineStartError
from weft.core.locks import fork_safe
from weft.engine.processes.launch import (
    REPORT_VARIABLE,
    Launch,
    LaunchLock,
    end_processes,
    launch_environment,
    report_no_main_guard,
)

SPAWN = multiprocessing.get_context("spawn")


def sleeper(name: str = "EngineCore") -> BaseProcess:
    process = SPAWN.Process(target=time.sleep, args=(600,), name=name)
    process.start()
    return process


class Constructor:
    """Launches a process as vLLM does, and waits until it is told to go on, or until the process has ended."""

    def __init__(self) -> None:
        self.has_process = threading.Event()
        self.go_on = threading.Event()
        self.process: BaseProcess | None = None
        self.is_shut_down = False

    def __call__(self, _config: object) -> Constructor:
        self.process = sleeper()
        self.has_process.set()
        while not self.go_on.wait(0.02):
            if not self.process.is_alive():
                raise RuntimeError("the engine core ended")
        return self

    def shutdown(self) -> None:
        self.is_shut_down = True


def in_background(launch: Launch, constructor: Constructor) -> threading.Thread:
    def run() -> None:
        try:
            launch.run(lambda: None, constructor)
        except (RuntimeError, EngineStartError):
            constructor.has_process.set()

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def test_a_launch_knows_the_processes_that_its_thread_has_made() -> None:
    """Those of another launch at the same time, and those of the host under any name, are not among them."""
    launches, constructors = [Launch(), Launch()], [Constructor(), Constructor()]
    threads = [in_background(launch, constructor) for launch, constructor in zip(launches, constructors, strict=True)]
    hosts = [sleeper(), sleeper("worker")]
    try:
        for constructor, thread in zip(constructors, threads, strict=True):
            assert constructor.has_process.wait(60)
            constructor.go_on.set()
            thread.join()
        assert [launch.processes for launch in launches] == [{constructor.process} for constructor in constructors]
        launches[0].abandon()
        assert [constructor.is_shut_down for constructor in constructors] == [True, False]
        assert [c.process.is_alive() for c in constructors if c.process is not None] == [False, True]
        assert [process.is_alive() for process in hosts] == [True, True]
    finally:
        end_processes([*hosts, *launches[0].processes, *launches[1].processes])


def test_an_abandoned_launch_ends_the_process_that_it_waits_for() -> None:
    """The constructor cannot be interrupted. It fails when its process is gone."""
    launch, constructor = Launch(), Constructor()
    thread = in_background(launch, constructor)
    host = sleeper()
    try:
        assert constructor.has_process.wait(60)
        launch.abandon()
        thread.join()
        assert launch.engine is None
        assert constructor.process is not None
        assert not constructor.process.is_alive()
        assert host.is_alive()
    finally:
        end_processes([host])


def test_a_launch_that_is_abandoned_before_it_begins_launches_nothing() -> None:
    """An engine whose configuration takes long to make ends without a process."""
    launch, constructor = Launch(), Constructor()
    launch.abandon()
    in_background(launch, constructor).join()
    assert constructor.process is None


def test_a_process_reports_that_the_main_guard_is_missing_before_it_ends() -> None:
    """vLLM may raise its error before the exit code of the process is known, and the launch may not have seen it."""

    def construct(_config: object) -> None:
        report_no_main_guard()  # as the process does
        raise RuntimeError("Engine core initialization failed. See root cause above. Failed core proc(s): {}")

    before = os.environ.get(REPORT_VARIABLE)  # of another test's launch; in a process of its own there is none
    with pytest.raises(EngineStartError, match="__main__"):
        Launch().run(lambda: None, construct)
    assert os.environ.get(REPORT_VARIABLE) == before


def test_the_environment_after_a_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a launch is known to write is restored. Everything else is the host's, also what it sets meanwhile."""
    for name, value in {"KEPT": "1", "CHANGED": "1", "REMOVED": "1", "WRITTEN": "1", "OURS": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("CREATED", raising=False)
    monkeypatch.setenv("ADDED", "")
    monkeypatch.setenv("TAKEN", "")
    before = dict(os.environ)
    with launch_environment({"WRITTEN", "CREATED"}, {"OURS": "2", "TAKEN": "2"}):
        assert (os.environ["OURS"], os.environ["TAKEN"]) == ("2", "2")
        os.environ.update(WRITTEN="2", CREATED="2", CHANGED="2", ADDED="2", TAKEN="3")
        del os.environ["REMOVED"]
    after = {**before, "CHANGED": "2", "ADDED": "2", "TAKEN": "3"}
    del after["REMOVED"]
    assert dict(os.environ) == after
    monkeypatch.setenv("REMOVED", "1")


def test_a_launch_that_waits_for_its_turn_can_be_abandoned() -> None:
    """Otherwise a cancelled start would wait for the whole start of another engine."""
    lock, abandoned = LaunchLock(), threading.Event()
    abandoned.set()
    with lock.held(threading.Event()), pytest.raises(EngineStartError, match="was cancelled"), lock.held(abandoned):
        pass
    with lock.held(abandoned):
        pass


def test_a_lock_that_another_thread_holds_is_free_in_a_fork() -> None:
    """The thread that would release the lock does not run in the child."""
    code = f"""
import os, threading
from {fork_safe.__module__} import fork_safe
lock = fork_safe(threading.RLock())
held = threading.Event()
def hold():
    with lock:
        held.set()
        threading.Event().wait()
threading.Thread(target=hold, daemon=True).start()
held.wait()
if (pid := os.fork()) == 0:
    os._exit(7 if lock.acquire(timeout=60) else 1)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout == "7\n"
