"""Runs of programs from spans.

A program is found by the ids of a span's parent. OpenTelemetry's context is read only for a client that knows nothing
else of a call, and is changed only by `Program.attach`.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Final
from weakref import WeakValueDictionary

from openai import AsyncOpenAI
from opentelemetry import context as otel_context
from opentelemetry.context import Context
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor
from opentelemetry.trace import NonRecordingSpan, SpanContext, get_current_span, get_tracer, set_span_in_context

from weft.core.locks import fork_safe
from weft.core.program import Program, register_adapter
from weft.core.program.structure.run_tree import KEEP_ENDED
from weft.core.program.structure.runs import RunKind
from weft.integrations.client_call import Caller
from weft.integrations.openai.transport import AsyncTransport, async_client

if TYPE_CHECKING:
    from weft.engine.host.frontend import FrontEnd

_SCOPE: Final = "weft"  # of the spans that Weft makes: those of `attach` and of `weft.ProgramSpans`
_ATTACHED: Final = otel_context.create_key("weft")
MOST_OPEN: Final = 10_000  # spans of one program that are remembered, the newest; of ended ones KEEP_ENDED
_AGENT, _TOOL, _CHAT, _EXECUTOR = "invoke_agent", "execute_tool", "chat", "executor.process"
_SpanKey = tuple[int | str, int | str]  # the ids of a trace and of a span


class SpanRun:
    """A span's run in its program. It is the run's key, too.

    Args:
        program: The handle that reports the run.
        span: The ids of the span's trace and of the span, by which `find` finds the run.
        around: The run of the parent span. None: The span is that of an `attach` block, which is where the handle is.
        name: The span's name: an operation, a space, and what it is about.
        superstep: Of an executor: its number in the workflow.
    """

    def __init__(self, program: Program, span: _SpanKey, around: SpanRun | None, name: str, superstep: int = 0) -> None:
        self.program = program
        self.around = around
        self._span = span
        self._kept = program.reports.framework_state("otel", _Kept)
        self.operation, _, about = name.partition(" ")
        self.agent: str | None = about if self.operation == _AGENT else around.agent if around is not None else None
        self.superstep = superstep
        self.is_open = True
        self.inside: set[SpanRun] = around.inside if around is not None else set()  # all open runs of the block
        if around is None:
            run = program.reports.enclosing_run()
            self._anchor: Hashable = run if run is not None else program.reports.anchor
            self._kept.open(span, self)
            return
        self.inside.add(self)
        kind, stage = self._stage(around)
        program.reports.start_run(self, around.key, kind, stage=stage, is_certain=around.is_open)
        if self.operation == _TOOL:
            program.reports.note_tool(self, about or "tool")
        self._kept.open(span, self)

    @property
    def key(self) -> Hashable:
        """The run in the program's tree."""
        return self if self.around is not None else self._anchor

    def _stage(self, around: SpanRun) -> tuple[RunKind, object]:
        """An agent runs calls of models, and all tools that one asked for, by turns; a workflow runs supersteps."""
        if self.operation == _EXECUTOR:
            return RunKind.STAGE, ("superstep", self.superstep)
        if around.operation == _AGENT and self.operation in (_TOOL, _CHAT):
            return RunKind.STAGE, _TOOL if self.operation == _TOOL else self
        return RunKind.CODE, None

    def end(self) -> None:
        """End the run. Ending it twice changes nothing."""
        if self.is_open:
            self.is_open = False
            self.inside.discard(self)
            if self.around is not None:
                self.program.reports.end_run(self)
            self._kept.end(self._span, self)


_runs: Final[WeakValueDictionary[_SpanKey, SpanRun]] = WeakValueDictionary()  # a program keeps its own


def find(*span: int | str) -> SpanRun | None:
    """The run of a span, open or ended, by the ids of trace and span. None: It is in no program, or forgotten."""
    return _runs.get((span[0], span[1]))


class _Kept:
    """What a program remembers of its spans."""

    def __init__(self) -> None:
        self._lock = fork_safe(threading.Lock())
        self._open: dict[_SpanKey, SpanRun] = {}
        self._ended: dict[_SpanKey, SpanRun] = {}

    def open(self, span: _SpanKey, run: SpanRun) -> None:
        with self._lock:
            self._open[span] = _runs[span] = run
            runs = (each for each in self._open.values() if each.around is not None)
            oldest = next(runs) if len(self._open) > MOST_OPEN else None
        if oldest is not None:  # its end was perhaps not reported
            oldest.end()

    def end(self, span: _SpanKey, run: SpanRun) -> None:
        with self._lock:
            self._open.pop(span, None)
            self._ended[span] = run
            if len(self._ended) > KEEP_ENDED:
                del self._ended[next(iter(self._ended))]


