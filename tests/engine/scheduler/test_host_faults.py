"""Host memory that is too small, that fails, or that is not there: everything is computed again, and nothing waits."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from host_programs import KEEPING, Make, call, end, harness, play, prompt_of, start_tool

from weft.core.errors import SwapDeviceError
from weft.core.kv_cache.config import SwapConfig

pytestmark = pytest.mark.engine


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Makes a harness with host memory; vLLM is imported only when it is called."""
    return partial(harness, tmp_path)


@pytest.mark.parametrize("policy", KEEPING)
def test_a_pool_too_small_for_one_program_keeps_its_beginning(make: Make, policy: str) -> None:
    """Host memory has 2 blocks, the context 4. What fits is kept, and the rest is computed."""
    h = make(policy, swap_blocks=2)
    for turn in range(3):
        call(h, f"a{turn}", prompt_of(1, 64 + turn), "a")
        call(h, f"b{turn}", prompt_of(2, 170), "b")
        assert h.scheduler._swap.stats().used <= 2
    end(h, "a", "b")
    h.settle()
    assert h.scheduler._swap.stats().used == 0


@pytest.mark.parametrize("policy", KEEPING)
def test_a_hundred_programs_whose_tools_never_return_stop_nobody(make: Make, policy: str) -> None:
    """They hold the device and host memory. A new call starts in the next step, and has its tokens."""
    h = make(policy, blocks=40, swap_blocks=60)
    for number in range(100):
        call(h, f"hold{number}", prompt_of(number % 90, 40 + number), f"hold{number}")
        start_tool(h, f"hold{number}", "never")
    h.add("new", prompt=[7] * 500, max_tokens=2, program_id="new")
    assert h.step() == {"new"}
    h.run()
    assert h.scheduler._swap.stats().used <= 60
    end(h, "new", *(f"hold{number}" for number in range(100)))
    h.settle()
    assert h.scheduler._swap.stats().used == 0


def test_where_every_copy_fails_everything_is_computed_again(make: Make) -> None:
    """No copy ever arrives. Programs go on as if there were no host memory."""
    play(make, 1, fails=1.0)


class WorkerKilledError(Exception):
    """In place of SIGKILL."""


def test_a_worker_that_dies_in_the_middle_of_a_copy_costs_time_only(make: Make) -> None:
    """vLLM ends an engine whose worker has died, and Weft starts another, which gets the calls again. It finds nothing
    of what was copied, even if its memory still holds that, and each call has its tokens."""
    h = make()
    copies = []

    def fails() -> bool:
        copies.append(1)
        if len(copies) == 3:
            raise WorkerKilledError
        return False

    h.worker.fails = fails
    call(h, "a1", prompt_of(1, 64), "a")
    start_tool(h, "a", "search")
    with pytest.raises(WorkerKilledError):
        call(h, "b1", prompt_of(2, 170), "b")
    assert 0 < len(h.worker.host) < 4, "the plan was carried out in part"
    other = make()
    other.worker.host.update(h.worker.host)
    assert call(other, "b1", prompt_of(2, 170), "b") == 0
    assert call(other, "a2", [*prompt_of(1, 64), 7, 8, 9], "a") == 0
    assert other.scheduler._swap.counts.loaded_tokens == 0
    assert call(other, "a3", [*prompt_of(1, 64), 7, 8, 9, 10], "a") == 64


def test_without_host_memory_nothing_is_kept(make: Make) -> None:
    """A worker could not reserve its memory. It says so with its first report, and no plan is made any more."""
    from weft.engine.kv_cache.connector import WorkerReport
    from weft.engine.vllm_compat.names import KVConnectorOutput

    h = make()
    report = KVConnectorOutput(kv_connector_worker_meta=WorkerReport(has_memory=False))
    h.scheduler.connector.update_connector_output(report)
    call(h, "a1", prompt_of(1, 64), "a")
    call(h, "b1", prompt_of(2, 170), "b")
    assert call(h, "a2", [*prompt_of(1, 64), 7], "a") < 64
    assert h.scheduler._swap.stats().used == 0
    assert h.scheduler._swap.counts.spilled_tokens == 0


def worker_connector(monkeypatch: pytest.MonkeyPatch, scheduler: Any) -> Any:
    """A connector of a worker whose system refuses the host memory."""
    from weft.engine.kv_cache import worker
    from weft.engine.kv_cache.connector import SwapConnector, transfer_config
    from weft.engine.vllm_compat.names import KVConnectorRole

    def refuse(*args: object, **options: object) -> None:
        raise SwapDeviceError("64 GiB cannot be had")

    monkeypatch.setattr(worker, "HostPool", refuse)
    config = scheduler.vllm_config
    config.kv_transfer_config = transfer_config(SwapConfig(space_gib=1))
    return SwapConnector(config, KVConnectorRole.WORKER, scheduler.kv_cache_config)


def test_a_worker_without_memory_starts_and_says_so_once(
    make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The engine starts nevertheless. What a plan asks for is reported as not copied."""
    from weft.engine.kv_cache.connector import StepPlan
    from weft.engine.kv_cache.slot_plans import SwapBatch, SwapPlan

    connector = worker_connector(monkeypatch, make().scheduler)
    with caplog.at_level(logging.WARNING):
        connector.register_kv_caches({"layer": torch.zeros(4, 8)})
        report = connector.build_connector_worker_meta()
        assert report is not None
        assert not report.has_memory
        plan = StepPlan(SwapPlan(SwapBatch([1], [5]), [SwapBatch([2, 3], [6, 7])], number=1))
        connector.bind_connector_metadata(plan)
        connector.handle_preemptions(plan)
        connector.start_load_kv(None)
    assert connector.get_block_ids_with_load_errors() == {2, 3}
    executed = connector.build_connector_worker_meta().executed
    assert (executed.lost, set(executed.unread)) == ((5,), {6, 7})
    assert sum("no host memory" in record.getMessage() for record in caplog.records) == 1


def test_a_report_that_never_comes_keeps_no_engine_awake(make: Make) -> None:
    """vLLM's loop asks whether to step again. It is not told to do so for ever."""
    h = make()
    call(h, "a1", prompt_of(1, 160), "a")
    h.scheduler.schedule()  # a plan whose report is lost with its worker
    assert h.scheduler._swap.awaits_report
    assert sum(h.scheduler.connector.has_pending_push_work() for _ in range(10_000)) < 2000
