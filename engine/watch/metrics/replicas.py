"""What the schedulers of an engine answer, for figures that only they know."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import Final, NamedTuple

from weft.core.errors import EngineError
from weft.core.ids import EngineId
from weft.core.kv_cache.stats import KvStats
from weft.core.policies.queues.levels import ScheduleStats
from weft.core.routing.replicas import ReplicaHealth
from weft.engine.watch import WatchedReplica
from weft.engine.wire.answers import read_kv_stats, read_schedule_stats
from weft.engine.wire.control import TakeKvStats, TakeScheduleStats, encode_control

ANSWER_S: Final = 2.0  # for a scheduler; a step of a big model takes less


class ReplicaFigures(NamedTuple):
    """A replica's state, and its scheduler's figures, which are None if the scheduler did not answer."""

    model: str
    health: ReplicaHealth
    schedule: ScheduleStats | None
    kv: KvStats | None


async def read_figures(replicas: Sequence[WatchedReplica]) -> list[ReplicaFigures]:
    """Ask all schedulers at once. One that does not answer in two seconds has no figures."""
    return list(await asyncio.gather(*map(_figures, replicas)))


async def _figures(replica: WatchedReplica) -> ReplicaFigures:
    schedule, kv = None, None
    with suppress(EngineError, TimeoutError):  # it has died, or is busy
        async with asyncio.timeout(ANSWER_S):
            answers = await asyncio.gather(
                *(replica.ask(encode_control(question)) for question in (TakeScheduleStats(), TakeKvStats()))
            )
        schedule, kv = read_schedule_stats(answers[0]), read_kv_stats(answers[1])
    return ReplicaFigures(replica.model, replica.health, schedule, kv)


class Rising:
    """Sums of replicas that begin at 0 again when their process does, made into sums that never fall."""

    def __init__(self) -> None:
        # By replica and name: the sum of its earlier processes, and the last one of the present process.
        self._seen: dict[EngineId, dict[str, tuple[float, float]]] = {}

    def of(self, replica: EngineId, name: str, value: float) -> float:
        """The sum over all processes of the replica.

        Args:
            replica: The replica.
            name: Tells its sums apart.
            value: The sum of its present process.
        """
        sums = self._seen.setdefault(replica, {})
        before, last = sums.get(name, (0.0, 0.0))
        if value < last:
            before += last
        sums[name] = before, value
        return before + value

    def keep(self, replicas: Sequence[EngineId]) -> None:
        """Forget all other replicas."""
        self._seen = {replica: sums for replica, sums in self._seen.items() if replica in replicas}
