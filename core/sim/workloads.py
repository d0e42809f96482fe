"""The public path of `weft.core.trace.workloads`."""

from __future__ import annotations

from weft.core.trace.workloads import WORKLOADS, bursty, chat, generate, mixed, poisson, search, tools

__all__ = ["WORKLOADS", "bursty", "chat", "generate", "mixed", "poisson", "search", "tools"]
