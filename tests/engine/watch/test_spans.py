"""Spans for OpenTelemetry, as its SDK exports them."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

pytest.importorskip("langchain", reason="the LangChain extra is not installed")

from langchain.agents import create_agent
from langchain_core.runnables import RunnableLambda
from langchain_core.tools import tool
from opentelemetry.trace import SpanKind, StatusCode
from otlp import otlp_json

import weft
from weft.core.errors import OverloadedError
from weft.core.process_table import KEEP_TOOLS
from weft.core.program import Program
from weft.core.trace.format import from_graph
from weft.core.trace.importers import TraceImport
from weft.integrations.langchain import ChatWeft
from weft.testing import FakeClock, Reply, ScriptedEngine

BODY: Any = {"messages": [{"role": "user", "content": "a secret word"}]}


class Traced:
    """A scripted engine with an exporter that keeps spans in memory."""

    def __init__(self, replies: Any, **options: Any) -> None:
        self.engine = ScriptedEngine(replies, **options)
        self.exporter = InMemorySpanExporter()
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.observer = weft.ProgramSpans(self.engine, provider)

    @property
    def spans(self) -> list[ReadableSpan]:
        """The spans that have ended, in the order of their ends."""
        return list(self.exporter.get_finished_spans())

    @property
    def tree(self) -> list[str]:
        """The names of the spans, each after its parent's, in the order of their starts."""
        spans = sorted(self.spans, key=lambda span: span.start_time or 0)
        names = {span.context.span_id: span.name for span in spans if span.context is not None}
        return [
            span.name if span.parent is None else f"{names.get(span.parent.span_id, '?')} > {span.name}"
            for span in spans
        ]

    def span(self, name: str) -> ReadableSpan:
        (found,) = [span for span in self.spans if span.name == name]
        return found

    def call(self, program: Program, **body: Any) -> None:
        self.engine.chat_sync({**BODY, **body}, program, program.reports.start_call(object()))

    @property
    def has_open(self) -> bool:
        return bool(self.observer._open)


def test_a_program_and_its_calls_are_spans() -> None:
    """They have the conventions' attributes: operation, conversation, model, provider and tokens, and Weft's own."""
    traced = Traced(["one two", "three"], latency_s=2.0)
    with weft.Program("agent", session_id="session-7", tenant="acme", tags=["nightly"]) as program:
        traced.call(program)
        assert [span.name for span in traced.spans] == ["chat scripted"]
        traced.call(program)
    assert traced.tree == ["invoke_workflow agent", *["invoke_workflow agent > chat scripted"] * 2]
    whole, call = traced.span("invoke_workflow agent"), traced.spans[0]
    assert (whole.kind, call.kind) == (SpanKind.INTERNAL, SpanKind.CLIENT)
    assert whole.attributes is not None
    assert call.attributes is not None
    assert dict(call.attributes) == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "vllm",
        "gen_ai.conversation.id": "session-7",
        "gen_ai.request.model": "scripted",
        "gen_ai.response.id": f"chatcmpl-{call.attributes['weft.call.id']}",
        "gen_ai.response.model": "scripted",
        "gen_ai.response.finish_reasons": ("stop",),
        "gen_ai.usage.input_tokens": 3,
        "gen_ai.usage.output_tokens": 2,
        "gen_ai.usage.cache_read.input_tokens": 0,
        "weft.program.id": program.program_id,
        "weft.program.name": "agent",
        "weft.thread.id": call.attributes["weft.thread.id"],
        "weft.call.id": call.attributes["weft.call.id"],
        "weft.call.parents": (),
        "weft.outcome": "finished",
        "weft.replica": traced.engine.engine_id,
        "weft.service_s": 2.0,
        "weft.wait_s": 0.0,
        "weft.preemptions": 0,
        "weft.kv.fetched_tokens": 0,
        "weft.kv.recomputed_tokens": 0,
        "weft.kv.swapped_tokens": 0,
    }
    expected = {
        "gen_ai.operation.name": "invoke_workflow",
        "gen_ai.conversation.id": "session-7",
        "gen_ai.agent.name": "agent",
        "gen_ai.usage.input_tokens": 6,
        "gen_ai.usage.output_tokens": 3,
        "weft.tenant": "acme",
        "weft.tags": ("nightly",),
        "weft.calls": 2,
        "weft.service_s": 4.0,
        "weft.outcome": "finished",
    }
    assert expected.items() <= dict(whole.attributes).items()
    assert not traced.has_open


