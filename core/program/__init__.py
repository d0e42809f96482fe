"""Programs: the handle, the decorator, and how the graph of a program's calls is inferred."""

from weft.core.program.handle import Program as Program
from weft.core.program.handle import adapter as adapter
from weft.core.program.handle import passed_on as passed_on
from weft.core.program.handle import register_adapter as register_adapter
from weft.core.program.state import Backend as Backend
from weft.core.program.structure.runs import Position as Position
from weft.core.program.structure.runs import register_surroundings as register_surroundings
