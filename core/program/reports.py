"""What integrations and engines report of a program: its runs, its calls, and that nothing happens in it any more."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Hashable, Iterable
from dataclasses import replace
from typing import Any, Final, NamedTuple

from structlog.stdlib import BoundLogger

from weft.core.accounts import Account
from weft.core.errors import ProgramEndedError, ProgramEngineError
from weft.core.ids import CallId, EngineId, ProgramId, ThreadId, plain_name
from weft.core.log import get_logger
from weft.core.process_rows import CallIdentity, ProgramState
from weft.core.program.graph import CallNode, CallState, Edge
from weft.core.program.state import Backend, SharedState, nothing
from weft.core.program.structure.lineage import NOTHING, Content, Inputs
from weft.core.program.structure.run_tree import ROOT
from weft.core.program.structure.runs import Position, RunKind, innermost, positions, running_task

MOST_PARENTS_SENT: Final = 64  # with a call to its engine, the newest; the graph has all of them
_MOST_OUTER: Final = 100  # programs around a program whose ids it keeps, the innermost


class _Place(NamedTuple):
    """Where a run begins."""

    parent: Hashable | None
    anchor: Hashable
    is_certain: bool = True
    is_late: bool = False


class Reports:
    """What integrations and engines report of a program, by one of its handles. Users take `weft.Program`.

    Args:
        anchors: the run that the handle stands for, and those of the handles around it.
        own_anchor: the same without the run in which the handle was passed on: the top, or a branch.

    Attributes:
        program_id: the id of this run.
        name: the program's name.
        log: a logger with the program's ids.
        adapted: by framework, the object that carries the handle.
    """

    def __init__(self, shared: SharedState, anchors: tuple[Hashable, ...], own_anchor: Hashable) -> None:
        self.shared = shared
        self._anchors = anchors
        self._own_anchor = own_anchor
        self._thread = threading.current_thread()  # that made the handle
        self.adapted: dict[str, Any] = {}
        self.program_id = shared.info.program_id
        self.name = shared.info.name
        shown = shared.info.shown
        self.log: BoundLogger = get_logger().bind(
            program=self.name, program_id=shown(self.program_id), session_id=shown(shared.info.session_id)
        )

    # -- start and end

    def bind(self, backend: Backend) -> bool:
        """Start the program's session on the engine of its first call. Later calls must use the same engine.

        Returns:
            Whether the session begins now.

        Raises:
            ProgramEndedError: the program has ended.
            ProgramEngineError: the program runs on another engine.
        """
        with self.shared.lock:
            self._check_running()
            if self.shared.backend is backend:
                return False
            if self.shared.backend is not None:
                raise ProgramEngineError(self.program_id, self.name)
            backend.start_session(self.shared.info)
            self.shared.backend = backend
            return True

    @property
    def is_branch(self) -> bool:
        """Whether the handle stands for a branch, not for the whole program."""
        return self._own_anchor is not ROOT

    def branch(self) -> Reports:
        """Return the reports of a branch that begins now, as `Program.branch` says."""
        run = self.enclosing_run()
        with self.shared.lock:
            anchor = ("branch", next(self.shared.anchors))
            place = self._place(run)
            self.shared.tree.start(
                anchor,
                place.parent,
                place.anchor,
                RunKind.BRANCH,
                is_certain=place.is_certain,
                is_late=place.is_late,
                task_around=running_task(),
            )
            return Reports(self.shared, (anchor, *self._anchors), anchor)

    def passed_on(self) -> Reports | None:
        """Return the reports of a handle that remembers the run in which the caller's code runs, if there is one."""
        run = self._run_around(positions())
        with self.shared.lock:
            if run is None or run == self.anchor or not self.shared.tree.is_inside(run, self.anchor):
                return None
        return Reports(self.shared, (run, *self._anchors), self._own_anchor)

    def end(self, state: ProgramState) -> None:
        """End the program, or this branch of it, as `Program.end` says."""
        if self.is_branch:
            self.end_run(self._own_anchor)
            return
        with self.shared.lock:
            if self.shared.state is not ProgramState.IDLE:
                return
            self.shared.state = state
            self.shared.on_abandoned = nothing  # it may refer to the program
        self._leave_backend(state)

    def end_with(self, error: BaseException | None) -> None:
        """End the program in the state of an entrypoint that returned (None) or raised `error`."""
        if error is None:
            self.end(ProgramState.FINISHED)
        elif isinstance(error, Exception):
            self.end(ProgramState.FAILED)
        else:  # CancelledError, GeneratorExit or KeyboardInterrupt: the result is not wanted any more
            self.end(ProgramState.CANCELLED)

    def framework_state(self, framework: str, make: Callable[[], Any]) -> Any:
        """Return what a framework's adapters of all handles of this program share; `make` makes it at first."""
        with self.shared.lock:
            return self.shared.framework_states.setdefault(framework, make())

    # -- reports from integrations

    def start_run(
        self,
        run: Hashable,
        parent: Hashable | None,
        kind: RunKind = RunKind.CODE,
        *,
        stage: Hashable = None,
        task: Hashable = None,
        is_certain: bool = True,
        runs_code: bool = True,
    ) -> None:
        """Report that a run of the framework starts.

        Args:
            run: the run's key in the framework, used once.
            parent: the enclosing run. None, or a run that was not reported: the run of this program in which the
                caller's code runs, or the one in which the handle was passed on, whichever is inside the other one.
                Without both, it is the top of this handle.
            kind: how the run was started, if the framework states it.
            stage: for `RunKind.STAGE`: the same value for runs that the framework starts to run concurrently.
            task: for `RunKind.STAGE`: the same value for a run that does again what another one of its stage did.
            is_certain: False: the run is inside `parent`, perhaps not directly.
            runs_code: whether the run may run code of the user's; a model's run does not.
        """
        is_told = parent is not None and self.shared.tree.knows_run(parent)
        if not is_told:
            parent = self.enclosing_run()
        with self.shared.lock:
            self.shared.reports += 1
            place = self._place(parent, is_told=is_told)
            if runs_code:
                self.shared.code_runs.start(run, self._anchors, threading.current_thread())
            self.shared.tree.start(
                run,
                place.parent,
                place.anchor,
                kind,
                stage=stage,
                task=task,
                is_certain=is_certain and place.is_certain,
                is_late=place.is_late,
                task_around=running_task(),
                runs_code=runs_code,
            )

    @property
    def anchor(self) -> Hashable:
        """The run that this handle stands for: the innermost of its anchors that is not forgotten."""
        return next(filter(self.shared.tree.knows_run, self._anchors), ROOT)

    def _place(self, around: Hashable | None, *, is_told: bool = False) -> _Place:
        """Return where something is that begins now.

        Args:
            around: the run of this program in which the caller's code runs, if it is known.
            is_told: whether a framework has told this of what begins, and not of the code only.
        """
        tree, anchor = self.shared.tree, self.anchor
        if around is not None and anchor is not ROOT and not tree.is_nested(around, anchor):
            # A worker that was started in one run, and got the handle from another one; or a handle that was kept.
            common = tree.innermost_around(around, anchor)
            return _Place(common, common, is_certain=False)
        if is_told:
            return _Place(around, anchor)
        is_passed_on = anchor != self._own_anchor
        is_late = (
            is_passed_on
            and not tree.is_open(anchor)
            and tree.is_inside(anchor, self._own_anchor)
            and (around is None or tree.is_inside(anchor, around))
        )
        if around is not None or threading.current_thread() is self._thread:
            is_certain = True  # the thread that made the handle is taken to work at its top
        elif is_passed_on:
            is_certain = not any(tree.is_inside(run, anchor) for run in self.shared.code_runs)
        else:
            is_certain = not self.shared.code_runs.may_enclose(anchor, threading.current_thread())
        return _Place(around, anchor, is_certain, is_late)

    def _run_around(self, around: Iterable[Position]) -> Hashable | None:
        """Return the run of this program among those in which the caller's code runs, if there is one."""
        return next((each.run for each in around if each.program.program_id == self.program_id), None)

    def enclosing_run(self) -> Hashable | None:
        """Return the run of this program in which the caller's code runs, or None if there is none or it is not known.

        If the code runs in another program, that one becomes the parent of this program, unless it has begun already.
        """
        shared, around = self.shared, tuple(positions())
        run = self._run_around(around)
        if run is not None:
            return run
        outer = innermost(around)
        has_begun = shared.backend is not None or len(shared.graph) > 0
        if outer is not None and not has_begun and shared.opened_in is None and not outer.program.is_inside(self):
            shared.opened_in = outer
            shared.outer = (outer.program.program_id, *outer.program.outer)[:_MOST_OUTER]
            shared.info = replace(shared.info, parent_program_id=outer.program.program_id)
            shared.graph.parent_program_id = outer.program.program_id
            outer.program.note_inner()
        return None

    def note_inner(self) -> None:
        """Note that a program runs inside this one, so that this one does not warn that it had no call."""
        self.shared.has_called = True

    @property
    def opened_in(self) -> Position | None:
        """The run of another program in which this one was opened, until this one ends."""
        return self.shared.opened_in

    @property
    def outer(self) -> tuple[ProgramId, ...]:
        """The ids of the programs around this one, the innermost first."""
        return self.shared.outer

    def has_open(self, run: Hashable) -> bool:
        """Whether a run of the program was reported and has not ended."""
        return self.shared.tree.is_open(run)

    def is_inside(self, other: Reports) -> bool:
        """Whether this program runs inside another one, directly or not."""
        return other.program_id in self.shared.outer

    def end_run(self, run: Hashable) -> None:
        """Report that a run of the framework ended, with or without success."""
        with self.shared.lock:
            self.shared.reports += 1
            ended = self.shared.tree.end(run)
            for each in ended:
                self.shared.code_runs.end(each)
            backend = self.shared.backend
        if backend is not None:
            backend.tools_ended(self.program_id, ended)

    def note_tool(self, run: Hashable, name: str) -> None:
        """Report that a run is a tool, which begins now and ends with the run.

        The graph names it in the interception, and the engine learns what the program waits for.
        """
        with self.shared.lock:
            self.shared.reports += 1
            self.shared.tree.note_tool(run, plain_name(name))
        self.tool_began(run, name)

    def note_human(self, run: Hashable) -> None:
        """Report that a run asks a human, which it does not wait for: the program's next call comes with the answer."""
        key = ("human", run)
        with self.shared.lock:
            self.shared.reports += 1
            self.shared.tree.note_tool(run, "human")
            self.shared.until_call.append(key)
        self.tool_began(key, "human")

    def tool_began(self, tool: Hashable, name: str) -> None:
        """Report that the program waits for a tool from now on, which need not be a run. The graph does not name it.

        Args:
            tool: the tool's run, or the id of the tool call; used once.
            name: the tool's name.
        """
        backend = self.shared.backend
        if backend is not None:
            backend.tool_started(self.program_id, tool, plain_name(name))

    def tools_ended(self, tools: Collection[Hashable]) -> None:
        """Report that tools of `tool_began` have returned. Others, and those that have ended, change nothing."""
        backend = self.shared.backend
        if backend is not None and tools:
            backend.tools_ended(self.program_id, tools)

    def note_tools(self, run: Hashable, names: Iterable[str]) -> None:
        """Report tools that have run inside a run, one after another, without a report while they ran."""
        for name in names:
            tool = object()
            self.start_run(tool, run, runs_code=False)
            with self.shared.lock:
                self.shared.tree.note_tool(tool, plain_name(name))
            self.end_run(tool)

    def start_call(
        self,
        run: Hashable,
        inputs: Inputs = NOTHING,
        *,
        label: str | None = None,
        thread_id: ThreadId | None = None,
        agent: int = 0,
    ) -> CallIdentity:
        """Report that a run of the framework calls the LLM, and return the ids of the call.

        The ids name the 64 newest parents at most, because they travel with the call. The graph has all parents.

        Args:
            run: the run. A run that was not reported is at the top of this handle, and ends with the call.
            inputs: the content of the call's messages, or a function that returns it. The function is called only if
                the runs leave the call's parents in doubt.
            label: the call's name in the graph, e.g. the name of the agent.
            thread_id: the call's thread, if it is known; default: it is inferred.
            agent: which of the program's agents makes the call; the inferred thread has a part for each but the first.

        Raises:
            ProgramEndedError: the program has ended.
        """
        with self.shared.lock:
            self.shared.reports += 1
            self._check_running()
            self.shared.has_called = True
            call_id = self.shared.ids.call()
            inferred, parents, inexact, tools = self.shared.tree.start_call(run, call_id, self.anchor, inputs)
            thread_id = thread_id or (ThreadId(f"{inferred}.{agent}") if agent else inferred)
            edges = self.shared.graph.edges(parents, inexact)
            self.shared.graph.open(CallNode(call_id, thread_id, edges, plain_name(label or ""), tools))
            self.shared.graph.fold(self.shared.tree.knows)
            answered = tuple(self.shared.until_call)
            self.shared.until_call.clear()
        self.tools_ended(answered)
        return CallIdentity(self.program_id, thread_id, call_id, parents[-MOST_PARENTS_SENT:])

    def adopt_call(self, identity: CallIdentity, *, label: str = "", tools: tuple[str, ...] = ()) -> bool:
        """Report a call that another process has named, with the parents that it has inferred.

        Args:
            identity: its ids. Parents that are not known here are left out of the graph.
            label: as for `start_call`.
            tools: those that ran between the parents and the call.

        Returns:
            Whether the call is new. Otherwise nothing has changed.

        Raises:
            ProgramEndedError: the program has ended.
        """
        graph = self.shared.graph
        with self.shared.lock:
            self.shared.reports += 1
            self._check_running()
            if identity.call_id in graph:
                return False
            self.shared.has_called = True
            edges = tuple(Edge(parent, exact=True) for parent in identity.parents if parent in graph)
            graph.open(CallNode(identity.call_id, identity.thread_id, edges, label, tools))
            graph.fold(self.shared.tree.knows)
        return True

    def note_parent(self, program_id: ProgramId) -> None:
        """Report the program inside which this one was opened, of which only another process knows.

        It has an effect before the first call only.
        """
        with self.shared.lock:
            if self.shared.backend is None:
                self.shared.info = replace(self.shared.info, parent_program_id=program_id)
                self.shared.graph.parent_program_id = program_id

    def note_alive(self) -> None:
        """Report that the program goes on, although nothing else is reported."""
        with self.shared.lock:
            self.shared.reports += 1

    def end_call(self, run: Hashable, identity: CallIdentity, output: Content = NOTHING) -> None:
        """Report that a call has a result. The next call in the run comes after it.

        Do not report a call that failed, was cancelled or broken off: the next call then has the same parents.

        Args:
            run: the run that made the call.
            identity: the result of `start_call`.
            output: the content of the call's result.
        """
        del run  # the tree knows the run of the call
        with self.shared.lock:
            self.shared.reports += 1
            self.shared.tree.end_call(identity.call_id, output)

    # -- reports from an engine, in seconds of its monotonic clock

    def call_arrived(self, call_id: CallId, now_s: float) -> None:
        """Report that a call reached the engine."""
        with self.shared.lock:
            self.shared.reports += 1
            self.shared.graph.arrive(call_id, now_s)

    def call_left(
        self,
        call_id: CallId,
        now_s: float,
        account: Account,
        state: CallState,
        *,
        engine_id: EngineId | None = None,
        earlier_engine_ids: tuple[EngineId, ...] = (),
    ) -> None:
        """Report that a call left the engine, or that the engine refused it, before the caller gets the result."""
        with self.shared.lock:
            self.shared.reports += 1
            self.shared.graph.leave(
                call_id, now_s, account, state, engine_id=engine_id, earlier_engine_ids=earlier_engine_ids
            )
            if state in (CallState.FAILED, CallState.CANCELLED):
                self.shared.tree.drop_call(call_id)

    def call_settled(self, call_id: CallId, account: Account) -> None:
        """Report the final account of an aborted call, which exceeds that of its latest output."""
        with self.shared.lock:
            self.shared.graph.settle(call_id, account)

    # -- the end of programs whose end may not be reported

    def end_when_idle(
        self, timeout_s: float, on_abandoned: Callable[[], None], has_answered: Callable[[], bool] = bool
    ) -> None:
        """End the program once nothing is reported of it, and no call is in flight, for `timeout_s`.

        An engine checks the programs that have made a call on it. A program without a call ends by `abandon` only.

        Args:
            timeout_s: seconds, above 0.
            on_abandoned: called when the program ends that way. It must not use the program.
            has_answered: returns whether the program had nothing left to do, so that it ends as finished. Otherwise it
                ends as abandoned.
        """
        with self.shared.lock:
            self.shared.has_answered = has_answered
            self.shared.idle_timeout_s = timeout_s
            self.shared.on_abandoned = on_abandoned

    @property
    def idle_timeout_s(self) -> float | None:
        """Seconds without a report after which the program ends. With None it does not end by itself."""
        return self.shared.idle_timeout_s

    @property
    def count(self) -> int:
        """How many reports of runs and calls the program has got. The number grows while anything happens."""
        return self.shared.reports

    def abandon(self, reports: int) -> bool:
        """End the program as abandoned or finished, unless it has got more than `reports` reports.

        Returns:
            Whether the program ended now.
        """
        with self.shared.lock:
            if self.shared.state is not ProgramState.IDLE or self.shared.reports != reports:
                return False
            state = ProgramState.FINISHED if self.shared.has_answered() else ProgramState.ABANDONED
            self.shared.state = state
            self.shared.on_abandoned()  # before a late call can find the program ended
            self.shared.on_abandoned = nothing
        self._leave_backend(state)
        return True

    def _check_running(self) -> None:
        if self.shared.state is not ProgramState.IDLE:
            raise ProgramEndedError(self.program_id, self.name)

    def _leave_backend(self, state: ProgramState) -> None:
        self.shared.opened_in = None  # so that a chain of programs, each opened by the one before, is not kept
        backend = self.shared.backend
        if backend is not None:
            self.shared.last_row = backend.end_session(self.program_id, state)
        self.log.debug("program ended", state=str(state))
