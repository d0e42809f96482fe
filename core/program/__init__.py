"""Programs: the handle, the decorator, and how the graph of a program's calls is inferred."""

from __future__ import annotations

from weft.core.program.handle import Program, adapter, passed_on, register_adapter
from weft.core.program.state import Backend
from weft.core.program.structure.surroundings import Position, register_surroundings

__all__ = ["Backend", "Position", "Program", "adapter", "passed_on", "register_adapter", "register_surroundings"]
