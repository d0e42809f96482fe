"""The public path of `weft.core.program.graph`."""

from __future__ import annotations

from weft.core.program.graph import CallNode, CallState, CriticalPath, Edge, Interception, ProgramGraph

__all__ = ["CallNode", "CallState", "CriticalPath", "Edge", "Interception", "ProgramGraph"]
