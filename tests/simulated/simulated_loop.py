"""Event loops that share one virtual clock, and whose order of events a seed decides.

asyncio promises that callbacks of a loop run in the order in which they were made. It promises nothing of which of two
tasks that can go on goes first, nor of which of two loops, nor of timers of the same moment. All this is drawn from the
seed here. No real time passes and nothing is read from a socket. A thread is a function that runs after a drawn pause,
in one piece, and hands its result over as a real one does. In some worlds, other loops also go on before a piece of
code takes a lock, after it has let one go, or after it has handed something to another thread, as threads do. So a seed
always gives the same events in the same order.
"""

from __future__ import annotations

import asyncio
import hashlib
import heapq
import itertools
import random
import sys
import threading
from asyncio import events
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from types import SimpleNamespace
from typing import Any, Final

from weft.core.locks import fork_safe
from weft.engine.processes.loop_thread import LoopThread, _cancel_other_tasks

MOST_S: Final = 600.0  # of virtual time, that code outside of the loops waits for one of them
TICK_S: Final = 1 / 1024  # what the simulation waits for is a multiple of it, so that two things often happen at once
MOST_BUSY_S: Final = 0.5  # that the clock goes on while something could happen


class DeadlockError(Exception):
    """Every task waits and no timer is set, or what is waited for does not come."""


class _NumberedTask(asyncio.Task[Any]):
    """A task whose place in a set does not depend on its address, which differs from run to run."""

    def __init__(self, coroutine: Any, *, loop: SimulatedLoop, number: int, **options: Any) -> None:
        self.number = number
        of = getattr(coroutine, "__qualname__", type(coroutine).__name__)
        super().__init__(coroutine, loop=loop, name=f"{loop.name}.{number} {of}", **options)

    def __hash__(self) -> int:
        return self.number


class _NumberedFuture(asyncio.Future[Any]):
    def __init__(self, loop: SimulatedLoop, number: int) -> None:
        self.number = number
        super().__init__(loop=loop)

    def __hash__(self) -> int:
        return self.number


class SimulatedLoop(asyncio.BaseEventLoop):
    """One of the event loops of a `World`, which runs it.

    Args:
        world: What it belongs to.
        name: Shown in the log of events.
    """

    def __init__(self, world: World, name: str) -> None:
        super().__init__()
        self.world, self.name = world, name
        self.callbacks: deque[asyncio.Handle] = deque()  # in their order
        self.steps: list[asyncio.Handle] = []  # of tasks that can go on, in any order
        self.sleeps_until_s = 0.0  # it runs nothing before that
        self.set_task_factory(self._make_task)
        self.set_exception_handler(lambda _loop, context: world.complain(context["message"], context.get("exception")))

    def _make_task(self, loop: Any, coroutine: Any, **options: Any) -> asyncio.Task[Any]:
        return _NumberedTask(coroutine, loop=loop, number=next(self.world.numbers), **options)

    def create_future(self) -> asyncio.Future[Any]:
        return _NumberedFuture(self, next(self.world.numbers))

    def time(self) -> float:
        return self.world.now_s

    def call_soon(self, callback: Any, *args: Any, context: Any = None) -> asyncio.Handle:  # type: ignore[override]
        self._check_closed()
        handle = asyncio.Handle(callback, args, self, context)
        (self.steps if task_of(handle) is not None else self.callbacks).append(handle)
        return handle

    call_soon_threadsafe = call_soon  # type: ignore[assignment]

    def call_at(self, when: float, callback: Any, *args: Any, context: Any = None) -> asyncio.TimerHandle:  # type: ignore[override]
        self._check_closed()
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        self.world.add_timer(when, timer)
        return timer

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """The world drops it when its time comes."""

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        del executor
        future = self.create_future()

        def run() -> None:
            try:
                outcome, deliver = func(*args), future.set_result
            except Exception as error:
                outcome, deliver = error, future.set_exception
            if not self.is_closed():
                self.call_soon(lambda: None if future.done() else deliver(outcome))

        self.world.call_later(self.world.pause_s(8), run)
        return future

    def close(self) -> None:
        super().close()
        self.callbacks.clear()
        self.steps.clear()


