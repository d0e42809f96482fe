"""What goes wrong in a simulated life: which faults a seed means, and how each of them is done."""

from __future__ import annotations

import asyncio
import inspect
import os
import random
import signal
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from simulated_disk import FAULTS
from simulated_loop import TICK_S, task_of
from simulated_replica import EngineProcess

import weft
from weft.core.errors import EngineForkedError, WeftError

if TYPE_CHECKING:
    from simulated_life import Life

# By kind: how often it comes.
KINDS: Final = {
    "kill": 3,
    "crash": 1,  # a replica dies with a last message
    "hang": 2,
    "freeze": 1,  # a hang that ends
    "slow": 1,
    "late": 1,  # messages to a replica and from it
    "cancel": 4,  # a call, by its client
    "leave": 2,  # a client gives up, and with it its program
    "end": 2,  # a program is ended from outside
    "remove": 1,
    "add": 1,
    "start_fails": 1,
    "start_hangs": 1,
    "copies_fail": 1,  # to and from a replica's host memory, some of them
    "reset": 1,  # a replica forgets all KV
    "disk": 1,  # no trace and no history can be written, for a while
    "shutdown": 0.3,
}
# Those that came later, and leave the lives of seeds that have none of them as they were.
LATER_KINDS: Final = (
    "pause",  # the host is stopped for a while, and its replicas go on
    "jump",  # the machine is suspended
)
# Those that came last. They wait for their moment.
LAST_KINDS: Final = (
    "cut",  # a program is ended just when a call of it would go on at a certain place
    "remove_start",  # a replica is removed just when it is started again
    "kill_taken",  # a replica that gives a call back, or another one, dies or is removed at once
    "race",  # a program is ended by another thread, while a thread is about to take a lock
    "fork",  # the host process forks, perhaps while it holds a lock, and the child uses the engine
)
# Those that came after these, in every third life, so that the others are as they were.
NEWEST_KINDS: Final = (
    "guest",  # another client of a replica has a call of a program there
    "lose_thief",  # a replica is removed just when a call moves to it
)


class Fault(NamedTuple):
    """Something that goes wrong.

    Attributes:
        turn: Before which turn of the world.
        kind: A key of `KINDS`, or one of `LATER_KINDS`, `LAST_KINDS` or `NEWEST_KINDS`.
        number: Chooses what it happens to.
    """

    turn: int
    kind: str
    number: int


def faults_of(seed: int) -> list[Fault]:
    """The faults of a life, in their order. Some come two at once."""
    rng = random.Random(f"faults {seed}")
    kinds, weights = list(KINDS), list(KINDS.values())
    turns = [rng.randrange(rng.choice([200, 1500, 4000])) for _ in range(rng.choice([0, 1, 2, 4, 8]))]
    turns += [turn for turn in turns if rng.random() < 0.25]
    faults = [Fault(turn, rng.choices(kinds, weights)[0], rng.randrange(1 << 16)) for turn in turns]
    for name, of_kinds, numbers in (
        ("later", LATER_KINDS, [0, 0, 0, 1, 2]),
        ("last", LAST_KINDS, [0, 0, 1, 2, 4]),
        ("newest", NEWEST_KINDS, [0, 0, 0, 0, 1, 3]),
    ):
        rng = random.Random(f"{name} faults {seed}")
        number = rng.choice(numbers)
        faults += [Fault(rng.randrange(1500), rng.choice(of_kinds), rng.randrange(1 << 16)) for _ in range(number)]
    return sorted(faults)