class WeftSpanProcessor(SpanProcessor):
    """Makes each span below that of a `Program.attach` block a run of the program. It ends with the span.

    `execute_tool NAME` is a tool. In `invoke_agent NAME`, each call waits for the calls and tools before it, and has
    the agent's name. Executors of Microsoft Agent Framework run in supersteps. Of a span whose parent has ended, only
    the program is known, so what its calls come after is a guess. Other spans are ignored.
    """

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Nothing is buffered. Before 1.42, a provider flushes no exporter behind a processor that says nothing."""
        return True

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        del parent_context  # the span has its parent's ids
        scope, parent, own = span.instrumentation_scope, span.parent, span.get_span_context()
        around = find(parent.trace_id, parent.span_id) if parent is not None else None
        if around is None or (scope is not None and scope.name == _SCOPE):
            return
        superstep = _superstep(span, around) if span.name.startswith(_EXECUTOR) else 0
        SpanRun(around.program, (own.trace_id, own.span_id), around, span.name, superstep)

    def on_end(self, span: ReadableSpan) -> None:
        own = span.get_span_context()
        run = find(own.trace_id, own.span_id) if own is not None else None
        if run is not None and run.around is not None:
            run.end()


def _superstep(span: Span, workflow: SpanRun) -> int:
    """The superstep of an executor: the one after those of the executors whose messages it got."""
    last = -1
    for link in span.links:
        sender = find(link.context.trace_id, link.context.span_id)
        while sender is not None and sender.around is not workflow:
            sender = sender.around
        last = max(last, sender.superstep if sender is not None else -1)
    return last + 1


def _current_span() -> _SpanKey:
    own = get_current_span().get_span_context()
    return own.trace_id, own.span_id


# How to learn the current span: of OpenTelemetry, and of libraries with spans of their own.
current_spans: Final[list[Callable[[], _SpanKey]]] = [_current_span]


def enclosing() -> SpanRun | None:
    """The run of the current span. None: It is not recorded, or in no program."""
    return next(filter(None, (find(*key()) for key in current_spans)), None)


def attached() -> SpanRun | None:
    """The run of the `attach` block around the code. None: There is none."""
    block = otel_context.get_value(_ATTACHED)
    return block if isinstance(block, SpanRun) else None


class _SpanTransport(AsyncTransport):
    def _caller(self) -> Caller:
        if (run := enclosing()) is not None:
            return Caller(run.program, run.agent, run.key, run.is_open, reports_tools=run.agent is not None)
        if (block := attached()) is not None:  # the call may be inside any of the spans that are recorded
            return Caller(block.program, None, block.key, block.is_open and not block.inside)
        return Caller()


def openai_client(engine: FrontEnd) -> AsyncOpenAI:
    """Make an `AsyncOpenAI` for any number of programs: a call belongs to the program and the run of the current span.

    Only an open span gives a position. Where it has ended or was not recorded, the call belongs to the program of the
    `Program.attach` block around it, and its position is a guess. Without a block, the call is a program of its own.
    Otherwise the client is as that of `weft.openai_client`.

    Args:
        engine: The engine on which the calls run. Requests name its model, `engine.model`.

    Raises:
        ArgumentTypeError: `engine` is no engine.
    """
    return async_client(_SpanTransport(engine))


@contextmanager
def _attach(program: Program) -> Iterator[None]:
    around = get_current_span().get_span_context()
    attributes = {"gen_ai.operation.name": "invoke_workflow", "weft.program.id": program.program_id}
    span = get_tracer(_SCOPE).start_span(f"invoke_workflow {program.name}", attributes=attributes)
    own = span.get_span_context()
    if not own.is_valid or own.span_id == around.span_id:  # nothing records spans
        own = SpanContext(around.trace_id or secrets.randbits(127) + 1, secrets.randbits(63) + 1, is_remote=False)
        span = NonRecordingSpan(own)
    outer = enclosing() or attached()
    if outer is not None and outer.program.program_id != program.program_id:
        program.reports.note_parent(outer.program.program_id)
        outer.program.reports.note_inner()
    run = SpanRun(program, (own.trace_id, own.span_id), None, "attach")
    token = otel_context.attach(otel_context.set_value(_ATTACHED, run, set_span_in_context(span)))
    try:
        yield
    finally:
        otel_context.detach(token)
        span.end()
        run.end()


register_adapter("otel", lambda program: partial(_attach, program))