class SimulatedLock:
    """A lock of a simulated world, which has one real thread: nobody ever waits for it. Who is about to take it, and
    has no other one, may be interrupted, and so may who has let it go.

    Args:
        world: Interrupts.
        lock: The real one.
    """

    def __init__(self, world: World, lock: Any) -> None:
        self._world, self._lock = world, lock

    def acquire(self) -> bool:
        self._world.switch()
        self._world.locks_held += 1
        self._lock.acquire()
        if self._world.at_lock is not None:
            self._world.at_lock(is_held=True)
        return True

    def release(self) -> None:
        self._world.locks_held -= 1
        self._lock.release()
        if self._world.is_in_event:  # not where a check looks
            self._world.interrupt(self._world.switches_after)

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


def task_of(handle: asyncio.Handle) -> asyncio.Task[Any] | None:
    """The task whose next step this is; None if it is another callback."""
    owner = getattr(handle._callback, "__self__", None)
    is_step = isinstance(owner, asyncio.Task) and getattr(handle._callback, "__name__", "") != "cancel"
    return owner if is_step else None


class World:
    """A virtual clock, the loops that run by it, and the one thread that runs them.

    Args:
        seed: Of the order of events.
        trace: Gets each event as a line; None: nobody reads them.

    Attributes:
        now_s: Seconds since the start.
        stopped_s: How many of these the host stood still, at least.
        turns: How many events have taken place.
        complaints: What loops reported that nobody handled.
    """

    def __init__(self, seed: int, trace: Callable[[str], object] | None = None) -> None:
        self.rng = random.Random(f"order {seed}")
        self.now_s = self.stopped_s = 0.0
        self.turns = 0
        self.numbers = itertools.count(1)
        self.loops: list[SimulatedLoop] = []
        self.complaints: list[str] = []
        self.busy = self.rng.choice([0.0, 0.0, 0.01, 0.05])  # how often time passes although something can go on
        self.before_turn: Callable[[], object] = lambda: None
        self.threads = random.Random(f"threads {seed}")
        # How often a thread is interrupted where it may be.
        self.switches = self.threads.choice([0.0, 0.0, 0.02, 0.3])
        # The same, after it has let a lock go. These came later, and leave the lives of other seeds as they were.
        after = random.Random(f"threads after locks {seed}").choice([0.0, 0.0, 0.0, 0.1, 0.5])
        self.switches_after = after if self.switches else 0.0
        self.at_lock: Callable[..., object] | None = (
            None  # called where threads are interrupted, and when a lock is held
        )
        self.locks_held = 0
        self._is_switching = False
        self._running: list[Any] = []  # loops, of which the last one has interrupted those before it
        self._outside = SimulatedLoop(self, "outside")  # what runs on no loop: threads, processes, the network
        self._timers: list[tuple[float, int, asyncio.Handle]] = []
        self._due: list[asyncio.Handle] = []
        self._due_s = 0.0  # when they were to run
        self._digest = hashlib.blake2b(digest_size=16)
        self._trace = trace

    def close(self) -> None:
        """Close the loops."""
        for loop in (*self.loops, self._outside):
            loop.close()

    # -- what is to happen

    def new_loop(self, name: str) -> SimulatedLoop:
        """A loop that runs by the world's clock."""
        self.loops.append(SimulatedLoop(self, name))
        return self.loops[-1]

    def add_timer(self, when_s: float, handle: asyncio.Handle) -> None:
        """Run a callback at a time."""
        heapq.heappush(self._timers, (when_s, next(self.numbers), handle))

    def call_later(self, seconds: float, function: Callable[[], object]) -> asyncio.TimerHandle:
        """Run a function outside of all loops, as a thread or another process would."""
        return self._outside.call_at(self.now_s + seconds, function)

    def pause_s(self, most_ticks: int) -> float:
        """A pause that is drawn: 0 or some ticks."""
        return self.rng.randrange(most_ticks + 1) * TICK_S

    def put_to_sleep(self, seconds: float) -> None:
        """Stop all loops for a while, as when the host is stopped. What is outside of them goes on."""
        self.stopped_s += seconds
        for loop in self.loops:
            loop.sleeps_until_s = self.now_s + seconds
        self.call_later(seconds, lambda: None)

    def jump(self, seconds: float) -> None:
        """Let a time pass in which nothing runs at all, as when the machine is suspended."""
        self.now_s += seconds
        self.stopped_s += seconds

    # -- what has happened

    @property
    def is_in_event(self) -> bool:
        """Whether code of a loop or of a thread runs now, and not the simulation itself."""
        return bool(self._running)

    def note(self, line: str) -> None:
        """Add a line to the log of events."""
        line = f"{self.turns} {self.now_s:.6f} {line}"
        self._digest.update(line.encode(errors="replace") + b"\n")
        if self._trace is not None:
            self._trace(line)

    def complain(self, message: str, error: BaseException | None = None) -> None:
        """Something went wrong that nobody handles."""
        self.complaints.append(f"{message}: {error!r}" if error is not None else message)

    @property
    def digest(self) -> str:
        """Of all events so far."""
        return self._digest.hexdigest()

    # -- running

    def run_until(self, is_over: Callable[[], bool], limit_s: float = float("inf")) -> bool:
        """Run until `is_over`, or until the clock shows `limit_s`.

        Returns:
            Whether it is over.

        Raises:
            DeadlockError: Nothing will happen any more.
        """
        while not is_over():
            if self.now_s >= limit_s:
                return False
            self._turn()
        return True

    def run_for(self, is_over: Callable[[], bool], most_s: float) -> None:
        """Run until `is_over`, which must be soon.

        Raises:
            DeadlockError: It is not over after `most_s` seconds of virtual time.
        """
        if not self.run_until(is_over, self.now_s + most_s):
            raise DeadlockError(f"nothing has come of it for {most_s:g} s: {self.waits()}")

    def run(self, loop: SimulatedLoop, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine on a loop to its end."""
        task = loop.create_task(coroutine)
        self.run_until(task.done)
        return task.result()

    @property
    def tasks(self) -> list[asyncio.Task[Any]]:
        """Those that have not ended, on all loops."""
        found = (task for loop in self.loops for task in asyncio.all_tasks(loop))
        return sorted(found, key=lambda task: task.number)  # type: ignore[attr-defined]

    def _turn(self) -> None:
        self.before_turn()
        handle = self._next()
        if handle._cancelled:
            return
        self._run(handle)

    def _run(self, handle: asyncio.Handle) -> None:
        self.turns += 1
        task = task_of(handle)
        loop: Any = handle._loop
        self.note(f"{loop.name}: {task.get_name() if task is not None else _name(handle._callback)}")
        before, hooks = events._get_running_loop(), sys.get_asyncgen_hooks()
        self._running.append(loop)
        if loop is not self._outside:
            sys.set_asyncgen_hooks(firstiter=None, finalizer=loop._asyncgen_finalizer_hook)
            events._set_running_loop(loop)
        try:
            handle._run()
        finally:
            events._set_running_loop(before)
            sys.set_asyncgen_hooks(*hooks)
            self._running.pop()

    def switch(self) -> None:
        """The thread that runs is interrupted here, if the seed says so, and event loops on other threads go on."""
        if self.at_lock is not None:
            self.at_lock(is_held=bool(self.locks_held))
        self.interrupt(self.switches)

    def interrupt(self, how_often: float) -> None:
        """Interrupt the thread that runs in such a share of cases, unless it holds a lock."""
        if not how_often or self.locks_held or self._is_switching or self.threads.random() >= how_often:
            return
        self._is_switching = True
        try:
            for _ in range(self.threads.choice([1, 3, 10, 30])):
                idle = [loop for loop in self.loops if loop not in self._running]
                others = [loop for loop in idle if loop.sleeps_until_s <= self.now_s]
                counts = [bool(loop.callbacks) + len(loop.steps) for loop in others]
                if not sum(counts):
                    break
                handle = self._chosen(others, counts, self.threads.randrange(sum(counts)))
                if not handle._cancelled:
                    self._run(handle)
        finally:
            self._is_switching = False

    def lock(self, lock: Any) -> SimulatedLock:
        """A lock before which threads are interrupted."""
        return SimulatedLock(self, fork_safe(lock))

    def _next(self) -> asyncio.Handle:
        """Take what happens next: the seed chooses."""
        while True:
            can_go_on = [loop for loop in self.loops if loop.callbacks or loop.steps]
            ready = [loop for loop in can_go_on if loop.sleeps_until_s <= self.now_s]
            is_idle = not (ready or self._due)
            if self._timers and (is_idle or (self.busy and self.rng.random() < self.busy)):
                next_s = self._timers[0][0]
                if is_idle or next_s <= self.now_s + MOST_BUSY_S:
                    self.now_s = max(self.now_s, next_s)
            # Timers of one moment run in any order, and all that are due after a jump in theirs.
            while self._timers and self._timers[0][0] <= (self.now_s if not self._due else self._due_s):
                when_s, number, handle = heapq.heappop(self._timers)
                wakes_s = getattr(handle._loop, "sleeps_until_s", 0.0)
                if handle._cancelled or handle._loop.is_closed():
                    continue
                if wakes_s > self.now_s:
                    heapq.heappush(self._timers, (wakes_s, number, handle))
                else:
                    self._due_s = when_s
                    self._due.append(handle)
            counts = [len(self._due), *(bool(loop.callbacks) + len(loop.steps) for loop in ready)]
            total = sum(counts)
            if total:
                break
            if not self._timers:
                raise DeadlockError(f"{len(self.tasks)} tasks wait, and no timer is set: {self.waits()}")
        chosen = self.rng.randrange(total) if total > 1 else 0
        if chosen < counts[0]:
            return self._due.pop(chosen)
        return self._chosen(ready, counts[1:], chosen - counts[0])

    def _chosen(self, loops: Sequence[SimulatedLoop], counts: Sequence[int], chosen: int) -> asyncio.Handle:
        """Take one of the events that loops may run now, of which each has so many."""
        for loop, count in zip(loops, counts, strict=True):
            if chosen < count:
                return loop.callbacks.popleft() if chosen == len(loop.steps) else loop.steps.pop(chosen)
            chosen -= count
        raise AssertionError("unreachable")

    def waits(self) -> str:
        """Where each task waits."""
        return "; ".join(f"{task.get_name()} at {_place(task)}" for task in self.tasks)


def _place(task: asyncio.Task[Any]) -> str:
    frame = next(iter(task.get_stack(limit=1)), None)
    return f"{frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_lineno}" if frame is not None else "its end"


def _name(callback: Any) -> str:
    while hasattr(callback, "func"):
        callback = callback.func
    return str(getattr(callback, "__qualname__", type(callback).__name__))


class SimulatedLoopThread(LoopThread):
    """The engine's event loop, without a thread. Who waits for it from outside runs the world meanwhile.

    Args:
        world: What it belongs to.
        name: Of the engine.
    """

    def __init__(self, world: World, name: str) -> None:
        self._world = world
        self._loop = world.new_loop(name)
        self._lock: Any = world.lock(threading.Lock())
        self._is_stopping = False

    def submit(self, coroutine: Coroutine[Any, Any, Any]) -> Future[Any]:
        future = super().submit(coroutine)
        self._world.switch()
        is_endless = coroutine.__name__ == "_keep_open"
        if events._get_running_loop() is None and not is_endless:  # the caller blocks until the future is done
            self._world.run_for(future.done, MOST_S)
        return future

    def call_soon(self, function: Callable[[], object]) -> None:
        super().call_soon(function)
        self._world.switch()

    def stop(self) -> None:
        if not self._is_stopping:
            self._is_stopping = True
            ending = self._loop.create_task(_cancel_other_tasks())
            self._world.run_for(ending.done, MOST_S)
            self._loop.close()


def simulated_threading(world: World) -> Any:
    """Takes the place of the module `threading` where code under test starts a thread for something that blocks.

    Most threads take milliseconds, and some of them seconds. Who waits for one runs the world meanwhile.
    """

    def thread(*, target: Callable[..., object], args: tuple[Any, ...] = (), **_: Any) -> Any:
        most_ticks = world.rng.choice([8, 8, 3000])
        return SimpleNamespace(start=lambda: world.call_later(world.pause_s(most_ticks), partial(target, *args)))

    class Condition:
        def __init__(self, lock: Any) -> None:
            self._lock = lock

        def __enter__(self) -> None:
            self._lock.acquire()

        def __exit__(self, *_: object) -> None:
            self._lock.release()

        def wait_for(self, predicate: Callable[[], bool], timeout: float) -> bool:
            with suppress(DeadlockError):
                world.run_until(predicate, world.now_s + timeout)
            return predicate()

        def notify_all(self) -> None:
            """Who waits looks again by itself."""

    class Timer:
        daemon = True

        def __init__(self, interval: float, function: Callable[..., object], args: tuple[Any, ...] = ()) -> None:
            self.interval, self.function, self.args = interval, function, args
            self._is_cancelled = False

        def start(self) -> None:
            world.call_later(self.interval, self._end)

        def cancel(self) -> None:
            self._is_cancelled = True

        def _end(self) -> None:
            if not self._is_cancelled:
                self.function(*self.args)

    locks = {"Lock": threading.Lock, "RLock": threading.RLock}
    return SimpleNamespace(Thread=thread, Timer=Timer, Condition=Condition, Event=threading.Event, **locks)
