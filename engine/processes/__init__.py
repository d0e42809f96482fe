"""Threads and processes: the engine's event loop, vLLM's processes, and the clean-up after them."""
