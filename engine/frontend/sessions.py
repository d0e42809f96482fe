"""The open sessions of an engine and their running programs."""

from __future__ import annotations

import threading

from weft.core.ids import ProgramId, SessionId
from weft.core.locks import fork_safe
from weft.core.process_rows import ProgramInfo


class Sessions:
    """A session begins with its first program and ends with its last one (Autellix §5). Any thread may use it."""

    def __init__(self) -> None:
        self._lock = fork_safe(threading.Lock())
        self._programs: dict[SessionId, set[ProgramId]] = {}

    def begin(self, info: ProgramInfo) -> None:
        """A program begins."""
        with self._lock:
            self._programs.setdefault(info.session_id, set()).add(info.program_id)

    def end(self, info: ProgramInfo) -> bool:
        """A program has ended.

        Returns:
            Whether its session ended with it.
        """
        with self._lock:
            programs = self._programs[info.session_id]
            programs.discard(info.program_id)
            if not programs:
                del self._programs[info.session_id]
            return not programs

    def snapshot(self) -> dict[SessionId, frozenset[ProgramId]]:
        """The open sessions and their running programs."""
        with self._lock:
            return {session: frozenset(programs) for session, programs in self._programs.items()}
