"""vLLM's own metrics of several engines in one process."""

from __future__ import annotations

from functools import partial
from typing import Any, Final

from prometheus_client import REGISTRY, Counter, Gauge, Histogram

from weft.engine.vllm_compat.names import PrometheusStatLogger

_metrics: Final[dict[str, Any]] = {}  # of vLLM, by name, which the replicas of this process share


def _shared(kind: Any, *, name: str, **arguments: Any) -> Any:
    """The metric of this name. vLLM takes those of an earlier engine out of the registry when it makes a logger."""
    if name in _metrics:
        REGISTRY.register(_metrics[name])
    else:
        _metrics[name] = kind(name=name, **arguments)
    return _metrics[name]


def stat_logger(replica: int) -> type[PrometheusStatLogger]:
    """A class of vLLM's logger for one of several replicas, whose metrics have its number as their label `engine`.

    vLLM's own logger knows one engine in a process, and forgets the metrics of the one before it.
    """

    class ReplicaStatLogger(PrometheusStatLogger):
        _gauge_cls = partial(_shared, Gauge)
        _counter_cls = partial(_shared, Counter)
        _histogram_cls = partial(_shared, Histogram)

        def __init__(self, vllm_config: Any, engine_indexes: list[int] | None = None) -> None:
            del engine_indexes  # of a replica's engine, which is the only one in its eyes
            super().__init__(vllm_config, [replica])

        def record(
            self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
        ) -> None:
            super().record(scheduler_stats, iteration_stats, mm_cache_stats, replica)

    return ReplicaStatLogger
