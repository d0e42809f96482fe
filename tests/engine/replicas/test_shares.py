"""Shares over replicas: what tenants had on one scheduler reaches the others, on vLLM's schedulers without a model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from scheduler_harness import SchedulerHarness

from weft.core.ids import EngineId, ProgramId, SessionId
from weft.core.routing import Arrival, LeastUsed
from weft.core.routing.replicas import ReplicaSet
from weft.engine.replicas.group import ShareKeeper


class HarnessReplica:
    """A replica with a real scheduler. While `busy` is set, it is in a long step and answers nothing."""

    def __init__(self, folder: Path) -> None:
        self.harness = SchedulerHarness(folder, {"name": "fair", "inner": "fcfs"}, slots=1)
        self.busy: asyncio.Event | None = None
        self.told: list[Any] = []

    async def send_to_scheduler(self, message: Mapping[str, Any]) -> Any:
        if self.busy is not None:
            await self.busy.wait()
        self.told.append(message["elsewhere"])
        return json.loads(json.dumps(self.harness.scheduler(json.loads(json.dumps(message)))))

    def add(self, tenant: str, calls: int) -> None:
        for number in range(calls):
            name = f"{tenant}{number}"
            self.harness.add(name, max_tokens=8, program_id=name, program_name="x", tenant=tenant, call_id=name)

    def served(self, steps: int) -> list[str]:
        """The tenants of the calls that the next steps serve."""
        return [each[0] for _ in range(steps) for each in self.harness.step()]


async def keeper(tmp_path: Path, count: int = 2) -> tuple[ShareKeeper, list[HarnessReplica], ReplicaSet]:
    replicas = {EngineId(f"e/{number}"): HarnessReplica(tmp_path) for number in range(count)}
    states = ReplicaSet(LeastUsed(), max_calls=100)
    for name in replicas:
        states.add(name)
        states.ready(name, 0.0)
    states.dispatch(Arrival(ProgramId("p"), SessionId("s"), 1))
    shares = ShareKeeper(states, replicas.get)  # type: ignore[arg-type]
    await shares.look()  # what was before does not count
    for replica in replicas.values():
        replica.told.clear()
    return shares, list(replicas.values()), states


@pytest.mark.anyio
@pytest.mark.parametrize("exchanges", [False, True])
async def test_a_tenant_that_another_replica_serves_alone_waits(tmp_path: Path, exchanges: bool) -> None:
    """Two tenants take turns on a replica. If one of them has the other replica for itself, the first is served."""
    shares, (one, other), _ = await keeper(tmp_path)
    one.add("a", 40)
    other.add("a", 40)
    other.add("b", 40)
    served: list[str] = []
    for _ in range(60):
        one.served(4)
        served += other.served(4)
        if exchanges:
            await shares.look()
    expected = 0.9 if exchanges else 0.5
    assert served.count("b") / len(served) == pytest.approx(expected, abs=0.15)


@pytest.mark.anyio
async def test_a_replica_in_a_long_step_keeps_nobody_waiting(tmp_path: Path) -> None:
    """The others exchange meanwhile, and it hears everything at once when it answers."""
    shares, replicas, _ = await keeper(tmp_path, 3)
    for replica in replicas:
        replica.add("a", 9)
    stuck = replicas[2]
    stuck.busy = asyncio.Event()
    for _ in range(4):
        for replica in replicas[:2]:
            replica.served(9)
        await shares.look()
    assert [len(replica.told) for replica in replicas] == [4, 4, 0]
    stuck.busy.set()
    stuck.busy = None
    for _ in range(2):
        await shares.look()
    heard = [sum(each.get("a", 0.0) for each in replica.told) for replica in replicas]
    assert heard[2] == pytest.approx(heard[0] + heard[1], rel=0.5)
    assert heard[2] > max(heard[:2]) > 0
    await shares.stop()


@pytest.mark.anyio
async def test_a_replica_that_comes_back_hears_nothing_of_what_was_before(tmp_path: Path) -> None:
    """It has forgotten what it served itself, so all tenants begin there with nothing."""
    shares, (one, other), states = await keeper(tmp_path)
    one.add("a", 9)
    one.served(9)
    states.down(EngineId("e/1"), "killed", 0.0)
    await shares.look()
    one.served(9)
    await shares.look()
    states.due(100.0)
    states.ready(EngineId("e/1"), 100.0)
    other.told.clear()
    await shares.look()
    assert other.told == [{}]
    one.served(9)
    for _ in range(2):
        await shares.look()
    assert any("a" in each for each in other.told)


@pytest.mark.anyio
async def test_nothing_runs_after_the_end(tmp_path: Path) -> None:
    """Though a replica is in a long step."""
    before = asyncio.all_tasks()
    shares, (one, _), _ = await keeper(tmp_path)
    one.busy = asyncio.Event()
    await shares.look()
    assert len(asyncio.all_tasks() - before) == 1
    await shares.stop()
    assert asyncio.all_tasks() == before
