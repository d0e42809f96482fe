"""What a program's own handle and the handles of its branches share."""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Collection, Hashable
from typing import TYPE_CHECKING, Any, Final, Protocol

from weft.core.ids import IdSource, ProgramId
from weft.core.locks import fork_safe
from weft.core.process_rows import ProgramInfo, ProgramRow, ProgramState
from weft.core.program.graph import ProgramGraph
from weft.core.program.structure.run_tree import RunTree
from weft.core.program.structure.runs import CodeRuns

if TYPE_CHECKING:
    from weft.core.program.structure.runs import Position


class Backend(Protocol):
    """The interface of an engine to programs. The methods return at once and may be called from any thread."""

    def start_session(self, info: ProgramInfo) -> None:
        """Register a program under its session (Autellix §5, `start_session`)."""

    def end_session(self, program_id: ProgramId, state: ProgramState) -> ProgramRow | None:
        """Abort the program's calls in flight and return its last row, which leaves the table (`end_session`)."""

    def tool_started(self, program_id: ProgramId, run: Hashable, tool: str) -> None:
        """A program waits for a tool of this name from now on. `run` tells it from others, and is used once."""

    def tools_ended(self, program_id: ProgramId, runs: Collection[Hashable]) -> None:
        """Tools have returned. Runs that did not begin as tools, or have ended, change nothing."""

    def call_announced(self, program_id: ProgramId) -> None:
        """A program's next call comes soon."""

    def row(self, program_id: ProgramId) -> ProgramRow | None:
        """Return the row of a running program, None if there is none."""


_MOST_PAUSES: Final = 64


def nothing() -> None:
    """Does nothing."""


class SharedState:
    """The state that a program's own handle and the handles of its branches share."""

    def __init__(self, info: ProgramInfo, ids: IdSource) -> None:
        self.info = info
        self.ids = ids
        self.lock = fork_safe(threading.RLock())
        self.tree = RunTree(ids.thread)
        self.code_runs = CodeRuns()
        self.graph = ProgramGraph(info.program_id, info.session_id, info.name, info.parent_program_id)
        self.opened_in: Position | None = None  # in another program, while this one runs
        self.outer: tuple[ProgramId, ...] = ()  # the programs around this one, the innermost first
        self.state = ProgramState.IDLE
        self.backend: Backend | None = None
        self.last_row: ProgramRow | None = None
        self.anchors = itertools.count(1)
        self.framework_states: dict[str, Any] = {}
        self.reports = 0  # from integrations and the engine
        self.has_called = False
        self.until_call: deque[Hashable] = deque(maxlen=_MOST_PAUSES)  # what ends with the next call
        self.idle_timeout_s: float | None = None
        self.on_abandoned: Callable[[], None] = nothing
        self.has_answered: Callable[[], bool] = bool  # False
