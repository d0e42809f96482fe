"""Program traces: the file format, the recorder, generated workloads, and importers of other traces.

`weft record`, `weft trace` and `weft sim` use them.
"""

from weft.core.trace.format import TraceCall, TraceProgram

__all__ = ["TraceCall", "TraceProgram"]
