"""A simulated KV cache with plain host memory behind it, the twin of vLLM's `kv_offloading_size`.

Everything that a call computes is copied out beside the steps, and what host memory has of a starting call's prompt is
copied back while other calls run (`vllm.distributed.kv_transfer.kv_connector.v1.offloading`).
"""

from __future__ import annotations

from weft.core.kv_cache.policies import KvPolicy
from weft.core.sim.kv_cache.cache import Segment
from weft.core.sim.kv_cache.host import HostMemory
from weft.core.sim.kv_cache.policy_cache import PolicyKvCache
from weft.core.sim.result import Counts
from weft.core.sim.settings import SimSettings
from weft.core.sim.sim_programs import SimCall


class OffloadingKvCache(PolicyKvCache):
    """A KV cache whose contents are copied to host memory, and copied back one after another.

    Args:
        settings: The simulation's settings. The KV cache must be bounded.
    """

    def __init__(self, settings: SimSettings, policy: KvPolicy, host: HostMemory, counts: Counts) -> None:
        super().__init__(settings, policy)
        self._host: HostMemory = host
        self._counts = counts
        self._token_s = settings.timing.copy_token_s
        self._until_s = 0.0  # when the last copy back to the device is done

    def load(self, call: SimCall, hit: int) -> tuple[int, float]:
        tokens = max(hit, self._host.held(call, hit))
        if tokens == hit:
            return hit, 0.0
        self._counts.fetched += tokens - hit
        self._until_s = max(self._until_s, self._now_s) + (tokens - hit) * self._token_s
        return tokens, self._until_s - self._now_s

    def call_ended(self, call: SimCall, segment: Segment) -> None:
        super().call_ended(call, segment)
        if call.owner.unfinished_calls > 1 or not self._contexts.policy.evicts_ended_first:
            self._counts.spilled += self._host.keep(call, 0, segment.end)

    def call_preempted(self, call: SimCall, segment: Segment) -> None:
        super().call_preempted(call, segment)
        self._counts.spilled += self._host.keep(call, 0, segment.end)
