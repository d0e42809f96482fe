"""Programs from OpenTelemetry's spans: what is a run, which calls come after which, and what is only a guess."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("opentelemetry.sdk", reason="the otel extra is not installed")

from openai import APIStatusError
from opentelemetry import context, trace
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, Decision, Sampler, SamplingResult
from opentelemetry.trace import NoOpTracerProvider, Tracer
from polling import until
from scripted_runs import InSteps, on_vllm_too
from span_parts import edges, provider

import weft
from weft.engine.host.frontend import FrontEnd
from weft.integrations.otel import WeftSpanProcessor, openai_client, span_runs
from weft.testing import ScriptedEngine

pytestmark = pytest.mark.anyio
pytest_plugins = ["weft.testing.fixtures"]
__all__ = ["provider"]

MakeEngine = Callable[..., ScriptedEngine]


@pytest.fixture
def engine(scripted_or_vllm: FrontEnd) -> FrontEnd:
    """The engine of these tests."""
    return scripted_or_vllm


@pytest.fixture
def tracer(provider: TracerProvider) -> Tracer:
    """A framework's tracer."""
    return provider.get_tracer("a framework")


async def ask(engine: FrontEnd, text: str = "Where is the lighthouse?") -> None:
    """Make a call with a client that knows no program."""
    messages: Any = [{"role": "user", "content": text}]
    await openai_client(engine).chat.completions.create(
        model=engine.model, messages=messages, max_tokens=4, temperature=0
    )


async def agent(tracer: Tracer, engine: FrontEnd, name: str, *tools: Callable[[], Any]) -> None:
    """What a framework does for an agent: a call, all its tools at once, a call."""

    async def chat() -> None:
        with tracer.start_as_current_span("chat scripted"):
            await ask(engine)

    async def run(number: int, tool: Callable[[], Any]) -> None:
        with tracer.start_as_current_span(f"execute_tool tool{number}"):
            await tool()

    with tracer.start_as_current_span(f"invoke_agent {name}"):
        await chat()
        await asyncio.gather(*(run(number, tool) for number, tool in enumerate(tools)))
        if tools:
            await chat()


@on_vllm_too
async def test_parallel_tools_that_ask_agents(engine: FrontEnd, in_steps: InSteps, tracer: Tracer) -> None:
    """Two tools run two calls each at the same time: lineage could only guess, and spans make all parents exact."""

    async def run() -> weft.Program:
        async def two(name: str) -> None:
            await agent(tracer, engine, name, lambda: asyncio.sleep(0))

        with weft.Program("chief") as program, program.attach():
            await agent(tracer, engine, "chief", lambda: two("a"), lambda: two("b"))
        return program

    program = await in_steps(run(), 1, 2, 2, 1)
    assert edges(program) == [
        *("a0 <- chief0", "a1 <- a0", "b0 <- chief0", "b1 <- b0"),
        *("chief0 <- ", "chief1 <- a1, b1"),
    ]


async def test_a_call_outside_a_block_is_a_program_of_its_own(engine: FrontEnd, tracer: Tracer) -> None:
    """Spans without a program change nothing."""
    await agent(tracer, engine, "lonely")
    (row,) = engine.table.ended()
    assert (row.info.name, row.calls, str(row.state)) == ("chat", 1, "finished")


async def test_programs_at_once(engine: FrontEnd, tracer: Tracer) -> None:
    """Programs that run the same agent at once each have their own calls."""

    async def one() -> list[str]:
        with weft.Program() as program, program.attach():
            await agent(tracer, engine, "a", lambda: ask(engine))
        return edges(program)

    assert await asyncio.gather(*(one() for _ in range(5))) == [["a0 <- ", "a1 <- a0", "a2 <- a1"]] * 5


