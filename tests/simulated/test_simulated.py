"""Lives of an engine in virtual time, each from a seed: `make simulate` lives more of them."""

from __future__ import annotations

import asyncio
import gc
import importlib
import logging
import os
import re
import subprocess
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from simulated_loop import DeadlockError, World

# The modules under test import vLLM, but start no engine.
pytestmark = [pytest.mark.engine, pytest.mark.simulated]

COMMAND = Path(__file__).with_name("simulate.py")


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Replicas die all the time."""
    caplog.set_level("CRITICAL", "weft")
    logging.disable(logging.CRITICAL)
    importlib.import_module("simulated_life")
    gc.collect()
    gc.freeze()  # vLLM has a million objects
    gc.disable()  # each life collects at its end
    yield
    gc.enable()
    gc.unfreeze()
    logging.disable(logging.NOTSET)


# -- the loop


def order_of(seed: int) -> list[int]:
    """In which order five tasks go on that can go on at once."""
    order: list[int] = []

    async def note(number: int) -> None:
        await asyncio.sleep(0)
        order.append(number)

    async def main() -> None:
        await asyncio.gather(*(note(number) for number in range(5)))

    with closing(World(seed)) as world:
        world.run(world.new_loop("loop"), main())
    return order


def test_the_seed_decides_which_task_goes_on() -> None:
    """The same seed always says the same, and other seeds say something else."""
    orders = [order_of(seed) for seed in range(20)]
    assert orders == [order_of(seed) for seed in range(20)]
    assert all(sorted(order) == [0, 1, 2, 3, 4] for order in orders)
    assert len(set(map(tuple, orders))) > 10


def test_callbacks_keep_their_order() -> None:
    """asyncio promises it, also for those that come from other threads."""
    for seed in range(20):
        with closing(World(seed)) as world:
            loop, seen = world.new_loop("loop"), list[int]()
            for number in range(10):
                (loop.call_soon if number % 2 else loop.call_soon_threadsafe)(seen.append, number)
            world.run_until(lambda seen=seen: len(seen) == 10)
        assert seen == list(range(10))


def test_timers_are_exact() -> None:
    """The clock jumps to them, however long that is."""

    async def main() -> list[float]:
        times = []
        for seconds in (0.5, 1000.0, 0.25):
            await asyncio.sleep(seconds)
            times.append(asyncio.get_running_loop().time())
        return times

    with closing(World(0)) as world:
        world.busy = 0.0
        assert world.run(world.new_loop("loop"), main()) == [0.5, 1000.5, 1000.75]


def test_timers_run_in_their_order_after_a_jump() -> None:
    """As asyncio runs them, when a suspended machine goes on. Only those of one moment run in any order."""
    for seed in range(20):
        with closing(World(seed)) as world:
            loop, seen = world.new_loop("loop"), list[float]()
            for when_s in (3.0, 1.0, 2.0, 4.0):
                loop.call_at(when_s, seen.append, when_s)
            world.jump(10.0)
            world.run_until(lambda seen=seen: len(seen) == 4)
            assert world.now_s == 10.0
        assert seen == [1.0, 2.0, 3.0, 4.0]


def test_a_host_that_is_stopped_runs_nothing_and_goes_on() -> None:
    """What is outside of it goes on meanwhile. Then its timers run late."""
    for seed in range(20):
        with closing(World(seed)) as world:
            loop, seen = world.new_loop("loop"), list[tuple[str, float]]()

            def note(what: str, world: World = world, seen: list[tuple[str, float]] = seen) -> None:
                seen.append((what, world.now_s))

            loop.call_at(1.0, note, "timer")
            loop.call_soon(note, "callback")
            world.call_later(2.0, lambda note=note: note("outside"))
            world.put_to_sleep(5.0)
            world.run_until(lambda seen=seen: len(seen) == 3)
        assert seen[0] == ("outside", 2.0)
        assert sorted(seen[1:]) == [("callback", 5.0), ("timer", 5.0)]


def test_a_thread_is_interrupted_before_it_takes_a_lock_only() -> None:
    """Other loops go on there, however many locks the code takes, and none goes on while a lock is held."""
    seen = set[str]()
    for seed in range(20):
        with closing(World(seed)) as world:
            world.switches, world.switches_after = 1.0, 0.0
            lock, order = world.lock(threading.RLock()), list[str]()
            first, second = world.new_loop("first"), world.new_loop("second")

            def take(lock: Any = lock, order: list[str] = order) -> None:
                order.append("before")
                with lock:
                    order.append("held")
                    with lock:
                        order.append("held twice")

            first.call_soon(take)
            second.call_soon(order.append, "other")
            world.run_until(lambda order=order: len(order) == 4)
            assert world.locks_held == 0
        seen.add(", ".join(order))
    own = "before", "held", "held twice"
    assert seen == {", ".join((*own[:at], "other", *own[at:])) for at in (0, 1)}


def test_a_thread_is_interrupted_after_it_has_let_a_lock_go() -> None:
    """Only the last one that it held, and only where code of an event runs: a check that looks at locked things sees
    them at one moment."""
    with closing(World(0)) as world:
        world.switches_after = 1.0
        lock, order = world.lock(threading.RLock()), list[str]()
        first, second = world.new_loop("first"), world.new_loop("second")

        def take() -> None:
            with lock:
                with lock:
                    order.append("held twice")
                order.append("held")
            order.append("after")

        first.call_soon(take)
        second.call_soon(order.append, "other")
        with lock:
            pass
        order.append("looked")
        world._run(first.callbacks.popleft())
    assert order == ["looked", "held twice", "held", "other", "after"]


def test_tasks_that_wait_for_ever_are_an_error() -> None:
    """The error says where they wait, and comes at once."""

    async def wait() -> None:
        await asyncio.Event().wait()

    with closing(World(0)) as world:
        with pytest.raises(DeadlockError, match=r"1 tasks wait, and no timer is set: loop\.1 .*wait at test_simulated"):
            world.run(world.new_loop("loop"), wait())
        (task,) = world.tasks
        task.cancel()
        world.run_until(task.done)


# -- lives


def test_who_waits_from_outside_waits_no_longer_than_minutes() -> None:
    """A future that never is done is an error although timers go on."""

    async def tick() -> None:
        for _ in range(1_000):
            await asyncio.sleep(1.0)

    with closing(World(0)) as world:
        task = world.new_loop("loop").create_task(tick())
        with pytest.raises(DeadlockError, match="nothing has come of it for 60 s"):
            world.run_for(lambda: False, 60.0)
        task.cancel()
        world.run_until(task.done)


def live(seeds: Iterable[int], *, as_then: bool = False) -> Counter[str]:
    """Live, and count the faults. No life may go wrong. `as_then`: without the faults that came later than a seed."""
    from simulated_faults import NEWEST_KINDS, faults_of
    from simulated_life import Life

    happened: Counter[str] = Counter()
    for seed in seeds:
        life = Life(seed, [fault for fault in faults_of(seed) if not (as_then and fault.kind in NEWEST_KINDS)])
        assert life.run() == [], f"make simulate SEED={seed} TRACE=1"
        happened.update(life.faults.happened)
    return happened


def test_nothing_is_lost_in_a_few_lives() -> None:
    """No call is lost or answered twice, answers are the model's, accounts and tables agree, and nothing is left."""
    assert sum(live(range(20)).values()) > 20


