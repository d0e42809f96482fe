"""Programs: the handle, the decorator, and how the graph of a program's calls is inferred."""

from __future__ import annotations

from weft.core.program.handle import Backend, Program, register_adapter

__all__ = ["Backend", "Program", "register_adapter"]
