"""Rules of the KV cache: when to swap, and what to evict. The mechanism is in `weft.engine.kv_cache`."""
