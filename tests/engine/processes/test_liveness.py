"""Watching real processes: what they use, whether they are stopped, and their end when they hang."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import psutil
import pytest
import virtual_time
from polling import until

from weft.core.errors import EngineDiedError, EngineError
from weft.core.routing.liveness import ProcessUsage
from weft.engine.processes.tree import kill_tree, tree_of, until_stuck, usage_of

IDLE = ProcessUsage(0.0, is_stopped=False)
LIMIT_S = 100.0


class Asked:
    """An engine that answers each ping with the next of some errors, or at all; then never again."""

    def __init__(self, *answers: Exception | None) -> None:
        self.answers = list(answers)
        self.waiting = 0

    async def __call__(self) -> None:
        if self.answers:
            error = self.answers.pop(0)
            if error is not None:
                raise error
            return
        self.waiting += 1
        try:
            await asyncio.Event().wait()
        finally:
            self.waiting -= 1


async def stuck_at(asked: Asked, usage: ProcessUsage = IDLE) -> float:
    await until_stuck(asked, lambda: usage, LIMIT_S)
    return asyncio.get_running_loop().time()


def test_an_engine_that_no_longer_answers_is_stuck_after_the_limit() -> None:
    """One ping is under way at a time, and none is left."""
    asked = Asked(None, None)
    at_s = virtual_time.run(stuck_at(asked))
    assert LIMIT_S <= at_s <= 1.5 * LIMIT_S
    assert asked.waiting == 0


def test_an_error_is_an_answer() -> None:
    """The scheduler has handled the message, so it lives."""
    asked = Asked(*[EngineError("cannot")] * 50)
    assert virtual_time.run(stuck_at(asked)) > 5 * LIMIT_S


def test_the_watch_ends_with_its_engine() -> None:
    """A death is treated elsewhere."""
    with pytest.raises(EngineDiedError):
        virtual_time.run(stuck_at(Asked(None, EngineDiedError())))


def test_a_watch_that_is_cancelled_leaves_no_ping() -> None:
    """The engine is shut down while a ping is under way."""
    asked = Asked()

    async def cancel() -> None:
        watching = asyncio.ensure_future(stuck_at(asked))
        await asyncio.sleep(LIMIT_S / 2)
        watching.cancel()
        await asyncio.wait([watching])
        await asyncio.sleep(0)

    virtual_time.run(cancel())
    assert asked.waiting == 0


_PARENT = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])"
_SPIN = "while True: pass"
_SLEEP = "import time; time.sleep(600)"


@pytest.fixture(params=[_SPIN, _SLEEP], ids=["spins", "sleeps"])
def parent(request: pytest.FixtureRequest) -> Iterator[psutil.Process]:
    """A process that waits for a child, which spins or sleeps."""
    started = subprocess.Popen([sys.executable, "-c", _PARENT, request.param])
    process = psutil.Process(started.pid)
    yield process
    for each in [*process.children(), process]:
        each.kill()
    started.wait()


@pytest.mark.anyio
async def test_the_cpu_time_of_children_counts(parent: psutil.Process, request: pytest.FixtureRequest) -> None:
    """A worker computes while the engine process waits for it."""
    await until(lambda: len(tree_of([parent.pid])) == 2)
    child = tree_of([parent.pid])[1]
    if "spins" in request.node.name:
        before_s = usage_of([parent.pid]).cpu_s
        await until(lambda: usage_of([parent.pid]).cpu_s > before_s + 0.1)
    assert not usage_of([parent.pid]).is_stopped
    os.kill(child, signal.SIGSTOP)
    await until(lambda: usage_of([parent.pid]).is_stopped)
    stopped_at_s = usage_of([parent.pid]).cpu_s
    assert usage_of([parent.pid]).cpu_s == stopped_at_s


def test_a_process_that_has_ended_uses_nothing() -> None:
    """Its number leads nowhere."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    assert usage_of([ended.pid]) == IDLE


def _with_child() -> None:
    subprocess.run([sys.executable, "-c", _SLEEP], check=False)


@pytest.mark.anyio
async def test_a_stopped_tree_is_killed_and_nothing_else() -> None:
    """SIGKILL ends a process that is stopped. A process of the host with the same parent goes on."""
    context = multiprocessing.get_context("spawn")
    engine, other = context.Process(target=_with_child), context.Process(target=time.sleep, args=(600,))
    engine.start()
    other.start()
    try:
        await until(lambda: len(tree_of([engine.pid or 0])) == 2)
        tree = [psutil.Process(pid) for pid in tree_of([engine.pid or 0])]
        for process in tree:
            process.suspend()
        kill_tree([engine])
        engine.join()
        _, alive = psutil.wait_procs(tree, timeout=60)
        assert alive == []
        assert engine.exitcode == -signal.SIGKILL
        assert other.is_alive()
    finally:
        for process in (engine, other):
            process.kill()
            process.join()
