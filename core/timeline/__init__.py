"""A program's timeline: what each of its calls and tools did, and when. Made from its graph; also a Perfetto trace."""

from __future__ import annotations

from weft.core.timeline.document import Gap, Lane, Path, Span, Timeline, TimelineCall, TimelineTool
from weft.core.timeline.make import timeline

__all__ = ["Gap", "Lane", "Path", "Span", "Timeline", "TimelineCall", "TimelineTool", "timeline"]
