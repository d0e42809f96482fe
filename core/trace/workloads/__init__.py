"""Generates programs with the published statistics of the papers' workloads, and their arrivals.

Each paper has a file. `weft trace make` and the benchmarks use `generate`.
"""

from __future__ import annotations

from weft.core.trace.workloads.arrivals import bursty, poisson
from weft.core.trace.workloads.astraea import intercepted
from weft.core.trace.workloads.autellix import chat, mixed, search, tools
from weft.core.trace.workloads.generate import AUTELLIX, WORKLOADS, generate
from weft.core.trace.workloads.parts import LongTail
from weft.core.trace.workloads.saga import TOOL_TIMES_S, swe, tenants, tool_time_s, web

__all__ = [
    "AUTELLIX",
    "TOOL_TIMES_S",
    "WORKLOADS",
    "LongTail",
    "bursty",
    "chat",
    "generate",
    "intercepted",
    "mixed",
    "poisson",
    "search",
    "swe",
    "tenants",
    "tool_time_s",
    "tools",
    "web",
]
