"""A call between its submission and its result."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import asdict, dataclass
from typing import Any

from weft.core.errors import EngineClosedError, ProgramEndedError, WeftError
from weft.core.graph import CallState
from weft.core.process_table import CallIdentity, CallRow
from weft.core.program import Program


@dataclass(eq=False, slots=True)
class InFlight:
    """A call that an engine is busy with."""

    program: Program
    identity: CallIdentity
    row: CallRow
    future: Future[Any] | None = None  # None until it is submitted
    outcome: CallState = CallState.CANCELLED  # unless the engine gives its whole answer, or fails to
    ended: bool = False  # its program ended, or the engine was shut down, before it did

    def report(self) -> dict[str, Any]:
        """Ids and account, as they go back with the answer."""
        return {**asdict(self.identity), **asdict(self.row.account)}

    def ended_error(self, engine_closed: bool) -> WeftError | None:
        """Why it was aborted, if that was not its caller's doing."""
        if not self.ended:
            return None
        return EngineClosedError() if engine_closed else ProgramEndedError(self.program.program_id, self.program.name)
