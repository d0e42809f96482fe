"""What goes wrong in a simulated life: which faults a seed means, and how each of them is done."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from simulated_disk import FAULTS
from simulated_loop import TICK_S
from simulated_replica import EngineProcess

from weft.core.errors import WeftError

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


class Fault(NamedTuple):
    """Something that goes wrong.

    Attributes:
        turn: Before which turn of the world.
        kind: A key of `KINDS`, or one of `LATER_KINDS`.
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
    later = random.Random(f"later faults {seed}")
    number = later.choice([0, 0, 0, 1, 2])
    faults += [Fault(later.randrange(1500), later.choice(LATER_KINDS), later.randrange(1 << 16)) for _ in range(number)]
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
        self.happened: list[str] = []

    def before(self, turn: int) -> None:
        """Do what is due before a turn."""
        while self._left and self._left[0].turn <= turn:
            fault = self._left.pop(0)
            self._life.world.note(f"fault: {fault.kind}")
            if getattr(self, f"_{fault.kind}")(random.Random(fault.number)) is not False:
                self.happened.append(fault.kind)

    def end(self) -> None:
        """Nothing more goes wrong, and what hangs goes on."""
        self._left = []
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
        async def tried() -> None:
            try:
                await operate()
            except WeftError as error:
                self._life.world.note(f"operation: {type(error).__name__}")

        self._life.running.append(self._life.users.create_task(tried()))

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

    def _shutdown(self, rng: random.Random) -> Any:
        del rng
        self._life.wants_shutdown = True


def _cancel_one(rng: random.Random, tasks: Sequence[asyncio.Task[Any]]) -> bool:
    running = [task for task in tasks if not task.done()]
    return bool(running) and rng.choice(running).cancel()