class Faults:
    """Does to a life what goes wrong in it.

    Args:
        life: The life.
        faults: In their order.

    Attributes:
        happened: The kinds of those that met something so far.
    """

    def __init__(self, life: Life, faults: list[Fault]) -> None:
        self._life = life
        self._left = list(faults)
        self._armed: list[tuple[str, Callable[[], bool]]] = []  # wait for their moments, of which each looks
        self.happened: list[str] = []

    def before(self, turn: int) -> None:
        """Do what is due before a turn."""
        while self._left and self._left[0].turn <= turn:
            fault = self._left.pop(0)
            self._life.world.note(f"fault: {fault.kind}")
            if getattr(self, f"_{fault.kind}")(random.Random(fault.number)) is not False:
                self.happened.append(fault.kind)
        if self._armed:
            met = [each for each in self._armed if each[1]()]
            self._armed = [each for each in self._armed if each not in met]
            self.happened += [kind for kind, _ in met]
            for kind, _ in met:
                self._life.world.note(f"fault: {kind} now")

    def end(self) -> None:
        """Nothing more goes wrong, and what hangs goes on."""
        self._left, self._armed = [], []
        self._life.world.at_lock = None
        self._life.disk.fault = ""
        for process in self._life.launcher.processes:
            if process.worker.has_memory:
                process.worker.fails = lambda: False
            process.resume()

    # Each of these returns False if there is nothing that it could happen to.

    def _kill(self, rng: random.Random) -> Any:
        return self._to_process(rng, lambda process: process.kill())

    def _crash(self, rng: random.Random) -> Any:
        return self._to_process(rng, lambda process: process.crash())

    def _hang(self, rng: random.Random) -> Any:
        return self._to_process(rng, lambda process: process.hang())

    def _freeze(self, rng: random.Random) -> Any:
        def freeze(process: EngineProcess) -> None:
            process.hang()
            self._life.world.call_later(rng.randrange(1, 20_000) * TICK_S, process.resume)

        return self._to_process(rng, freeze)

    def _slow(self, rng: random.Random) -> Any:
        def slow(process: EngineProcess) -> None:
            process.step_s *= 30

        return self._to_process(rng, slow)

    def _late(self, rng: random.Random) -> Any:
        def late(process: EngineProcess) -> None:
            process.inputs.late_ticks = process.outputs.late_ticks = 300

        return self._to_process(rng, late)

    def _copies_fail(self, rng: random.Random) -> Any:
        def fail(process: EngineProcess) -> None:
            if process.worker.has_memory:
                process.worker.fails = lambda: rng.random() < 0.3

        return self._life.swap is not None and self._to_process(rng, fail)

    def _reset(self, rng: random.Random) -> Any:
        running, host = rng.random() < 0.5, rng.random() < 0.5
        return self._to_process(rng, lambda process: process.reset(running=running, host=host))

    def _disk(self, rng: random.Random) -> Any:
        disk = self._life.disk
        disk.fault = rng.choice(list(FAULTS))

        def repair() -> None:
            disk.fault = ""

        self._life.world.call_later(rng.randrange(1, 20_000) * TICK_S, repair)

    def _to_process(self, rng: random.Random, do: Callable[[EngineProcess], object]) -> bool:
        alive = [process for process in self._life.launcher.processes if process.is_alive()]
        if alive:
            do(rng.choice(alive))
        return bool(alive)

    def _cancel(self, rng: random.Random) -> Any:
        return _cancel_one(rng, [task for client in self._life.clients for task in client.calls.values()])

    def _leave(self, rng: random.Random) -> Any:
        return _cancel_one(rng, self._life.running)

    def _end(self, rng: random.Random) -> Any:
        rows = list(self._life.engine.table)
        return bool(rows) and self._life.engine.end_program(rng.choice(rows).info.program_id)

    def _remove(self, rng: random.Random) -> Any:
        engine_id = rng.choice(self._life.health()).engine_id
        timeout_s = rng.choice([0.0, 0.5, None])
        self._operate(lambda: self._life.engine.remove_replica(engine_id, timeout_s))

    def _add(self, rng: random.Random) -> Any:
        del rng
        self._operate(self._life.engine.add_replica)

    def _operate(self, operate: Callable[[], Coroutine[Any, Any, Any]]) -> None:
        self._operate_on(self._life.users, operate)

    def _operate_on(self, loop: asyncio.AbstractEventLoop, operate: Callable[[], Coroutine[Any, Any, Any]]) -> None:
        async def tried() -> None:
            try:
                await operate()
            except WeftError as error:
                self._life.world.note(f"operation: {type(error).__name__}")

        self._life.running.append(loop.create_task(tried()))

    def _start_fails(self, rng: random.Random) -> Any:
        del rng
        self._life.launcher.starts.append("fail")

    def _start_hangs(self, rng: random.Random) -> Any:
        del rng
        self._life.launcher.starts.append("hang")

    def _pause(self, rng: random.Random) -> Any:
        self._life.world.put_to_sleep(rng.choice([0.1, 3.0, 10.0, 30.0]) * rng.random())

    def _jump(self, rng: random.Random) -> Any:
        self._life.world.jump(rng.choice([1.0, 10.0, 40.0]) * rng.random())

    def _cut(self, rng: random.Random) -> Any:
        engine: Any = self._life.engine
        queue, skips = next(iter(engine._groups.values()))._queue, rng.randrange(20)

        def cut_waiting() -> bool:
            waiting = [each for each in queue._waiting if not each.assigned.done()]
            for each in waiting:  # one that waits for a replica is cut when it gets one
                program_id = each.arrival.program_id
                each.assigned.add_done_callback(lambda _, program_id=program_id: engine.end_program(program_id))
            return bool(waiting)

        def cut() -> bool:
            nonlocal skips
            ready = {task_of(each) for each in engine._loop._loop.steps}
            for call in list(engine._in_flight._calls.values()) if ready else ():
                if any(task is not None and task.get_coro().cr_frame.f_locals.get("call") is call for task in ready):
                    skips -= 1
                    return skips < 0 and bool(engine.end_program(call.program.program_id))
            return False

        def cut_new() -> bool:
            starting = {task_of(each) for each in self._life.users.steps}
            for client in self._life.clients if self._life.door == "engine" else ():
                for task in starting & set(client.calls.values()):
                    if inspect.getcoroutinestate(task.get_coro()) == inspect.CORO_CREATED:
                        return bool(engine.end_program(client.program.program_id))
            return False

        chosen = rng.choice([cut_waiting, cut, cut_new])
        if chosen is cut_waiting:  # nobody waits long as long as there is a replica
            for process in self._life.launcher.processes:
                process.kill()
        self._armed.append(("cut", chosen))
        return False

    def _remove_start(self, rng: random.Random) -> Any:
        group = next(iter(self._life.engine._groups.values()))
        loop = self._life.engine._loop._loop

        def remove() -> bool:
            for task in filter(None, map(task_of, loop.steps)):
                coroutine = task.get_coro()
                if coroutine.__name__ == "_restart" and inspect.getcoroutinestate(coroutine) == inspect.CORO_CREATED:
                    engine_id = coroutine.cr_frame.f_locals["replica"].engine_id
                    timeout_s = rng.choice([0.0, None])
                    self._operate_on(loop, partial(group.supervisor.remove, engine_id, timeout_s))
                    return True
            return False

        self._armed.append(("remove_start", remove))
        return False

    def _kill_taken(self, rng: random.Random) -> Any:
        engine: Any = self._life.engine
        events = self._life.history.events
        looked_at = len(events)

        def remove(_: random.Random) -> None:
            engine_id = rng.choice(self._life.health()).engine_id
            group = next(iter(engine._groups.values()))
            self._operate_on(engine._loop._loop, lambda: group.supervisor.remove(engine_id, None))

        def kill() -> bool:
            nonlocal looked_at
            new, looked_at = events[looked_at:], len(events)
            if all(event.kind != "taken" for event in new):
                return False
            does = rng.choice([self._kill, self._crash, remove, remove])
            self._life.world.call_later(rng.randrange(4) * TICK_S, lambda: does(rng))
            return True

        self._armed.append(("kill_taken", kill))
        return False

    def _guest(self, rng: random.Random) -> Any:
        """A program may end while the call runs. Its replica then forgets it when the call has ended."""
        alive = [process for process in self._life.launcher.processes if process.is_alive()]
        known = [(process, program_id) for process in alive for program_id in process.programs()]
        if known:
            process, program_id = rng.choice(known)
            process.ask(program_id, rng.randrange(1, 100))
        return bool(known)

    def _lose_thief(self, rng: random.Random) -> Any:
        engine: Any = self._life.engine
        group = next(iter(engine._groups.values()))

        def lose() -> bool:
            moving = (each for calls in group.llm.unanswered._calls.values() for each in calls.values())
            thief = next((each.moves_to for each in moving if each.moves_to is not None), None)
            if thief is not None:
                timeout_s = rng.choice([0.0, None])
                self._operate_on(engine._loop._loop, lambda: group.supervisor.remove(thief, timeout_s))
            return thief is not None

        self._armed.append(("lose_thief", lose))
        return False

    def _race(self, rng: random.Random) -> Any:
        left = rng.randrange(60)

        def race(*, is_held: bool) -> None:
            nonlocal left
            left -= not is_held
            if left < 0 and not is_held:
                self._life.world.at_lock = None
                rows = sorted(self._life.engine.table, key=lambda row: row.last_arrival_s)
                if rows:  # often that of the call which the thread brings
                    row = rows[-1] if rng.random() < 0.7 else rng.choice(rows)
                    self._life.engine.end_program(row.info.program_id)
                    self.happened.append("race")

        self._life.world.at_lock = race
        return False

    def _fork(self, rng: random.Random) -> Any:
        left = rng.randrange(60)

        def fork(*, is_held: bool) -> None:
            nonlocal left
            left -= 1
            if left < 0 and is_held:
                self._life.world.at_lock = None
                self._life.problems += in_a_child(self._life)
                self.happened.append("fork")

        self._life.world.at_lock = fork
        return False

    def _shutdown(self, rng: random.Random) -> Any:
        del rng
        self._life.wants_shutdown = True


