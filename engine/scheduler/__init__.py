"""vLLM's scheduler process: the `scheduler_cls` plugin, what it keeps of each call, and its waiting queue."""

from __future__ import annotations

from weft.engine.scheduler.plugin import WeftScheduler

__all__ = ["WeftScheduler"]
