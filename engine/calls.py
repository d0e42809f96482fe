"""A call between its submission and its result."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from weft.core.admission import Admission, Deadline
from weft.core.errors import EngineClosedError, ProgramEndedError, WeftError
from weft.core.graph import CallState
from weft.core.ids import EngineId
from weft.core.process_table import CallIdentity, CallRow
from weft.core.program import Program

if TYPE_CHECKING:  # it imports vLLM, which takes seconds
    from weft.engine.endpoint import ChatEndpoint


class Served(NamedTuple):
    """What serves the calls of one model."""

    endpoint: ChatEndpoint
    admission: Admission
    engine_id: EngineId | None  # where they run; None: each is placed on its way


@dataclass(eq=False, slots=True)
class InFlight:
    """A call that an engine is busy with."""

    program: Program
    identity: CallIdentity
    row: CallRow
    served: Served
    deadline: Deadline
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
