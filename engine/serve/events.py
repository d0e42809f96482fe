"""What clients say of their programs between two calls: tools, the end, that they go on."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from typing import Any, Final

from weft.core.ids import ProgramId, check_id
from weft.core.process_rows import ProgramState
from weft.engine.multi import AsyncMultiLLMEngine
from weft.engine.serve.programs import OpenPrograms
from weft.engine.wire.control import EventKind, ProgramEvent, ProgramEvents, ProgramsEnded, decode_control
from weft.engine.wire.values import strings

MOST_ITEMS: Final = 10_000  # of a message; what comes after them is lost, which costs a guess or a time-out
_OPEN: Final = "programs_open"


def note_events(engine: AsyncMultiLLMEngine, programs: OpenPrograms, scope: str, message: Mapping[str, Any]) -> None:
    """Take a message of a client. Programs that are not open, and what is no event, change nothing.

    Args:
        engine: The engine.
        programs: The open programs.
        scope: Of the client's key: its ids are in it.
        message: A `ProgramEvents` or a `ProgramsEnded`, as `encode_control` writes it, or the ids of programs that go
            on without a call.

    Raises:
        InvalidIdError: The name of a tool is none. Then nothing of the message counts.
    """
    if message.get("type") == _OPEN:
        for program_id in islice(strings(message.get("program_ids")), MOST_ITEMS):
            programs.touch(ProgramId(f"{scope}/{program_id}"))
        return
    found = decode_control(message)
    if isinstance(found, ProgramsEnded):
        states = (
            (found.failed, ProgramState.FAILED),  # these two also are among all that have ended
            (found.cancelled, ProgramState.CANCELLED),
            (found.program_ids, ProgramState.FINISHED),
            (found.abandoned, ProgramState.ABANDONED),
        )
        for ids, state in states:
            for program_id in ids[:MOST_ITEMS]:
                programs.end(ProgramId(f"{scope}/{program_id}"), state)
    elif isinstance(found, ProgramEvents):
        events = found.events[:MOST_ITEMS]
        for event in events:
            if event.tool:
                check_id(event.tool, "each tool's name")
        for event in events:
            _happened(engine, programs, event, scope)


def _happened(engine: AsyncMultiLLMEngine, programs: OpenPrograms, event: ProgramEvent, scope: str) -> None:
    program_id = ProgramId(f"{scope}/{event.program_id}")
    if not programs.touch(program_id):
        return
    if event.kind is EventKind.TOOL_STARTED:
        engine.tool_started(program_id, event.run, event.tool)
    elif event.kind is EventKind.TOOL_ENDED:
        engine.tools_ended(program_id, (event.run,))
    else:
        engine.call_announced(program_id)