def test_a_call_has_what_its_request_asks_for() -> None:
    """By the conventions' names. What the request leaves to the model is missing, and so is what is no number."""
    traced = Traced(["one two three", "four"])
    asked = {
        "temperature": 0.5,
        "top_p": 1,
        "top_k": 20,
        "max_completion_tokens": 2,
        "frequency_penalty": 0.25,
        "presence_penalty": -0.5,
        "seed": 7,
        "n": 1,
    }
    with weft.Program("agent") as program:
        traced.call(program, **asked)
        traced.call(program, temperature=None, seed=10**400, top_p="secret", top_k=True, stop=["secret"])
    first, second = (dict(span.attributes or {}) for span in traced.spans[:2])
    found = {name.removeprefix("gen_ai.request."): value for name, value in first.items() if ".request." in name}
    expected = {**asked, "model": "scripted", "max_tokens": 2, "choice.count": 1}
    assert found == {name: value for name, value in expected.items() if name not in ("max_completion_tokens", "n")}
    assert first["gen_ai.response.finish_reasons"] == ("length",)
    assert [name for name in second if ".request." in name] == ["gen_ai.request.model"]


def test_a_stream_has_its_answers_id_and_how_it_ended() -> None:
    """Also one that its reader leaves: it has an id, and no reason."""
    traced = Traced([Reply(tool_calls=[("search", {})]), "one two three"])

    async def read() -> None:
        with weft.Program("agent") as program:
            async for _chunk in traced.engine.chat_stream(BODY, program, program.reports.start_call("a")):
                pass
            async with aclosing(traced.engine.chat_stream(BODY, program, program.reports.start_call("b"))) as chunks:
                await anext(chunks)

    asyncio.run(read())
    traced.engine.shutdown()
    calls = [dict(span.attributes or {}) for span in traced.spans if span.name == "chat scripted"]
    assert all(call["gen_ai.response.id"] == f"chatcmpl-{call['weft.call.id']}" for call in calls)
    assert calls[0]["gen_ai.response.finish_reasons"] == ("tool_calls",)


@pytest.mark.parametrize(("order", "reasons"), [((0, 1), ("stop", "length")), ((1, 0), ("stop", "length"))])
def test_reasons_are_in_the_order_of_the_choices(order: tuple[int, int], reasons: tuple[str, ...]) -> None:
    """Choices of a stream end in any order."""
    traced = Traced([])
    program = weft.Program("agent")
    identity = program.reports.start_call("a")
    call, _request = traced.engine.call_path.open(BODY, program, identity, stream=True)
    for index in order:
        choices = [{"index": index, "delta": {}, "finish_reason": reasons[index]}]
        call.note_answer({"id": "chatcmpl-1", "model": "scripted", "choices": choices})
    traced.engine.call_path.leave(call)
    (span,) = traced.spans
    assert (span.attributes or {})["gen_ai.response.finish_reasons"] == reasons
    program.end()


def test_no_text_is_recorded() -> None:
    """Prompts and answers may be private, so no span has them."""
    traced = Traced(["an answer that nobody shall see"])
    with weft.Program("agent") as program:
        traced.call(program)
    assert "secret" not in "".join(span.to_json() for span in traced.spans)
    assert "nobody" not in "".join(span.to_json() for span in traced.spans)


def test_tools_and_programs_inside_are_below_their_program() -> None:
    """An agent's tool is a span, and a program that the tool opens is below the agent's program."""
    traced = Traced([Reply(tool_calls=[("research", {"topic": "fog"})]), "Fog is water.", "It is wet."])
    model = ChatWeft(engine=traced.engine)

    @tool
    def research(topic: str) -> str:
        """Find facts."""
        with weft.Program("inner") as inner:
            return str(model.invoke(f"What is {topic}?", config=inner.config()).text)

    with weft.Program("outer") as outer:
        agent = create_agent(model, [research])
        agent.invoke({"messages": [("user", "What is fog?")]}, config=outer.config())
    assert sorted(traced.tree) == [
        "invoke_workflow inner > chat scripted",
        "invoke_workflow outer",
        "invoke_workflow outer > chat scripted",
        "invoke_workflow outer > chat scripted",
        "invoke_workflow outer > execute_tool research",
        "invoke_workflow outer > invoke_workflow inner",
    ]
    assert len({span.context.trace_id for span in traced.spans if span.context is not None}) == 1
    ran = traced.span("execute_tool research")
    assert ran.attributes is not None
    assert (ran.kind, ran.attributes["gen_ai.tool.name"]) == (SpanKind.INTERNAL, "research")
    assert not traced.has_open


