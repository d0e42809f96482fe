"""Program traces: the file format, the recorder that writes traces, generated workloads, and converters."""

from __future__ import annotations

from weft.core.trace.format import TraceCall, TraceProgram

__all__ = ["TraceCall", "TraceProgram"]
