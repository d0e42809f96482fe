"""Generates programs with the published statistics of the papers' workloads, and their arrivals.

Each paper has a file. `weft trace make` and the benchmarks use `generate`.
"""

from __future__ import annotations

from weft.core.trace.workloads.autellix import chat as chat
from weft.core.trace.workloads.autellix import search as search
from weft.core.trace.workloads.generate import AUTELLIX as AUTELLIX
from weft.core.trace.workloads.generate import WORKLOADS as WORKLOADS
from weft.core.trace.workloads.generate import bursty as bursty
from weft.core.trace.workloads.generate import generate as generate
from weft.core.trace.workloads.generate import poisson as poisson
from weft.core.trace.workloads.parts import LongTail as LongTail
from weft.core.trace.workloads.saga import TOOL_TIMES_S as TOOL_TIMES_S
from weft.core.trace.workloads.saga import swe as swe
from weft.core.trace.workloads.saga import tenants as tenants
from weft.core.trace.workloads.saga import tool_time_s as tool_time_s
from weft.core.trace.workloads.saga import web as web
