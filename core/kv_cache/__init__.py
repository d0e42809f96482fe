"""Rules of the KV cache: when to swap, keep, spill and fetch, and which block is evicted next.

`weft.engine.kv_cache` carries the rules out in engines, and `weft.core.sim` in simulation.
"""
