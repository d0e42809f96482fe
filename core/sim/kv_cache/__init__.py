"""The KV cache of a simulated engine, and replays of a cache alone."""
