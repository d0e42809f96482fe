"""Rules of the KV cache: when to swap, and which host copies to evict. `weft.engine.kv_cache` carries them out."""
