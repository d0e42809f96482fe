"""The programs of a handler without a program of its own: each root run is one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final
from uuid import UUID

from weft.core.ids import SessionId
from weft.core.locks import fork_safe
from weft.core.process_rows import ProgramState
from weft.core.program import Program
from weft.core.program.idle import IdlePrograms

_KEPT: Final = 1000  # runs of abandoned programs
_CHECKS_A_TIMEOUT: Final = 4


@dataclass(eq=False, slots=True)
class _RootRun:
    program: Program
    run_id: UUID
    open_runs: set[UUID]  # those inside that have not ended, itself included


@dataclass(eq=False, slots=True)
class _AbandonedRun:
    """What is kept of a root run whose program timed out, in case that a call comes after all."""

    name: str
    session_id: SessionId
    metadata: Mapping[str, Any]
    run_id: UUID
    open_runs: set[UUID]


class RootRuns:
    """The programs of root runs, by the runs inside that have not ended. Any thread may use it.

    A program ends with its last run, or at once when its root run fails or is cancelled: LangChain reports no end of a
    tool that is cancelled. LangChain may report nothing at all, for example of a stream that is neither read nor
    closed. Such a program ends when it has been idle for the time-out.

    Args:
        idle_timeout_s: Seconds without a report and without a call in flight; None: no limit.
        on_end: Called with the runs that are forgotten because their program has ended.
    """

    def __init__(
        self,
        idle_timeout_s: float | None,
        on_end: Callable[[set[UUID]], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._idle_timeout_s = idle_timeout_s
        self._on_end = on_end
        self._clock = clock
        self._lock = fork_safe(threading.Lock())
        self._roots: dict[UUID, _RootRun] = {}  # by open run
        self._abandoned: dict[UUID, _AbandonedRun] = {}  # by run, the oldest first
        self._idle = IdlePrograms()
        self._checked_s = clock()

    def __len__(self) -> int:
        return len(self._roots)

    def program_of(self, run_id: UUID) -> Program | None:
        root = self._roots.get(run_id)
        return root.program if root is not None else None

    def start(self, run_id: UUID, parent_run_id: UUID | None, make: Callable[[], Program]) -> Program:
        """A run starts, inside `parent_run_id` or, if it has started before, itself. Returns its program, which `make`
        makes for a root run. If the program timed out, the run goes on in a new one of the same name and session."""
        self._end_idle()
        with self._lock:
            root = self._roots.get(parent_run_id) if parent_run_id is not None else None
            abandoned = self._abandoned.get(parent_run_id) if root is None and parent_run_id is not None else None
            if abandoned is not None:
                root = self._resume(abandoned)
            if root is not None:
                root.open_runs.add(run_id)
                self._roots[run_id] = root
        if abandoned is not None and root is not None:
            root.program.log.warning(
                "the run's program had timed out, so the run goes on as a new program of the same session; "
                "give ProgramCallbackHandler a longer idle_timeout_s, or None",
                idle_timeout_s=self._idle_timeout_s,
            )
        if root is None:
            root = _RootRun(make(), run_id, {run_id})
            with self._lock:
                self._add(root)
        return root.program

    def end(self, run_id: UUID, error: BaseException | None) -> None:
        """A run has ended; its program ends with its last run, or with a root run that has failed."""
        with self._lock:
            root = self._roots.pop(run_id, None)
            if root is None:
                self._end_abandoned(run_id)
                return
            root.open_runs.discard(run_id)
            is_over = not root.open_runs or (run_id == root.run_id and error is not None)
            if is_over:
                self._forget(root)
        root.program.reports.end_run(run_id)
        if is_over:
            # LangChain reports a sync stream that is left as finished, its model run not.
            root.program.reports.end_with(error)

    # -- under the lock

    def _add(self, root: _RootRun) -> None:
        self._roots.update(dict.fromkeys(root.open_runs, root))
        if self._idle_timeout_s is not None:
            root.program.reports.end_when_idle(self._idle_timeout_s, partial(self._abandon, root))
            self._idle.watch(root.program, self._clock())

    def _forget(self, root: _RootRun) -> None:
        for run_id in root.open_runs:
            del self._roots[run_id]
        self._idle.discard(root.program.program_id)
        self._on_end(root.open_runs)

    def _resume(self, abandoned: _AbandonedRun) -> _RootRun:
        for run_id in abandoned.open_runs:
            del self._abandoned[run_id]
        program = Program(abandoned.name, session_id=abandoned.session_id, metadata=abandoned.metadata)
        root = _RootRun(program, abandoned.run_id, abandoned.open_runs)
        self._add(root)
        return root

    def _end_abandoned(self, run_id: UUID) -> None:
        abandoned = self._abandoned.pop(run_id, None)
        if abandoned is not None:
            abandoned.open_runs.discard(run_id)
            if run_id == abandoned.run_id:
                for each in abandoned.open_runs:
                    del self._abandoned[each]

    # -- programs that time out

    def _end_idle(self) -> None:
        """End idle programs, also those without a call, which no engine knows."""
        now_s = self._clock()
        with self._lock:
            if self._idle_timeout_s is None or now_s - self._checked_s < self._idle_timeout_s / _CHECKS_A_TIMEOUT:
                return
            self._checked_s = now_s
        self._idle.check(now_s, lambda program: program.state is ProgramState.ACTIVE)

    def _abandon(self, root: _RootRun) -> None:
        """The root run's program has timed out."""
        program = root.program
        with self._lock:
            self._forget(root)
            kept = _AbandonedRun(program.name, program.session_id, program.metadata, root.run_id, root.open_runs)
            self._abandoned.update(dict.fromkeys(root.open_runs, kept))
            while len(self._abandoned) > _KEPT:
                run_id = next(iter(self._abandoned))
                self._abandoned.pop(run_id).open_runs.discard(run_id)
