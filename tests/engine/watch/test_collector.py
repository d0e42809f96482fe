"""The metrics, as Prometheus' own parser reads them."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

import weft
from weft.core.errors import EngineClosedError, InvalidRequestError, KeyLimitError, OverloadedError, WeftError
from weft.core.ids import EngineId
from weft.core.kv_cache.stats import KvStats
from weft.core.policies.queues import LevelStats, ScheduleStats
from weft.core.program import Program
from weft.core.routing.admission import Refused, refused_by
from weft.core.routing.replicas import ReplicaHealth, ReplicaState
from weft.engine.watch import WatchedReplica
from weft.engine.watch.metrics.export import METRICS
from weft.engine.watch.metrics.names import MOST_NAMES
from weft.engine.wire.reports import encode_answer
from weft.testing import FakeClock, ScriptedEngine

BODY: Any = {"messages": [{"role": "user", "content": "hello there"}]}


def answering(health: ReplicaHealth, answers: list[Any]) -> WatchedReplica:
    """A replica that answers with these `ScheduleStats` and `KvStats`; None: it does not run."""

    async def ask(message: Mapping[str, Any]) -> Any:
        schedule, kv = answers
        if schedule is None:
            return None
        return encode_answer(schedule if message["type"] == "take_schedule_stats" else kv)

    return WatchedReplica("tiny", health, ask)


class Watched(ScriptedEngine):
    """A scripted engine with replicas of a test's making."""

    replicas: Sequence[WatchedReplica] = ()

    def watched(self) -> Sequence[WatchedReplica]:
        return self.replicas


