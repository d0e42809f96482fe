"""What becomes of a call that replicas cannot run or that cannot be opened, and the check of histories of calls."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import virtual_time
from history import Event, Lost, check

import weft
from weft.core.errors import InvalidIdError, ProgramEndedError, ReplicaLostError
from weft.core.program.graph import CallState
from weft.core.routing.admission import Admission

pytestmark = pytest.mark.engine  # the modules under test import vLLM


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    """Deaths are logged as warnings."""
    caplog.set_level("CRITICAL", "weft")


# -- the engine


def test_a_call_that_hangs_every_engine_is_on_three_of_them() -> None:
    """It fails like a call that kills engines, and the fourth replica goes on."""
    from chaos_engine import ChaosEngine, SimulatedReplica
    from history import History

    async def hang_all() -> tuple[ReplicaLostError, list[bool]]:
        engine = ChaosEngine(random.Random(1), History())
        while len(engine.supervisor.replicas()) < 4:
            with suppress(Exception):  # some starts fail
                await engine.supervisor.add()
        engine.supervisor.watch()
        replicas: list[Any] = engine.supervisor.replicas()
        for replica in replicas:
            replica.generate = lambda *args, _replica=replica, **kwargs: (
                _replica.hang(),
                SimulatedReplica.generate(_replica, *args, **kwargs),
            )[1]
        with weft.Program("poison") as program:
            call = engine.chat({"max_tokens": 5}, program, program.reports.start_call("c"))
            with pytest.raises(ReplicaLostError) as caught:
                await call
        died = [each.deaths > 0 for each in engine.states.health(0.0)]
        await engine.supervisor.stop()
        return caught.value, died

    error, died = virtual_time.run(hang_all())
    assert error.attempts == 3
    assert sorted(died) == [False, True, True, True]


# -- the check


def _call(*events: tuple[str, Any]) -> list[Event]:
    begin, end = [Event("open", "p"), Event("invoke", "p", "c", 2)], [Event("close", "p")]
    return [*begin, *(Event(kind, "p", "c", value) for kind, value in events), *end]


def test_a_right_history_passes() -> None:
    """Of a call that moved before its client got anything."""
    assert not check(_call(("attempt", "a"), ("attempt", "b"), ("token", 0), ("token", 1), ("return", "finished")))


@pytest.mark.parametrize(
    ("events", "problem"),
    [
        ([("token", 0), ("token", 1)], "c ended 0 times"),
        ([("token", 0), ("token", 1), ("return", "finished"), ("return", "finished")], "c ended 2 times"),
        ([("token", 0), ("return", "finished"), ("token", 1)], "c got a token after its end"),
        ([("token", 1), ("token", 0), ("return", "finished")], "c got the tokens [1, 0]"),
        ([("invoke", 2), ("return", "finished")], "c was invoked 2 times"),
        ([*[("attempt", "a")] * 4, ("return", Lost(0))], "c was on 4 replicas"),
        (
            [("attempt", "a"), ("taken", "a"), ("begin", "a"), ("return", Lost(0))],
            "c was taken and then begin on a, without another attempt",
        ),
    ],
)
def test_a_wrong_history_is_named(events: list[tuple[str, Any]], problem: str) -> None:
    """Faults that no part of the engine can be made to commit alone."""
    assert problem in check(_call(*events))


def test_a_program_is_closed_once() -> None:
    """A row that was never closed would stay in the table."""
    assert check([Event("open", "p")]) == ["p was closed 0 times"]


# -- opening a call


def refused(prepare: Callable[[Any, weft.Program, Any], None], error: type[Exception]) -> CallState:
    """Open a call that fails as prepared, and return its state. Nothing is left of it."""
    from chaos_engine import ChaosEngine
    from history import History

    async def open_call() -> CallState:
        engine = ChaosEngine(random.Random(0), History())
        program = weft.Program("refused")
        with program:
            identity = program.reports.start_call("c")
            program.reports.bind(engine.programs)
            prepare(engine, program, identity)
            with pytest.raises(error):
                await engine.chat({"max_tokens": 1}, program, identity)
            assert len(engine._in_flight) == 0
            assert engine.admission.calls == 0
            assert not any(row.active for row in engine.table)
        return program.graph[identity.call_id].state

    return virtual_time.run(open_call())


def test_a_program_that_ends_as_its_call_is_opened_cancels_the_call() -> None:
    """Another thread ends it between the admission and the row. The engine did not refuse the call."""

    def prepare(engine: Any, program: weft.Program, _identity: Any) -> None:
        engine.admission = Admission(lambda: (program.__exit__(None, None, None), 10)[1])

    assert refused(prepare, ProgramEndedError) is CallState.CANCELLED


def test_a_call_that_the_table_refuses_has_failed() -> None:
    """It does not stay `named`, and its slot is free again."""

    def prepare(engine: Any, _program: weft.Program, identity: Any) -> None:
        row, _ = engine.table.arrive(identity, None, 0.0)
        arrive = engine.table.arrive

        def refuse(*args: Any) -> Any:
            try:
                return arrive(*args)
            finally:
                engine.table.leave(row, 0.0)

        engine.table.arrive = refuse

    assert refused(prepare, InvalidIdError) is CallState.FAILED


def test_a_call_that_cannot_be_noted_leaves_nothing() -> None:
    """Its row and its slot are given back although it was in the table already."""

    def fail(*_args: Any) -> None:
        raise OSError(28, "no space left")

    def prepare(engine: Any, _program: weft.Program, _identity: Any) -> None:
        engine._in_flight.add = fail

    assert refused(prepare, OSError) is CallState.FAILED
