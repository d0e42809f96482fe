"""vLLM's scheduler process: the `scheduler_cls` plugin, what it keeps of each call, and its waiting queue."""

from weft.engine.scheduler.plugin import WeftScheduler

__all__ = ["WeftScheduler"]
