"""Programs and calls for tests of the process table."""

from __future__ import annotations

from hypothesis import strategies as st

from weft.core.ids import CallId, EngineId, ProgramId, SessionId, ThreadId
from weft.core.process_rows import CallIdentity, ProgramInfo, ProgramState

ENGINE = EngineId("engine-0")
ENDINGS = [ProgramState.FINISHED, ProgramState.FAILED, ProgramState.CANCELLED]
AMOUNTS = st.integers(0, 400).map(lambda eighths: eighths / 8)  # exact in binary, so that sums can be compared by ==


def info(program: str = "p") -> ProgramInfo:
    return ProgramInfo(ProgramId(program), SessionId("s"), name=program)


def identity(call: str, thread: str = "t", program: str = "p") -> CallIdentity:
    return CallIdentity(ProgramId(program), ThreadId(thread), CallId(call))
