"""Exports traces for other tools: `weft trace export`.

Each format has a file with a class; it is added to `EXPORTERS`.
"""

from __future__ import annotations

from typing import Final

from weft.core.trace.exporters.agentic_mooncake import AgenticMooncakeExporter
from weft.core.trace.exporters.contract import Exporter
from weft.core.trace.exporters.contract import NotExported as NotExported
from weft.core.trace.exporters.weka import WekaExporter

EXPORTERS: Final[dict[str, Exporter]] = {each.name: each for each in (AgenticMooncakeExporter(), WekaExporter())}
