"""The graph of a program's calls: what it is made of, the DAG itself, its JSON, and how people see it."""

from __future__ import annotations

from weft.core.program.graph.dag import ProgramGraph
from weft.core.program.graph.nodes import CallNode, CallState, CriticalPath, Edge, FoldedCalls, Interception

__all__ = ["CallNode", "CallState", "CriticalPath", "Edge", "FoldedCalls", "Interception", "ProgramGraph"]
