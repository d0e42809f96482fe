"""A call between its submission and its result."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from weft.core.errors import EngineClosedError, ProgramEndedError, WeftError
from weft.core.ids import EngineId
from weft.core.process_table import CallIdentity, CallRow
from weft.core.program import Program
from weft.core.program.graph import CallState
from weft.core.routing.admission import Admission, Deadline
from weft.core.trace.recorder import Recorder

if TYPE_CHECKING:  # it imports vLLM, which takes seconds
    from weft.engine.frontend.chat import ChatEndpoint


class Served(NamedTuple):
    """What serves the calls of one model."""

    endpoint: ChatEndpoint
    admission: Admission
    engine_id: EngineId | None  # where they run; None: each is placed on its way


class TokenTap:
    """Takes the token ids of a call off its answer, for the recorder, which compares prompts.

    Args:
        recorder: what gets them.
        identity: the call.
        request: the `ChatCompletionRequest`; vLLM is asked to send the ids along.
    """

    def __init__(self, recorder: Recorder, identity: CallIdentity, request: Any) -> None:
        self._recorder = recorder
        self._identity = identity
        self._is_ours = not request.return_token_ids
        request.return_token_ids = True

    def take(self, answer: dict[str, Any]) -> bool:
        """Note the ids in a completion or a chunk of one, and take them out unless the caller wants them too.

        Returns:
            Whether it is for the caller. A chunk that is there for its ids alone is not.
        """
        prompt = self._read(answer, "prompt_token_ids")
        output: list[int] = []
        for choice in answer["choices"]:
            ids = self._read(choice, "token_ids")
            if choice["index"] == 0:  # the recorder has room for one
                output = ids
        self._recorder.note_tokens(self._identity.program_id, self._identity.call_id, prompt=prompt, output=output)
        return not self._is_ours or not answer["choices"] or not all(map(_is_bare, answer["choices"]))

    def _read(self, data: dict[str, Any], key: str) -> list[int]:
        return (data.pop(key, None) if self._is_ours else data.get(key)) or []


def _is_bare(choice: Mapping[str, Any]) -> bool:
    """Whether vLLM sends such a choice only where token ids are asked for."""
    return choice.get("delta") == {} and choice.get("finish_reason") is None and choice.get("logprobs") is None


@dataclass(eq=False, slots=True)
class InFlight:
    """A call that an engine is busy with."""

    program: Program
    identity: CallIdentity
    row: CallRow
    served: Served
    deadline: Deadline
    tap: TokenTap | None = None  # None: it is not recorded
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
