"""Clients of an engine whose replicas are killed, hang, are removed and added: a check of hundreds of histories."""

from __future__ import annotations

import asyncio
import random
import re
from collections import Counter
from collections.abc import AsyncGenerator, Callable
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

SEEDS_FOR_A_FAULT = 30


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    """Deaths are logged as warnings; here there are thousands."""
    caplog.set_level("CRITICAL", "weft")


# -- the engine


@pytest.mark.parametrize(
    "seeds",
    [
        range(10),
        pytest.param(range(10, 50), marks=pytest.mark.slow),
        pytest.param(range(50, 1000), marks=pytest.mark.soak),
    ],
    ids=str,
)
def test_the_history_of_every_seed_is_right(seeds: range) -> None:
    """No token comes twice or out of order, every call ends once, service and wait never shrink, nothing is left.

    Calls are stolen meanwhile. A call that was given back had not begun there, and begins elsewhere.
    """
    from chaos_engine import life

    seen: Counter[str] = Counter()
    for seed in seeds:
        events = virtual_time.run(life(seed)).events
        assert check(events) == [], f"seed {seed}"
        attempts = Counter(event.call for event in events if event.kind == "attempt")
        seen["moved"] += sum(count > 1 for count in attempts.values())
        seen["lost"] += sum(isinstance(event.value, Lost) for event in events)
        seen.update(event.kind for event in events)
    faults = ("moved", "lost", "kill", "hang", "remove", "add", "taken")
    assert min(seen[each] for each in faults) > len(seeds) // 4, "the faults and the steals took place"


Plant = Callable[[Any, pytest.MonkeyPatch], None]


def _streamed(change: Callable[[Any, Callable[[Any], Any]], Any]) -> Plant:
    """A fault in the stream of a call."""

    def plant(engine: Any, _monkeypatch: pytest.MonkeyPatch) -> None:
        stream = engine.chat_endpoint.stream
        engine.chat_endpoint.stream = lambda request: change(request, stream)

    return plant


async def _twice(request: Any, stream: Callable[[Any], Any]) -> AsyncGenerator[Any, None]:
    async for chunk in stream(request):
        yield chunk
        if chunk["choices"][0]["tokens"] == [7]:
            yield chunk


async def _cut_short(request: Any, stream: Callable[[Any], Any]) -> AsyncGenerator[Any, None]:
    async for chunk in stream(request):
        if chunk["choices"][0]["tokens"] == [7]:
            return
        yield chunk


async def _restarted(request: Any, stream: Callable[[Any], Any]) -> AsyncGenerator[Any, None]:
    with suppress(ReplicaLostError):
        async for chunk in stream(request):
            yield chunk
        return
    async for chunk in stream(request):
        yield chunk


async def _miscounted(request: Any, stream: Callable[[Any], Any]) -> AsyncGenerator[Any, None]:
    try:
        async for chunk in stream(request):
            yield chunk
    except ReplicaLostError as error:
        raise ReplicaLostError(error.replica, error.delivered_tokens + 1, error.attempts) from None


async def _untyped(request: Any, stream: Callable[[Any], Any]) -> AsyncGenerator[Any, None]:
    async for chunk in stream(request):
        yield chunk
        if chunk["choices"][0]["tokens"] == [7]:
            raise RuntimeError("boom")


