"""What people look at: an engine now, and the timeline of a program, as typed documents."""

from weft.core.show.documents import MOST_CALLS as MOST_CALLS
from weft.core.show.documents import LiveCall as LiveCall
from weft.core.show.documents import LiveProgram as LiveProgram
from weft.core.show.documents import LiveReplica as LiveReplica
from weft.core.show.documents import LiveRow as LiveRow
from weft.core.show.documents import LiveState as LiveState
from weft.core.show.documents import ProgramKv as ProgramKv
from weft.core.show.documents import SchedulerState as SchedulerState
from weft.core.show.documents import compose as compose
from weft.core.show.documents import to_json as to_json
from weft.core.show.program_timeline import Gap as Gap
from weft.core.show.program_timeline import Lane as Lane
from weft.core.show.program_timeline import Path as Path
from weft.core.show.program_timeline import Span as Span
from weft.core.show.program_timeline import Timeline as Timeline
from weft.core.show.program_timeline import TimelineTool as TimelineTool
from weft.core.show.program_timeline import timeline as timeline
