"""Threads and processes: the engine's event loop, vLLM's processes, and what they leave behind."""
