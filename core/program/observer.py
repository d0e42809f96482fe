"""What happens to an engine's programs, for code that looks on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.core.process_rows import CallIdentity, CallRow, ProgramInfo, ProgramRow, ProgramState, RunningTool

if TYPE_CHECKING:
    from weft.core.ids import ProgramId
    from weft.core.program.graph import CallState, ProgramGraph
    from weft.core.routing.admission import Refused


class ProgramObserver:
    """Is told what happens to programs. Its methods do nothing; a subclass implements those that it needs.

    The methods are called on the thread on which something happens, so they must return at once, and any thread may
    call them. Times are seconds of the engine's clock.
    """

    def program_started(self, info: ProgramInfo, now_s: float) -> None:
        """A program makes its first call."""

    def call_arrived(self, identity: CallIdentity, graph: ProgramGraph, now_s: float) -> None:
        """A call was admitted. `graph` is its program's graph, which has the call, its label and its parents."""

    def call_refused(self, identity: CallIdentity, error: BaseException, now_s: float) -> None:
        """A call was not admitted."""

    def request_refused(self, reason: Refused, tenant: str | None, now_s: float) -> None:
        """A server refused a request before it made a call.

        Args:
            reason: Why it was refused.
            tenant: The tenant of the request's API key, if it has one.
        """

    def call_left(self, row: CallRow, outcome: CallState, now_s: float) -> None:
        """A call that was admitted has left, with its account so far in its row."""

    def tool_started(self, program_id: ProgramId, tool: RunningTool) -> None:
        """A program waits for a tool from now on."""

    def tool_ended(self, program_id: ProgramId, tool: RunningTool, now_s: float) -> None:
        """A tool has returned. A tool that runs when its program ends does not return."""

    def program_ended(self, row: ProgramRow, state: ProgramState, now_s: float) -> None:
        """A program has ended; its row has left the table."""
