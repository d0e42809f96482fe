"""Exports traces for other tools: `weft trace export`.

Each format has a function that writes programs, whole or not at all, and returns what was lost. It raises a
`TraceError` if the file cannot be written, or the format can say none of the programs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from weft.core.trace.exporters import agentic_mooncake, weka
from weft.core.trace.exporters.contract import NotExported as NotExported
from weft.core.trace.format import TraceProgram

EXPORTERS: Final[dict[str, Callable[[Sequence[TraceProgram], Path], NotExported]]] = {
    "agentic-mooncake": agentic_mooncake.write,
    "weka": weka.write,
}
