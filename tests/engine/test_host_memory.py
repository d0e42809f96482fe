"""How much host memory engines have for KV, and which KV policy follows from it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from background import CommandResult
from hung_engine import hung_engine

import weft
from weft.engine.options import EngineOptions

pytestmark = pytest.mark.engine

GIB = 2**30


def _options(swap: weft.SwapConfig | None, **engine_args: Any) -> dict[str, Any] | None:
    """What vLLM's processes are told of host memory; None: there is none."""
    from weft.engine.vllm.start import engine_arguments

    transfer = engine_arguments("any", EngineOptions(swap=swap, engine_args=engine_args)).kv_transfer_config
    return None if transfer is None else dict(transfer.kv_connector_extra_config)


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """The bytes that the host has free."""
    from weft.engine.vllm import start

    found = {"bytes": 16 * GIB}
    monkeypatch.setattr(start, "free_bytes", lambda: found["bytes"])
    return found


def test_an_engine_has_host_memory_and_next_use_without_asking(engine: weft.Engine) -> None:
    """It has four times the KV cache, where so much is free."""
    from tiny_engine import ENGINE_ARGS

    stats = engine.kv_stats
    assert stats is not None
    assert stats.policy == "next-use"
    assert 0 < stats.host_capacity_bytes <= 4 * ENGINE_ARGS["kv_cache_memory_bytes"]
    assert engine.host_kv_gib == stats.host_capacity_bytes / GIB


@pytest.mark.slow
@hung_engine
def test_without_host_memory_the_scheduling_policy_says_what_is_evicted(command_result: CommandResult) -> None:
    """`swap=None` takes none."""
    assert json.loads(command_result.printed()) == ["ended-first", 0, 0.0]


def test_an_amount_that_is_named_counts(free: dict[str, int]) -> None:
    """It is not compared with what is free, and None takes nothing."""
    free["bytes"] = 0
    assert _options(weft.SwapConfig(space_gib=3)) == {"space_gib": 3, "min_tokens": "auto"}
    assert _options(None) is None


def test_the_workers_of_an_engine_share(free: dict[str, int]) -> None:
    """Half of what is free, for all ranks together."""
    assert _options(weft.SwapConfig()) == {"space_gib": "auto", "min_tokens": "auto", "most_gib": 8.0}
    split = _options(weft.SwapConfig(), tensor_parallel_size=2, pipeline_parallel_size=2)
    assert split is not None
    assert split["most_gib"] == 2.0


def test_where_too_little_is_free_there_is_none(free: dict[str, int]) -> None:
    """The engine starts all the same."""
    free["bytes"] = GIB // 16
    assert _options(weft.SwapConfig()) is None


def test_replicas_share(free: dict[str, int]) -> None:
    """Those of all models, each with its own ranks."""
    from weft.engine.vllm.start import most_host_gib

    assert most_host_gib([({}, 2), ({"tensor_parallel_size": 2}, 3)]) == 1.0


def test_only_an_engine_of_weft_can_measure(tmp_path: Path) -> None:
    """The processes of vLLM's own server would not agree on an amount. Without one it is 4 GiB there."""
    from scheduler_harness import SchedulerHarness, swapping

    from weft.core.errors import SwapArgumentError

    config = swapping(2**30, 0)["kv_transfer_config"]
    config.kv_connector_extra_config = {"space_gib": "auto"}
    with pytest.raises(SwapArgumentError, match=r"only weft\.Engine can measure"):
        SchedulerHarness(tmp_path, {"name": "fcfs"}, kv_transfer_config=config)
