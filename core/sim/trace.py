"""The public path of `weft.core.trace.format`."""

from __future__ import annotations

from weft.core.trace.format import TraceCall, TraceProgram, dump, from_graph, parse, read, write

__all__ = ["TraceCall", "TraceProgram", "dump", "from_graph", "parse", "read", "write"]
