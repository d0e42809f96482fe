"""KV swap between the engine's paged cache and host memory: the pool, the layout of the caches and the kernel."""

from weft.engine.kv_cache.kernel import Swapper, Transfer
from weft.engine.kv_cache.layout import CacheLayout, describe
from weft.engine.kv_cache.pool import HostPool
from weft.engine.kv_cache.slots import SlotTable, SlotUsage

__all__ = ["CacheLayout", "HostPool", "SlotTable", "SlotUsage", "Swapper", "Transfer", "describe"]