class Scraped:
    """What Prometheus gets, by name and labels."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.text = generate_latest(registry).decode()
        families = list(text_string_to_metric_families(self.text))
        self.kinds = {family.name: family.type for family in families}
        samples = [sample for family in families for sample in family.samples]
        self.values = {
            (sample.name, *(f"{name}={value}" for name, value in sorted(sample.labels.items()) if name != "engine")): (
                sample.value
            )
            for sample in samples
        }

    def __getitem__(self, key: Any) -> float:
        return self.values[key if isinstance(key, tuple) else (key,)]


def scraped(*engines: ScriptedEngine) -> tuple[CollectorRegistry, Scraped]:
    registry = CollectorRegistry(auto_describe=True)
    registry.register(weft.MetricsCollector(*engines))
    return registry, Scraped(registry)


def call(engine: ScriptedEngine, program: Program) -> None:
    engine.chat_sync(BODY, program, program.reports.start_call(object()))


def test_calls_and_programs_are_counted_by_name() -> None:
    """Open programs are a gauge; ended ones, calls and tokens are counters; times are histograms."""
    engine = Watched(["one two three", "four"], latency_s=2.0)
    registry, before = scraped(engine)
    assert ("weft:calls_total", "outcome=finished", "program=agent") not in before.values
    with weft.Program("agent", tenant="acme") as program:
        call(engine, program)
        inside = Scraped(registry)
        assert inside["weft:programs_open", "program=agent", "state=idle"] == 1
        call(engine, program)
    after = Scraped(registry)
    assert after["weft:programs_open", "program=agent", "state=idle"] == 0
    assert after["weft:programs_ended_total", "program=agent", "state=finished"] == 1
    assert after["weft:calls_total", "outcome=finished", "program=agent"] == 2
    assert after["weft:prompt_tokens_total", "program=agent"] == 4
    assert after["weft:generation_tokens_total", "program=agent"] == 4
    assert after["weft:call_service_seconds_sum", "program=agent"] == 4.0
    assert after["weft:call_service_seconds_bucket", "le=1", "program=agent"] == 0
    assert after["weft:call_service_seconds_bucket", "le=3", "program=agent"] == 2
    assert after["weft:call_service_seconds_count", "program=agent"] == 2
    assert after["weft:program_duration_seconds_sum", "program=agent"] == 4.0
    assert after["weft:tenant_service_seconds_total", "tenant=acme"] == 4.0
    assert after["weft:calls_in_flight", "model_name=scripted"] == 0


def test_tools_are_counted_by_name() -> None:
    """What programs wait for is a gauge, and how long they waited is a histogram."""
    clock = FakeClock()
    engine = Watched(["answer"], clock=clock)
    registry, _ = scraped(engine)
    program = weft.Program("agent")
    program.reports.bind(engine.programs)
    program.reports.start_run("run", None)
    program.reports.note_tool("run", "search")
    assert Scraped(registry)["weft:tools_running"] == 1
    clock.advance(4.0)
    program.reports.end_run("run")
    after = Scraped(registry)
    assert after["weft:tools_running"] == 0
    assert after["weft:tool_duration_seconds_sum", "tool=search"] == 4.0
    program.end()


def test_refused_and_failed_calls_are_counted() -> None:
    """Calls above the limit have a counter of their own, because the server refuses some before they have a program."""
    clock = FakeClock()
    engine = Watched([RuntimeError("broken"), "late"], clock=clock, max_calls=1, latency_s=1.0)
    registry, _ = scraped(engine)
    with weft.Program("agent") as program, pytest.raises(RuntimeError):
        call(engine, program)

    async def refused() -> None:
        program = weft.Program("agent")
        first = asyncio.ensure_future(engine.chat(BODY, program, program.reports.start_call("a")))
        await engine.until_waiting(1)
        with pytest.raises(OverloadedError):
            await engine.chat(BODY, program, program.reports.start_call("b"))
        assert Scraped(registry)["weft:calls_in_flight", "model_name=scripted"] == 1
        clock.advance(1.0)
        await first
        program.end()

    asyncio.run(refused())
    after = Scraped(registry)
    assert after["weft:calls_total", "outcome=failed", "program=agent"] == 1
    assert after["weft:calls_total", "outcome=finished", "program=agent"] == 1
    assert after["weft:calls_limit", "model_name=scripted"] == 1
    assert after["weft:calls_overloaded_total", "model_name=scripted"] == 1
    assert after["weft:calls_refused_total", "error=OverloadedError"] == 1
    assert after["weft:call_wait_seconds_count", "program=agent"] == 1, "only calls with an answer have a time"


def test_requests_that_a_server_refused_are_counted_by_reason_and_tenant() -> None:
    """An operator sees whose limit is too low, and that somebody tries keys. Tenants have a bound, as elsewhere."""
    engine = Watched([])
    registry, _ = scraped(engine)
    for number in range(MOST_NAMES + 10):
        engine.request_refused(Refused.MAX_CALLS, f"tenant-{number}")
    engine.request_refused(Refused.WRONG_API_KEY, None)
    after = Scraped(registry)
    assert after["weft:requests_refused_total", "reason=max_calls", "tenant=tenant-0"] == 1
    assert after["weft:requests_refused_total", "reason=max_calls", "tenant=other"] == 10
    assert after["weft:requests_refused_total", "reason=wrong_api_key", "tenant=other"] == 1


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (KeyLimitError("max_programs", 8, 0.25), Refused.MAX_PROGRAMS),
        (OverloadedError(9, 8, 0.25), Refused.OVERLOADED),
        (EngineClosedError(), Refused.STOPPING),
        (InvalidRequestError("no"), Refused.MALFORMED),
    ],
)
def test_an_error_stands_for_a_reason(error: WeftError, reason: Refused) -> None:
    """There are as many labels as reasons, whatever a client sends."""
    assert refused_by(error) is reason


def test_names_that_clients_choose_make_a_bounded_number_of_series() -> None:
    """As many as have a place are told apart, all others are one, and nothing is lost."""
    many = MOST_NAMES + 100
    engine = Watched(["answer"] * many)
    registry, _ = scraped(engine)
    for number in range(many):
        with weft.Program(f"agent {number}", tenant=f"tenant-{number}") as program:
            call(engine, program)
    after = Scraped(registry)
    calls = {key: value for key, value in after.values.items() if key[0] == "weft:calls_total"}
    assert len(calls) == MOST_NAMES + 1
    assert after["weft:calls_total", "outcome=finished", "program=other"] == 100
    assert sum(calls.values()) == many
    assert len([key for key in after.values if key[0] == "weft:tenant_wait_seconds_total"]) == MOST_NAMES + 1


def schedule(starts: int, wait_s: float, promotions: int) -> ScheduleStats:
    return ScheduleStats((LevelStats(0, 1, 2, starts, wait_s, 5.0),), promotions)


def kv(spilled_tokens: int) -> KvStats:
    return KvStats("ttl", 0, 0, 0, spilled_tokens, 6, 7, 8, 9)


def test_sums_of_a_replica_go_on_when_its_process_starts_again() -> None:
    """A new scheduler process counts from 0, and the counters do not fall. While there is none, they stay."""
    engine = Watched([])
    replica = EngineId("engine-9/0")
    answers: list[Any] = [schedule(10, 2.5, 3), kv(100)]

    def health(state: ReplicaState, deaths: int) -> None:
        engine.replicas = [answering(ReplicaHealth(replica, state, 2, deaths), answers)]

    health(ReplicaState.READY, 0)
    registry, first = scraped(engine)
    labels = ("model_name=tiny", f"replica={replica}")
    assert first["weft:level_waiting", "level=0", *labels] == 2
    assert first["weft:replica_state", *labels, "state=ready"] == 1
    answers[:] = [None, None]
    health(ReplicaState.DOWN, 1)
    down = Scraped(registry)
    assert down["weft:replica_state", *labels, "state=ready"] == 0
    assert down["weft:replica_state", *labels, "state=down"] == 1
    assert down["weft:replica_deaths_total", *labels] == 1
    assert down["weft:level_starts_total", "level=0", *labels] == 10
    assert ("weft:level_waiting", "level=0", *labels) not in down.values
    answers[:] = [schedule(1, 0.5, 0), kv(30)]
    health(ReplicaState.READY, 1)
    again = Scraped(registry)
    assert again["weft:level_starts_total", "level=0", *labels] == 11
    assert again["weft:level_wait_seconds_total", "level=0", *labels] == 3.0
    assert again["weft:promotions_total", *labels] == 3
    assert again["weft:kv_spilled_tokens_total", *labels] == 130
    assert again["weft:kv_held_blocks", *labels] == 6


def test_an_engine_that_was_shut_down_is_shown_as_down() -> None:
    """Its last figures stay, and nothing waits for its schedulers."""
    engine = Watched([])
    health = ReplicaHealth(EngineId("engine-9/0"), ReplicaState.READY, 0, 0)
    engine.replicas = [answering(health, [schedule(10, 2.5, 3), kv(100)])]
    registry, before = scraped(engine)
    labels = ("model_name=tiny", "replica=engine-9/0")
    assert before["weft:replica_state", *labels, "state=ready"] == 1
    engine.shutdown()
    after = Scraped(registry)
    assert after["weft:replica_state", *labels, "state=down"] == 1
    assert after["weft:promotions_total", *labels] == 3


def test_a_scrape_inside_an_event_loop_does_not_wait() -> None:
    """The loop may be the engine's, which would then never answer. The next scrape has the figures."""
    engine = Watched([])
    health = ReplicaHealth(EngineId("engine-9/0"), ReplicaState.READY, 0, 0)
    engine.replicas = [answering(health, [schedule(10, 2.5, 3), kv(100)])]
    registry = CollectorRegistry()
    registry.register(weft.MetricsCollector(engine))

    async def scrape() -> Scraped:
        return Scraped(registry)

    key = ("weft:promotions_total", "model_name=tiny", "replica=engine-9/0")
    while not (found := engine.submit(scrape()).result().values.get(key)):
        time.sleep(0.001)
    assert found == 3
    engine.shutdown()


