"""KV swap between the engine's paged cache and host memory: the pool, the layout of the caches and the kernel."""

from weft.engine.swap.kernel import Swapper, Transfer
from weft.engine.swap.layout import CacheLayout, describe
from weft.engine.swap.pool import HostPool
from weft.engine.swap.slots import SlotTable, SlotUsage

__all__ = ["CacheLayout", "HostPool", "SlotTable", "SlotUsage", "Swapper", "Transfer", "describe"]