async def test_a_program_inside_a_program(engine: FrontEnd, tracer: Tracer) -> None:
    """A call belongs to the innermost block, and the next one to the program around it again."""

    async def inner() -> None:
        with weft.Program("inner") as program, program.attach():
            await agent(tracer, engine, "b")
        assert edges(program) == ["b0 <- "]

    with weft.Program("outer") as program, program.attach():
        await agent(tracer, engine, "a", inner)
    assert edges(program) == ["a0 <- ", "a1 <- a0"]
    assert [row.info.parent_program_id for row in engine.table.ended()] == [None, program.program_id]


async def test_a_branch(engine: FrontEnd, tracer: Tracer) -> None:
    """A block of a branch is inside the branch: its calls are a strand of their own."""

    async def strand(program: weft.Program, name: str) -> None:
        with program.branch() as branch, branch.attach():
            await agent(tracer, engine, name, lambda: asyncio.sleep(0))

    with weft.Program() as program, program.attach():
        await asyncio.gather(strand(program, "a"), strand(program, "b"))
        await agent(tracer, engine, "c")
    assert edges(program) == ["a0 <- ", "a1 <- a0", "b0 <- ", "b1 <- b0", "c0 <- a1, b1"]


@pytest.mark.parametrize("how", ["no provider", "sampled out"])
async def test_without_recorded_spans(
    engine: FrontEnd, provider: TracerProvider, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The calls still belong to the program of the block, in the order that a bound client gives them."""
    if how == "no provider":
        monkeypatch.setattr(trace, "_TRACER_PROVIDER", NoOpTracerProvider())
    else:
        provider.sampler = ALWAYS_OFF
    tracer = trace.get_tracer("a framework")
    with weft.Program() as program, program.attach():
        await agent(tracer, engine, "a", lambda: asyncio.sleep(0))
    assert edges(program) == ["0 <- ", "1 <- 0"]


class _NoAgents(Sampler):
    """Records all spans but those of agents."""

    def should_sample(self, parent_context: Any, trace_id: int, name: str, *more: Any, **rest: Any) -> SamplingResult:
        del parent_context, trace_id, more, rest
        is_agent = name.startswith("invoke_agent")
        return SamplingResult(Decision.DROP if is_agent else Decision.RECORD_AND_SAMPLE)

    def get_description(self) -> str:
        return "no agents"


async def test_a_position_below_a_span_that_was_not_recorded_is_a_guess(
    engine: FrontEnd, provider: TracerProvider
) -> None:
    """Whether a call is inside a recorded run is not known then, so what it comes after is a guess."""
    provider.sampler = _NoAgents()
    tracer = provider.get_tracer("a framework")
    with weft.Program() as program, program.attach(), tracer.start_as_current_span("a step"):
        await ask(engine)
        with tracer.start_as_current_span("invoke_agent x"):
            await ask(engine)
    assert edges(program) == ["0 <- ", "1 <- 0?"]


async def test_a_late_span_is_in_its_program_and_its_place_is_a_guess(engine: FrontEnd, tracer: Tracer) -> None:
    """A span that starts below one that has ended says the program, and no certain position. So does the ended one."""
    with weft.Program() as program, program.attach():
        with tracer.start_as_current_span("step") as ended:
            await ask(engine)
        late = trace.set_span_in_context(ended)
        with tracer.start_as_current_span("late", context=late):
            await ask(engine)
        token = context.attach(late)
        await ask(engine)
        context.detach(token)
    assert edges(program) == ["0 <- ", "1 <- 0?", "2 <- 1?"]


async def test_spans_that_end_out_of_order(engine: FrontEnd, tracer: Tracer) -> None:
    """An outer span may end before an inner one: the inner one's run is open until its own end."""
    with weft.Program() as program, program.attach():
        outer = tracer.start_span("outer")
        inner = tracer.start_span("execute_tool x", context=trace.set_span_in_context(outer))
        with trace.use_span(inner):
            await ask(engine)
        outer.end()
        with trace.use_span(inner):
            await ask(engine)
        inner.end()
        inner.end()  # OpenTelemetry warns of it
        await ask(engine)
    assert edges(program) == ["0 <- ", "1 <- 0", "2 <- 1"]


async def test_a_call_after_the_end_of_its_program_is_refused(engine: FrontEnd, tracer: Tracer) -> None:
    """A task that outlives its program does not get another program silently."""
    go = asyncio.Event()

    async def later() -> None:
        await go.wait()
        await agent(tracer, engine, "late")

    with weft.Program() as program, program.attach():
        task = asyncio.create_task(later())
        await asyncio.sleep(0)
    assert program.state.has_ended
    go.set()
    with pytest.raises(APIStatusError, match="ended") as refused:
        await task
    assert refused.value.status_code == 409


def test_threads(engine: FrontEnd, tracer: Tracer) -> None:
    """A thread that is given the context is in its span; one without a context has no program."""

    def work(given: Any) -> None:
        context.attach(given)
        asyncio.run(agent(tracer, engine, "a"))

    with weft.Program() as program, program.attach(), tracer.start_as_current_span("step"):
        for given in (context.get_current(), context.Context()):
            thread = threading.Thread(target=work, args=(given,))
            thread.start()
            thread.join()
    assert edges(program) == ["a0 <- "]
    assert [row.calls for row in engine.table.ended()] == [1, 1]


async def test_spans_that_never_end_are_bounded(
    engine: FrontEnd, tracer: Tracer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oldest spans of a program are forgotten and end; with the program, all are forgotten."""
    monkeypatch.setattr(span_runs, "MOST_OPEN", 100)
    gc.collect()  # programs of other tests
    before = len(span_runs._runs)
    with weft.Program() as program, program.attach():
        first = tracer.start_span("execute_tool slow")
        for _ in range(5000):
            tracer.start_span("execute_tool leaked")
        assert len(span_runs._runs) - before <= 100 + 1000 + 1
        with trace.use_span(first):
            await ask(engine)
        await ask(engine)
        first.end()
    assert edges(program) == ["0 <- ", "1 <- 0?"]
    assert program.row is not None
    assert len(program.row.tools_running) <= 100
    del program, first
    await until(lambda: gc.collect() >= 0 and len(span_runs._runs) <= before)  # the engine's loop may still hold it


async def test_tools_are_seen_while_they_run(engine: FrontEnd, tracer: Tracer) -> None:
    """The process table shows a tool from its span's start to its end, once."""
    seen: list[list[str]] = []

    with weft.Program() as program, program.attach():

        async def look() -> None:
            assert program.row is not None
            seen.append([tool.name for tool in program.row.tools_running])

        await agent(tracer, engine, "a", look)
        await look()
    assert seen == [["tool0"], []]
    assert [call.tools for call in program.graph.calls] == [(), ("tool0",)]


async def test_programs_in_spans_of_their_own_are_no_runs(
    scripted_engine: MakeEngine, provider: TracerProvider
) -> None:
    """`weft.ProgramSpans` with the same provider neither doubles tools nor moves calls."""
    engine = scripted_engine(["one", "two"])
    tracer = provider.get_tracer("a framework")
    weft.ProgramSpans(engine, provider)
    with weft.Program() as program, program.attach():
        await agent(tracer, engine, "a", lambda: asyncio.sleep(0))
    assert edges(program) == ["a0 <- ", "a1 <- a0"]


def test_attach_needs_the_integration() -> None:
    """The error of a program without OpenTelemetry says what to import."""
    from weft.core.program import handle

    registered = dict(handle._adapters)
    try:
        handle._adapters.pop("otel", None)
        with pytest.raises(LookupError, match=r"weft\.integrations\.otel"):
            weft.Program().attach()
    finally:
        handle._adapters.update(registered)


def test_the_processor_survives_other_providers_calls() -> None:
    """A provider flushes the processors behind Weft's too, and shuts Weft's down at the end of the process."""
    flushes: list[int] = []

    class Behind(SpanProcessor):
        def force_flush(self, timeout_millis: int = 30_000) -> bool:
            flushes.append(timeout_millis)
            return True

    provider = TracerProvider()
    provider.add_span_processor(WeftSpanProcessor())
    provider.add_span_processor(Behind())
    assert provider.force_flush()
    assert len(flushes) == 1
    provider.shutdown()