@pytest.mark.slow
def test_nothing_is_lost_in_lives_that_once_went_wrong() -> None:
    """In 589 a model answers with nothing, and its client goes on from that without an id. In 500016 and 7100503
    the first choice of a call has ended when its second one comes to the replica. In 5000139 a slow replica still
    computes a step for a call that was aborted. In 7100101 one takes more than five minutes for its answers. In
    10000178 a client leaves just when the replica of its call dies, and in the next ones a host stands still or a
    thread ends a program as the last of its calls leaves. In 20001118 a request comes to a server whose loop is ending,
    and in 20001940 a history comes to a replica which computes a step of a call that was aborted. In 20004376 a replica
    dies when a whole answer has come from it, and its call has not ended yet. In 40001851 a scheduler hears of a
    program's end before it gets the last call of the program, in 60007367 a replica's own prompts wait for another
    client's call, and in 60007522 a replica is added as the engine is shut down. In 70000722 two steps end at once,
    because the host stood still, and in 70001022 the machine is suspended while a prompt is rendered."""
    live((589, 500016, 5000139, 7100101, 7100503), as_then=True)
    live((10000178, 10000484, 10000492, 10001830, 20001118, 20001940, 20002022, 20004376, 40001851, 60007367, 60007522))
    live((70000722, 70001022))


