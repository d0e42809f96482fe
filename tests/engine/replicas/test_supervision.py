"""Supervision goes on whatever a replica, a balancer or a table raises, and at whichever moment."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import virtual_time
from hypothesis import given
from hypothesis import strategies as st
from replica_harness import A, B, FakeReplica, Harness

from weft.core.errors import EngineStartError
from weft.core.routing import Arrival, LeastUsed, Loads
from weft.engine.processes.logs import START_MARK
from weft.engine.replicas.local import LocalReplica
from weft.engine.vllm_compat.names import AsyncEngineArgs

pytestmark = pytest.mark.engine  # the modules under test import vLLM

ERRORS = [EngineStartError("no memory"), RuntimeError("boom"), OSError(12, "no file"), KeyError("x"), TimeoutError()]
METHODS = ["start", "is_dead", "why_dead", "detach", "stop", "forget", "choose", "lose_engine"]
ERROR = st.sampled_from(ERRORS)
ROUNDS = 3


class Faults:
    """Raises an error at certain uses of certain methods.

    Args:
        planned: for each method, the errors of its next uses; None lets a use pass.
    """

    def __init__(self, planned: dict[str, list[Exception | None]]) -> None:
        self.planned = planned
        self.raised: list[str] = []

    def use(self, method: str) -> None:
        error = self.planned[method].pop(0) if self.planned.get(method) else None
        if error is not None:
            self.raised.append(method)
            raise error


class FaultyReplica(FakeReplica):
    """A fake replica of which every method may fail, `start` and `detach` before or after they have had an effect."""

    faults: Faults

    @property
    def is_dead(self) -> bool:
        self.faults.use("is_dead")
        return self._is_dead

    @is_dead.setter
    def is_dead(self, value: bool) -> None:
        self._is_dead = value

    async def start(self, timeout_s: float) -> None:
        assert not self.is_running, "an engine that runs was started again"
        assert not self._is_dead, "a dead engine was not ended before the next start"
        self.faults.use("start")
        await super().start(timeout_s)

    def why_dead(self) -> str:
        self.faults.use("why_dead")
        return super().why_dead()

    def detach(self) -> None:
        self.faults.use("detach")
        super().detach()

    async def stop(self) -> None:
        self.faults.use("stop")
        super().detach()


class FaultyHarness(Harness):
    """A harness whose replicas and balancer fail as planned. Its clock is that of the event loop."""

    def __init__(self) -> None:
        self.faults = Faults({})
        faults = self.faults

        class FaultyBalancer(LeastUsed):
            def choose(self, arrival: Arrival, loads: Loads) -> Any:
                faults.use("choose")
                return super().choose(arrival, loads)

            def lose_engine(self, engine_id: Any) -> None:
                faults.use("lose_engine")
                super().lose_engine(engine_id)

        super().__init__(FaultyBalancer())
        self.clock = asyncio.get_running_loop().time  # type: ignore[assignment]
        self.supervisor._clock = self.clock
        forget = self.supervisor._forget

        def faulty_forget(engine_id: Any, gone: bool) -> None:
            faults.use("forget")
            forget(engine_id, gone)

        self.supervisor._forget = faulty_forget

    def make(self) -> Any:
        replica = FaultyReplica(f"e/{len(self.made)}", self.starts)  # type: ignore[arg-type]
        replica.faults = self.faults
        self.made.append(replica)
        return replica


async def lives_through(planned: dict[str, list[Exception | None]]) -> list[str]:
    """Kill both replicas a few times while everything fails as planned, and return what has failed."""
    harness = FaultyHarness()
    await harness.begin()
    (watch,) = harness.supervisor._tasks
    harness.faults.planned = planned
    for _ in range(ROUNDS):
        for replica in harness.made:
            replica._is_dead = True
        results = await asyncio.gather(*(harness.call(f"c{n}") for n in range(3)), return_exceptions=True)
        for result in results:  # a call fails only by what its balancer or its replica raised
            assert result == [0, 1] or result in ERRORS
        await asyncio.sleep(100)
    # However long the list of failures is, it ends, and the pauses between restarts are bounded.
    harness.faults.planned = {}
    await asyncio.sleep(200)
    assert len(harness.states.loads) == 2
    assert all(replica.is_running for replica in harness.made)
    assert not watch.done(), "supervision has ended"
    assert await harness.call() == [0, 1]
    assert [health.calls for health in harness.health()] == [0, 0]
    assert len(harness.queue) == 0
    harness.faults.planned = {"stop": [RuntimeError("boom")]}
    await harness.supervisor.stop()
    assert [replica.is_running for replica in harness.made].count(True) <= 1, "one end failed, the others did not"
    return harness.faults.raised


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("use", [0, 1, 3])
def test_a_failure_of_any_kind_at_any_use_is_survived(method: str, error: Exception, use: int) -> None:
    """A restart is tried again, the other replicas are looked after, and no call is left behind."""
    raised = virtual_time.run(lives_through({method: [None] * use + [error] * 2}))
    assert method in raised


@given(st.dictionaries(st.sampled_from(METHODS), st.lists(st.none() | ERROR, max_size=8)))
def test_failures_in_any_combination_are_survived(planned: dict[str, list[Exception | None]]) -> None:
    """What holds for one failure holds for failures that meet."""
    virtual_time.run(lives_through(planned))


def test_the_reason_of_a_failed_restart_is_shown(caplog: pytest.LogCaptureFixture) -> None:
    """An error that Weft does not raise on purpose is shown with its type, in the log and by `health`."""

    async def restart() -> str | None:
        harness = FaultyHarness()
        await harness.begin()
        harness.faults.planned = {"start": [ValueError("mistaken\nand more")]}
        harness.made[0]._is_dead = True
        await asyncio.sleep(1.5)
        health = harness.health()[0]
        assert (health.state, health.deaths) == ("down", 2)
        await harness.supervisor.stop()
        return health.reason

    with caplog.at_level(logging.WARNING, "weft"):
        assert virtual_time.run(restart()) == "ValueError: mistaken"
    assert "replica did not start model=m replica=e/0 reason=ValueError: mistaken" in caplog.text


def test_an_error_that_repeats_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """The supervisor looks five times a second. Another error, or the same one after a success, is logged again."""

    async def watch() -> None:
        harness = FaultyHarness()
        await harness.begin(1)
        harness.faults.planned = {"is_dead": [*[OSError("a")] * 10, *[OSError("b")] * 10, None, OSError("a")]}
        await asyncio.sleep(10)
        assert harness.faults.planned["is_dead"] == []
        await harness.supervisor.stop()

    with caplog.at_level(logging.WARNING, "weft"):
        virtual_time.run(watch())
    reasons = [getattr(record, "weft_reason", None) for record in caplog.records]
    assert reasons == ["OSError: a", "OSError: b", "OSError: a"]


def until_removed(prepare: Callable[[FaultyHarness], None]) -> FaultyHarness:
    """Remove the first replica at the moment at which it is due to be started again."""

    async def remove() -> FaultyHarness:
        harness = FaultyHarness()
        for _ in range(2):
            await harness.supervisor.add()  # and nothing watches them but this test
        prepare(harness)
        harness.made[0]._is_dead = True
        harness.supervisor.note_death(A)
        await asyncio.sleep(1.0)
        harness.supervisor._restart_due()  # the task that starts it has not begun yet
        await harness.supervisor.remove(A, None)
        await asyncio.sleep(1.0)
        await harness.supervisor.stop()
        return harness

    return virtual_time.run(remove())


def test_a_replica_that_is_removed_as_it_restarts_does_not_run_afterwards() -> None:
    """The removal waits for a start that was decided on, even one that has not begun. Otherwise nobody would end it."""
    harness = until_removed(lambda _: None)
    assert [health.engine_id for health in harness.health()] == [B]
    assert not harness.made[0].is_running


def test_a_replica_whose_end_fails_is_removed_nevertheless(caplog: pytest.LogCaptureFixture) -> None:
    """It would be draining for ever, and a second removal would be refused."""

    def prepare(harness: FaultyHarness) -> None:
        harness.faults.planned = {"stop": [None, PermissionError("not yours")]}

    with caplog.at_level(logging.ERROR, "weft"):
        assert [health.engine_id for health in until_removed(prepare).health()] == [B]
    assert "replica did not end in order model=m replica=e/0 reason=PermissionError: not yours" in caplog.text


def test_a_replica_is_removed_although_its_balancer_fails(caplog: pytest.LogCaptureFixture) -> None:
    """A balancer may come from a user. Otherwise the replica would be draining for ever, as above."""

    def prepare(harness: FaultyHarness) -> None:
        harness.faults.planned = {"lose_engine": [None, KeyError("e/0")]}

    with caplog.at_level(logging.ERROR, "weft"):
        assert [health.engine_id for health in until_removed(prepare).health()] == [B]
    assert "supervision failed to drain it model=m replica=e/0 reason=KeyError: 'e/0'" in caplog.text


@pytest.mark.parametrize(
    ("written", "reason"),
    [
        ("", "one of its processes ended"),
        ("(Worker pid=13) ERROR 11-23 11:33:56 [x.py:9] RuntimeError: no offset\n", "RuntimeError: no offset"),
    ],
)
def test_a_replica_that_died_says_the_error_of_its_log(tmp_path: Path, written: str, reason: str) -> None:
    """Its processes write the error before they end."""
    log = tmp_path / "log"
    log.write_text(f"{START_MARK}engine-0/0 of m starts\n{written}")
    replica = LocalReplica(
        A,
        model="m",
        arguments=AsyncEngineArgs("m"),
        environment={},
        log=log,
        hang_timeout_s=None,
        on_account=lambda *_: None,
    )
    assert replica.why_dead() == reason