def _once(owner: str, method: str) -> Plant:
    """A method of a part of the engine does nothing at its tenth use."""

    def plant(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        part = getattr(engine, owner)
        real, uses = getattr(part, method), iter(range(1_000_000))
        monkeypatch.setattr(part, method, lambda *args: None if next(uses) == 9 else real(*args))

    return plant


def _in_flight_for_ever(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    real, first = engine._in_flight.leave, []

    def leave(call: Any) -> bool:
        first.append(call)
        return False if call is first[0] else real(call)

    monkeypatch.setattr(engine._in_flight, "leave", leave)


def _shrinking(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    leave = engine.table.leave

    def shrink(call: Any, now_s: float) -> None:
        leave(call, now_s)
        row = engine.table.get(call.identity.program_id)
        if row is not None and row.calls == 3:
            row.attained.service_s = 0.0

    monkeypatch.setattr(engine.table, "leave", shrink)
    monkeypatch.setattr(engine.table, "check_integrity", lambda: None)


def _unnoticed(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.supervisor, "note_death", lambda _engine_id: None)


def _tireless(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every replica dies soon after it has become ready, and calls are moved without end."""
    monkeypatch.setattr(ReplicaLostError, "MOST_ATTEMPTS", 100)

    async def kill_all() -> None:
        while True:
            await asyncio.sleep(0.3)
            for replica in engine.supervisor.replicas():
                replica.kill()

    engine.killing = asyncio.ensure_future(kill_all())


def _uncharged(engine: Any, _monkeypatch: pytest.MonkeyPatch) -> None:
    real = engine.on_account
    engine.on_account = lambda call, account: None if account.output_tokens > 20 else real(call, account)


def _given_back_while_it_runs(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replicas give calls back that they run, and go on with them."""
    from chaos_engine import SimulatedReplica

    real = SimulatedReplica.send_to_scheduler

    async def give_all(self: Any, message: Any) -> Any:
        answer = await real(self, message)
        for call in message.get("calls") or () if answer else ():
            if list(call) not in answer["taken"]:
                engine.history.add("taken", *call, self.engine_id)
                answer["taken"].append(call)
        return answer

    monkeypatch.setattr(SimulatedReplica, "send_to_scheduler", give_all)


def _not_sent_on(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody moves the calls that replicas have given back, and no death of a replica moves them either."""
    import chaos_engine

    async def nothing_happens(_engine: Any) -> None:
        pass

    monkeypatch.setattr(chaos_engine, "_disturb", nothing_happens)
    monkeypatch.setattr(engine.router.unanswered, "move", lambda *_: None)


def _forgotten(_engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A replica is not told how long a call has waited elsewhere."""
    from weft.engine.replicas import router

    monkeypatch.setattr(router, "_sent_later", lambda params, _later_s: params)


FAULTS: dict[str, tuple[Plant, str]] = {
    "a token comes twice": (_streamed(_twice), r"got the tokens \[.*7, 7"),
    "an answer is cut short": (_streamed(_cut_short), r"finished with 7 of \d+ tokens"),
    "a call begins again silently": (_streamed(_restarted), "began again after its client had got a token"),
    "the tokens of a lost call are miscounted": (_streamed(_miscounted), r"was lost after \d+ tokens, its error"),
    "an error has no type": (_streamed(_untyped), "ended with RuntimeError"),
    "a call does not leave its replica": (_once("queue", "leave"), "1 dispatched calls are left"),
    "a slot of admission is lost": (_once("admission", "leave"), "1 admitted calls are left"),
    "a call stays in flight": (_in_flight_for_ever, "1 calls in flight are left"),
    "a row is not closed": (_once("table", "close"), "1 rows are left"),
    "service shrinks": (_shrinking, "the row of .* went from"),
    "service is not charged": (_uncharged, "was charged .* s for calls of"),
    "deaths are not noticed": (_unnoticed, r"\d+ dead replicas are left"),
    "a call runs twice": (_given_back_while_it_runs, "was begin and then taken on"),
    "a call that was given back is lost": (_not_sent_on, r"\d+ clients that wait are left"),
    "a wait elsewhere is forgotten": (_forgotten, r"has waited \d.* s, and its account says \d.* s"),
    "a call takes every replica down": (_tireless, "was on [4-9] replicas"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A check that finds nothing must be able to fail."""
    from chaos_engine import life

    plant, message = FAULTS[fault]
    pattern = re.compile(message)
    for seed in range(SEEDS_FOR_A_FAULT):
        with monkeypatch.context() as patch:
            problems = check(virtual_time.run(life(seed, lambda engine: plant(engine, patch))).events)
        if any(pattern.search(problem) for problem in problems):
            return
    pytest.fail(f"no seed showed it; the last one: {problems[:3]}")


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
    begin, end = [Event("open", "p"), Event("invoke", "p", "c", 2)], [Event("close", "p", value=0.0)]
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