def in_a_child(life: Life) -> list[str]:
    """What is wrong with the engine in a forked child. It must say that it is not the child's, whatever locks others
    held."""
    read, write = os.pipe()
    child = os.fork()
    if child:
        os.close(write)
        with os.fdopen(read, "rb") as file:
            said = file.read().decode()
        os.waitpid(child, 0)
        return [] if said == "as it should" else [f"in a forked child: {said or 'it hung'}"]
    try:
        signal.alarm(20)
        os.write(write, _child_says(life).encode())
    finally:
        os._exit(0)


def _child_says(life: Life) -> str:
    engine = life.engine
    program = weft.Program("child")
    program_ids = [row.info.program_id for row in engine.table]
    try:
        engine.chat_sync({"messages": [{"role": "user", "content": "x"}]}, program, program.reports.start_call("child"))
    except EngineForkedError:
        pass
    except BaseException as error:
        return repr(error)
    for program_id in program_ids:
        engine.end_program(program_id)
    if [row.info.program_id for row in engine.table] != program_ids:
        return "it has ended the programs of its parent"
    return "as it should" if not engine.is_alive else "it is alive"


def _cancel_one(rng: random.Random, tasks: Sequence[asyncio.Task[Any]]) -> bool:
    running = [task for task in tasks if not task.done()]
    return bool(running) and rng.choice(running).cancel()