def test_every_family_is_exported_under_its_name() -> None:
    """The documentation and the dashboard are checked against this table, so it must be what Prometheus gets."""
    engine = Watched(["answer"])
    registry, found = scraped(engine)
    assert found.kinds == {each.name.removesuffix("_total"): each.kind for each in METRICS}
    assert set(registry._names_to_collectors) >= {each.name for each in METRICS if each.kind != "histogram"}


def test_several_engines_share_a_collector() -> None:
    """Each has its own label. A second collector in the same registry is refused by the client library."""
    engines = [Watched(["answer"]), Watched(["answer"])]
    registry, _ = scraped(*engines)
    for engine in engines:
        with weft.Program("agent") as program:
            call(engine, program)
    text = generate_latest(registry).decode()
    for engine in engines:
        assert f'weft:calls_total{{engine="{engine.engine_id}",outcome="finished",program="agent"}} 1.0' in text
    with pytest.raises(ValueError, match="Duplicated"):
        registry.register(weft.MetricsCollector(engines[0]))


def test_a_program_that_began_before_the_collector_is_counted() -> None:
    """A collector may be made at any time."""
    engine = Watched(["one", "two"])
    with weft.Program("agent") as program:
        call(engine, program)
        registry, _ = scraped(engine)
        call(engine, program)
    assert Scraped(registry)["weft:calls_total", "outcome=finished", "program=agent"] == 1


def test_the_collector_does_not_keep_an_engine() -> None:
    """A registry lives as long as the process, and an engine's processes must not."""
    engine = Watched(["answer"])
    registry, _ = scraped(engine)
    engine.shutdown()
    assert 'weft:calls_limit{engine="' in Scraped(registry).text
    del engine
    gc.collect()
    assert "weft:calls_limit{" not in Scraped(registry).text
