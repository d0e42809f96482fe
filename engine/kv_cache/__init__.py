"""The KV swap between the engine's paged cache and host memory, in the scheduler's process and in the workers.

The scheduler's process has `store` (whose KV is kept, in which slots). The workers have `worker` (the copies),
`layout` (where blocks lie), `pool` (the host memory) and `kernel` (what moves the bytes). `connector` joins both sides
through vLLM; `plan` is what travels between them.
"""

from weft.engine.kv_cache.kernel import Swapper, Transfer
from weft.engine.kv_cache.layout import CacheLayout, describe
from weft.engine.kv_cache.pool import HostPool, SlotTable

__all__ = ["CacheLayout", "HostPool", "SlotTable", "Swapper", "Transfer", "describe"]
