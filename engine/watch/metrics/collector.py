"""Metrics of engines, as a collector of Prometheus' client library."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import CancelledError
from contextlib import suppress
from itertools import accumulate
from typing import Any, Final, NamedTuple

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from weft.core.errors import EngineError
from weft.core.ids import EngineId
from weft.core.kv_cache.stats import KvStats
from weft.core.locks import fork_safe
from weft.core.policies.queues import ScheduleStats
from weft.core.process_rows import ProgramState
from weft.core.process_table import ProcessTable
from weft.core.routing.replicas import ReplicaHealth, ReplicaState
from weft.engine.watch.metrics.counts import BOUNDS_S, Histogram, ProgramCounts
from weft.engine.watch.metrics.export import METRICS
from weft.engine.watch.metrics.names import ALL, Shown
from weft.engine.watch.reader import ANSWER_S, WatchedEngine, WatchedReplica, ask
from weft.engine.wire.control import TakeKvStats, TakeScheduleStats
from weft.engine.wire.reports import read_answer

_KINDS: Final = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily, "histogram": HistogramMetricFamily}
_BOUNDS: Final = (*(f"{bound:g}" for bound in BOUNDS_S), "+Inf")


class _ReplicaFigures(NamedTuple):
    """A replica's state, and its scheduler's figures, which are None if the scheduler did not answer."""

    model: str
    health: ReplicaHealth
    schedule: ScheduleStats | None
    kv: KvStats | None


async def _read_figures(replicas: Sequence[WatchedReplica]) -> list[_ReplicaFigures]:
    """Ask all schedulers at once. One that does not answer in two seconds has no figures."""
    return list(await asyncio.gather(*map(_figures, replicas)))


async def _figures(replica: WatchedReplica) -> _ReplicaFigures:
    schedule, kv = await ask(replica, TakeScheduleStats(), TakeKvStats())
    figures = read_answer(ScheduleStats, schedule), read_answer(KvStats, kv)
    return _ReplicaFigures(replica.model, replica.health, *figures)


class _Rising:
    """Sums of replicas that begin at 0 again when their process does, made into sums that never fall."""

    def __init__(self) -> None:
        # By replica and name: the sum of its earlier processes, and the last one of the present process.
        self._seen: dict[EngineId, dict[str, tuple[float, float]]] = {}

    def of(self, replica: EngineId, name: str, value: float) -> float:
        """The sum over all processes of the replica."""
        sums = self._seen.setdefault(replica, {})
        before, last = sums.get(name, (0.0, 0.0))
        if value < last:
            before += last
        sums[name] = before, value
        return before + value

    def keep(self, replicas: Sequence[EngineId]) -> None:
        """Forget all other replicas."""
        self._seen = {replica: sums for replica, sums in self._seen.items() if replica in replicas}


class MetricsCollector:
    """Collects the metrics of engines when Prometheus asks. Register one for all engines of a process::

        from prometheus_client import REGISTRY

        REGISTRY.register(weft.MetricsCollector(engine))

    Sums begin with the collector. An engine that is not used any more keeps its last figures until it is collected as
    garbage. Where a scrape runs inside an event loop, which must not wait, the schedulers' figures are those that they
    gave after the scrape before.

    Args:
        *engines: The engines.
        shown: The names that are told apart: by default those of programs, tools and tenants that are used most.
    """

    def __init__(self, *engines: WatchedEngine, shown: Shown = ALL) -> None:
        self._measured = [_Measured(engine, shown) for engine in engines]
        self._lock = fork_safe(threading.Lock())

    def describe(self) -> Iterable[Metric]:
        """The metrics without values, so that a registry knows their names."""
        return _Samples().families.values()

    def collect(self) -> Iterable[Metric]:
        """The metrics now. It asks the schedulers, and takes at most two seconds."""
        samples = _Samples()
        with self._lock:
            self._measured = [each for each in self._measured if each.engine() is not None]
            for measured in self._measured:
                measured.sample(samples)
        return samples.families.values()


class _Samples:
    """The metrics, to which values are added."""

    def __init__(self) -> None:
        self.families: dict[str, Any] = {
            each.name: _KINDS[each.kind](each.name, each.meaning, labels=("engine", *each.labels)) for each in METRICS
        }
        self.engine_id = ""

    def add(self, name: str, value: float, *labels: str) -> None:
        self.families[name].add_metric((self.engine_id, *labels), value)

    def add_histogram(self, name: str, histogram: Histogram, *labels: str) -> None:
        buckets = list(zip(_BOUNDS, accumulate(histogram.counts), strict=True))
        self.families[name].add_metric((self.engine_id, *labels), buckets, histogram.sum_s)


class _Measured:
    """One engine."""

    def __init__(self, engine: WatchedEngine, shown: Shown) -> None:
        self.engine = weakref.ref(engine)
        self._counts = counts = ProgramCounts(shown)
        self._replicas: list[_ReplicaFigures] = []
        self._answered: dict[EngineId, _ReplicaFigures] = {}  # the latest answer of each
        self._rising = _Rising()
        engine.observe(counts)
        for row in engine.table:
            counts.program_started(row.info, row.start_s)

    def sample(self, samples: _Samples) -> None:
        engine = self.engine()
        if engine is None:
            return
        samples.engine_id = engine.engine_id
        self._ask(engine)
        self._sample_table(samples, engine.table)
        with self._counts.still():
            self._sample_counts(samples)
        for model, admission in engine.admissions.items():
            samples.add("weft:calls_in_flight", admission.calls, model)
            samples.add("weft:calls_limit", admission.limit, model)
            samples.add("weft:calls_overloaded_total", admission.refusals, model)
        for replica in self._replicas:
            self._sample_replica(samples, replica, is_alive=engine.is_alive)

    # -- schedulers

    def _ask(self, engine: WatchedEngine) -> None:
        async def read() -> None:
            self._replicas = await _read_figures(engine.watched())

        if not engine.is_alive:
            return
        with suppress(EngineError, TimeoutError, CancelledError):  # the last figures are left
            reading = engine.submit(read())
            if not _is_in_event_loop():
                reading.result(ANSWER_S + 1.0)
        self._rising.keep([each.health.engine_id for each in self._replicas])

    def _sample_replica(self, samples: _Samples, replica: _ReplicaFigures, *, is_alive: bool) -> None:
        health = replica.health
        labels = (replica.model, health.engine_id)
        now = health.state if is_alive else ReplicaState.DOWN
        for state in ReplicaState:
            samples.add("weft:replica_state", float(state is now), *labels, str(state))
        samples.add("weft:replica_calls", health.calls, *labels)
        samples.add("weft:replica_deaths_total", health.deaths, *labels)
        samples.add("weft:calls_stolen_total", health.stolen, *labels)
        if replica.schedule is not None:
            self._answered[health.engine_id] = replica
            for level in replica.schedule.levels:
                samples.add("weft:level_running", level.running, *labels, str(level.level))
                samples.add("weft:level_waiting", level.waiting, *labels, str(level.level))
        if replica.kv is not None:
            samples.add("weft:kv_held_blocks", replica.kv.held_blocks, *labels)
            samples.add("weft:kv_held_programs", replica.kv.programs_held, *labels)
            samples.add("weft:kv_host_used_bytes", replica.kv.host_used_bytes, *labels)
            samples.add("weft:kv_host_capacity_bytes", replica.kv.host_capacity_bytes, *labels)
        self._sample_sums(samples, self._answered.get(health.engine_id, replica), labels)

    def _sample_sums(self, samples: _Samples, answer: _ReplicaFigures, labels: tuple[str, EngineId]) -> None:
        def add(name: str, value: float, *more: str) -> None:
            samples.add(name, self._rising.of(labels[1], name + "".join(more), value), *labels, *more)

        if answer.schedule is not None:
            for level in answer.schedule.levels:
                add("weft:level_starts_total", level.starts, str(level.level))
                add("weft:level_wait_seconds_total", level.wait_s, str(level.level))
                add("weft:level_service_seconds_total", level.service_s, str(level.level))
            add("weft:promotions_total", answer.schedule.promotions)
        if answer.kv is not None:
            add("weft:kv_spilled_tokens_total", answer.kv.spilled_tokens)

    # -- the front end

    def _sample_table(self, samples: _Samples, table: ProcessTable) -> None:
        rows = list(table)
        programs: Counter[tuple[str, ProgramState]] = Counter()
        for (name, state), count in Counter((row.info.name, row.state) for row in rows).items():
            programs[self._counts.names.key(name), state] += count
        for name in list(self._counts.names):
            for state in (ProgramState.IDLE, ProgramState.ACTIVE):
                samples.add("weft:programs_open", programs[name, state], name, str(state))
        samples.add("weft:tools_running", sum(len(row.tools_running) for row in rows))

    def _sample_counts(self, samples: _Samples) -> None:
        counts = self._counts
        for name, each in counts.names.items():
            for state, count in each.ended.items():
                samples.add("weft:programs_ended_total", count, name, str(state))
            for outcome, count in each.calls.items():
                samples.add("weft:calls_total", count, name, str(outcome))
            samples.add_histogram("weft:program_duration_seconds", each.took, name)
            samples.add_histogram("weft:call_wait_seconds", each.wait, name)
            samples.add_histogram("weft:call_service_seconds", each.service, name)
            account = each.account
            samples.add("weft:preemptions_total", account.preemptions, name)
            samples.add("weft:prompt_tokens_total", account.prompt_tokens, name)
            samples.add("weft:generation_tokens_total", account.output_tokens, name)
            samples.add("weft:kv_found_tokens_total", account.found_tokens, name)
            samples.add("weft:kv_fetched_tokens_total", account.fetched_tokens, name)
            samples.add("weft:kv_recomputed_tokens_total", account.recomputed_tokens, name)
            samples.add("weft:kv_swapped_in_tokens_total", account.swapped_tokens, name)
        for tenant, sums in counts.tenants.items():
            samples.add("weft:tenant_service_seconds_total", sums.service_s, tenant)
            samples.add("weft:tenant_wait_seconds_total", sums.wait_s, tenant)
        for tool, histogram in counts.tools.items():
            samples.add_histogram("weft:tool_duration_seconds", histogram, tool)
        for error, count in counts.refusals.items():
            samples.add("weft:calls_refused_total", count, error)
        for tenant, reasons in counts.requests_refused.items():
            for reason, count in reasons.items():
                samples.add("weft:requests_refused_total", count, str(reason), tenant)


def _is_in_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