def test_an_engine_that_was_shut_down_is_collected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one with a history, which is saved when an engine is collected."""
    from simulated_life import Life

    engines, with_history = [], 0
    with monkeypatch.context() as patch:
        patch.setattr("simulated_server._apps", [])  # lives share the application of the last one
        for seed in range(4):
            life = Life(seed)
            life.run()
            engines.append(weakref.ref(life.engine))
            with_history += life.engine._history is not None
            del life
    gc.collect()
    assert with_history
    assert [engine() for engine in engines] == [None] * len(engines)


@pytest.mark.slow
def test_nothing_is_lost_in_many_lives() -> None:
    """The same, and every kind of fault meets something."""
    from simulated_faults import KINDS, LAST_KINDS, LATER_KINDS, NEWEST_KINDS

    happened = live(range(20, 520))
    assert {kind for kind in (*KINDS, *LATER_KINDS, *LAST_KINDS, *NEWEST_KINDS) if not happened[kind]} == set()


def test_every_planted_fault_can_be_planted() -> None:
    """`mutations.py` finds the text of each in a function of Weft, and takes it out again."""
    from mutations import MUTATIONS, planted

    for mutation in MUTATIONS:
        with planted(mutation):
            pass
    assert len({mutation.name for mutation in MUTATIONS}) == len(MUTATIONS) > 40


def test_a_planted_fault_is_found() -> None:
    """The lives see a count that is not taken back, a table that keeps a call, one that keeps a program, and a wait on
    another replica that is forgotten."""
    from mutations import MUTATIONS, lives_until_found

    named = {mutation.old: mutation for mutation in MUTATIONS}
    for old in (
        "call.endpoint.admission.leave(now_s)",
        "del mine[call]",
        "program.has_ended = True",
        "params = _sent_later(sampling_params, now_s() - since_s)",
    ):
        lives, problem = lives_until_found(named[old], 20)
        assert lives, old
        assert problem


def digests(seed: int, hash_seed: str) -> list[str]:
    command = [sys.executable, str(COMMAND), "--seed", str(seed)]
    path = os.pathsep.join(str(COMMAND.parents[1] / name) for name in ("support", "simulated", "fuzz"))
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": hash_seed}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return re.findall(r"\d+ events in .* digest \w+", done.stdout)


def test_a_seed_always_means_the_same_events() -> None:
    """Each of the events, in a life with many faults, twice in one process."""
    from simulated_life import Life

    def lived(seed: int) -> tuple[str, list[str], Any]:
        events: list[str] = []
        life = Life(seed, trace=events.append)
        life.run()
        return life.world.digest, events, life.history.events

    for seed in (37, 34, 33):  # the second one's clients use HTTP, and the third one's `weft.connect`
        assert lived(seed) == lived(seed)


@pytest.mark.slow
def test_another_process_has_the_same_events() -> None:
    """What Python draws anew for each process, such as the hashes of strings, changes nothing."""
    for seed in (37, 34):
        first, second = digests(seed, "1"), digests(seed, "2")
        assert len(first) == 1
        assert first == second
