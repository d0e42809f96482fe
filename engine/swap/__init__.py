"""The public path of `weft.engine.kv_cache`."""

from __future__ import annotations

from weft.engine.kv_cache import CacheLayout, HostPool, SlotTable, SlotUsage, Swapper, Transfer, describe

__all__ = ["CacheLayout", "HostPool", "SlotTable", "SlotUsage", "Swapper", "Transfer", "describe"]