def test_programs_inside_one_that_makes_no_call_are_together() -> None:
    """An orchestrator's own start and end are not reported, because it makes no call. Its parts share a span above."""
    traced = Traced(["one", "two"])
    model = ChatWeft(engine=traced.engine)

    def part(text: str) -> str:
        with weft.Program("part") as inner:
            return str(model.invoke(text, config=inner.config()).text)

    with weft.Program("outer") as outer:
        RunnableLambda(part).invoke("a", config=outer.config())
        RunnableLambda(part).invoke("b", config=outer.config())
    (above,) = [span for span in traced.spans if span.parent is None]
    assert above.attributes is not None
    assert above.attributes["weft.program.id"] == outer.program_id
    assert traced.tree.count("invoke_workflow > invoke_workflow part") == 2
    assert not traced.has_open


def test_an_outer_program_may_make_its_first_call_after_an_inner_one() -> None:
    """The span that the inner one began for it becomes its own."""
    traced = Traced(["one", "two"])
    model = ChatWeft(engine=traced.engine)

    def whole(text: str) -> str:
        with weft.Program("inner") as inner:
            model.invoke(text, config=inner.config())
            traced.call(outer)
        return text

    with weft.Program("outer") as outer:
        RunnableLambda(whole).invoke("a", config=outer.config())
    assert "invoke_workflow outer > invoke_workflow inner" in traced.tree
    assert traced.span("invoke_workflow outer").parent is None


def test_a_failed_call_and_a_failed_program_have_an_error() -> None:
    """Their status is an error, and that of others is not set."""
    traced = Traced([RuntimeError("broken"), "fine"])
    with pytest.raises(RuntimeError), weft.Program("agent") as program:
        traced.call(program)
    with weft.Program("other") as program:
        traced.call(program)
    call, whole, good, fine = traced.spans
    assert [span.status.status_code for span in (call, whole)] == [StatusCode.ERROR] * 2
    assert [span.status.status_code for span in (good, fine)] == [StatusCode.UNSET] * 2
    assert call.attributes is not None
    assert (call.attributes["error.type"], call.attributes["weft.outcome"]) == ("_OTHER", "failed")


def test_a_refused_call_is_a_span_with_the_errors_class() -> None:
    """It never reached a scheduler, and says why."""
    clock = FakeClock()
    traced = Traced(["late"], clock=clock, max_calls=1, latency_s=1.0)

    async def refused() -> None:
        program = weft.Program("agent")
        first = asyncio.ensure_future(traced.engine.chat(BODY, program, program.reports.start_call("a")))
        await traced.engine.until_waiting(1)
        with pytest.raises(OverloadedError):
            await traced.engine.chat(BODY, program, program.reports.start_call("b"))
        clock.advance(1.0)
        await first
        program.end()

    asyncio.run(refused())
    refusal = traced.spans[0]
    assert refusal.attributes is not None
    assert refusal.attributes["error.type"] == "OverloadedError"
    assert refusal.status.status_code is StatusCode.ERROR


def test_calls_that_their_program_aborts_are_cancelled_and_no_error() -> None:
    """Nobody wants their answers any more. Their spans end with them, after the program's."""
    clock = FakeClock()
    traced = Traced(["late"], clock=clock, latency_s=1.0)

    async def aborted() -> None:
        program = weft.Program("agent")
        call = asyncio.ensure_future(traced.engine.chat(BODY, program, program.reports.start_call("a")))
        await traced.engine.until_waiting(1)
        program.end()
        await asyncio.wait([call])
        assert call.exception() is not None

    asyncio.run(aborted())
    traced.engine.shutdown()
    call = traced.span("chat scripted")
    assert call.attributes is not None
    assert (call.attributes["weft.outcome"], call.status.status_code) == ("cancelled", StatusCode.UNSET)
    assert not traced.has_open


