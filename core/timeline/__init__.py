"""A program's timeline: what each of its calls and tools did, and when.

`timeline` makes it from the program's graph. The web page and `GET /weft/programs/{id}/timeline` show it, and
`weft.core.timeline.perfetto` turns it into a trace for Perfetto.
"""

from __future__ import annotations

from weft.core.timeline.document import Gap, Lane, Path, Span, Timeline, TimelineCall, TimelineTool
from weft.core.timeline.make import timeline

__all__ = ["Gap", "Lane", "Path", "Span", "Timeline", "TimelineCall", "TimelineTool", "timeline"]
