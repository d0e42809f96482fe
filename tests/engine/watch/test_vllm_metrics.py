"""vLLM's own metrics of several replicas in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from prometheus_client import REGISTRY

pytestmark = pytest.mark.engine  # it imports vLLM, and starts no engine


def test_replicas_share_vllms_metrics(tmp_path: Path) -> None:
    """A replica that starts, or starts again, leaves the figures of the others, and goes on with its own."""
    from scheduler_harness import SchedulerHarness

    from weft.engine.vllm_compat.names import PrometheusStatLogger
    from weft.engine.watch.metrics.vllm_metrics import stat_logger

    config = SchedulerHarness(tmp_path, {"name": "fcfs"}).scheduler.vllm_config

    def waiting(replica: int) -> float | None:
        labels = {"engine": str(replica), "model_name": str(config.model_config.served_model_name)}
        return REGISTRY.get_sample_value("vllm:num_requests_waiting", labels)

    def logger(replica: int) -> Any:
        return stat_logger(replica)(config, [0])

    first, second = logger(0), logger(1)
    assert isinstance(first, PrometheusStatLogger)
    first.gauge_scheduler_waiting[0].set(3)
    second.gauge_scheduler_waiting[1].set(4)
    again = logger(0)
    assert (waiting(0), waiting(1)) == (3, 4)
    again.gauge_scheduler_waiting[0].set(5)
    assert (waiting(0), waiting(1)) == (5, 4)
    again.record(None, None, None, engine_idx=0)