def test_a_traceparent_in_the_metadata_is_the_parent() -> None:
    """A service passes on the header of its own request, so that one trace has both. A malformed one is ignored."""
    trace, parent = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
    traced = Traced(["one", "two"])
    for header in (f"00-{trace}-{parent}-01", "nonsense"):
        with weft.Program("agent", metadata={"traceparent": header}) as program:
            traced.call(program)
    first, second = (span for span in traced.spans if span.name == "invoke_workflow agent")
    assert first.parent is not None
    assert (f"{first.parent.trace_id:032x}", f"{first.parent.span_id:016x}") == (trace, parent)
    assert second.parent is None


def test_a_program_that_began_before_has_no_spans() -> None:
    """Spans begin with the observer, and a program's span would have no start."""
    engine = ScriptedEngine(["one", "two"])
    with weft.Program("agent") as program:
        engine.chat_sync(BODY, program, program.reports.start_call("a"))
        exporter, provider = InMemorySpanExporter(), TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(exporter))
        weft.ProgramSpans(engine, provider)
        engine.chat_sync(BODY, program, program.reports.start_call("b"))
    assert exporter.get_finished_spans() == ()


def test_tools_that_never_return_are_bounded() -> None:
    """A program that runs for days keeps the spans of as many tools as its row does; the rest end with the program."""
    traced = Traced(["one"])
    program = weft.Program("agent")
    program.reports.bind(traced.engine.programs)
    for number in range(KEEP_TOOLS + 50):
        program.reports.start_run(number, None)
        program.reports.note_tool(number, "search")
    assert len(traced.spans) == 50
    program.end()
    assert len(traced.spans) == KEEP_TOOLS + 50 + 1


@pytest.mark.parametrize(
    ("url", "server"),
    [
        (None, (None, None)),
        ("http://host:8000", ("host", 8000)),
        ("https://host/prefix", ("host", 443)),
        ("http://[::1]", ("::1", 80)),
    ],
)
def test_a_call_on_a_server_has_the_servers_address(url: str | None, server: tuple[str | None, int | None]) -> None:
    """As the conventions ask of calls over a network. An engine in this process has no address."""
    with ScriptedEngine(["one"]) as engine:
        if url is not None:
            vars(engine)["server_url"] = url
        exporter, provider = InMemorySpanExporter(), TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(exporter))
        weft.ProgramSpans(engine, provider)
        with weft.Program("agent") as program:
            engine.chat_sync(BODY, program, program.reports.start_call(object()))
    call = exporter.get_finished_spans()[0].attributes or {}
    assert (call.get("server.address"), call.get("server.port")) == server


def test_spans_of_programs_are_imported_as_the_programs_they_were(tmp_path: Path) -> None:
    """What `weft trace import` makes of the spans has the calls, the parents, the lengths and the tools of the
    programs' graphs, also of a program inside another one."""
    replies = [Reply(tool_calls=[("research", {"topic": "fog"})]), "Fog is water.", "It is wet."]
    traced = Traced(replies, latency_s=0.5)
    model = ChatWeft(engine=traced.engine)
    graphs = []

    @tool
    def research(topic: str) -> str:
        """Find facts."""
        with weft.Program("inner") as inner:
            text = str(model.invoke(f"What is {topic}?", config=inner.config()).text)
        graphs.append(inner.graph)
        return text

    with weft.Program("outer", tenant="acme") as outer:
        agent = create_agent(model, [research])
        agent.invoke({"messages": [{"role": "user", "content": "Tell me about fog."}]}, config=outer.config())
    graphs.append(outer.graph)
    path = tmp_path / "spans.jsonl"
    path.write_text(otlp_json(traced.spans[:2]) + otlp_json(traced.spans[2:]))
    found = {program.program: program for program in TraceImport([path])}
    assert len(found) == 2
    for graph in graphs:
        expected, program = from_graph(graph), found[graph.program_id]
        assert program.name == expected.name
        assert [(call.call_id, call.parents, call.prompt_tokens, call.output_tokens) for call in program.calls] == [
            (call.call_id, call.parents, call.prompt_tokens, call.output_tokens) for call in expected.calls
        ]
    assert found[outer.program_id].tenant == "acme"
    assert [call.tool for call in found[outer.program_id].calls] == [None, "research"]
