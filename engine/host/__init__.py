"""The host process: calls in flight, sessions, the process table, and vLLM's chat serving layer."""
