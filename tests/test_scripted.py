"""`weft.testing.ScriptedEngine`: agents of every framework run on a script, without vLLM."""

from __future__ import annotations

import asyncio
import gc
import math
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any

import pytest

import weft
from weft.core.errors import ContextLengthError, DeadlineError, InvalidRequestError, OverloadedError, ScriptError
from weft.engine.wire.call_header import decode_call
from weft.testing import FakeClock, Reply, ScriptedEngine

pytest_plugins = ["weft.testing.fixtures"]
pytestmark = pytest.mark.anyio

MakeEngine = Callable[..., ScriptedEngine]


def user(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}]}


async def ask(engine: ScriptedEngine, program: weft.Program, text: str = "Hello", **fields: Any) -> dict[str, Any]:
    return await engine.chat({**user(text), **fields}, program, program.reports.start_call(object()))


async def test_replies_come_in_order(scripted_engine: MakeEngine) -> None:
    """Each call gets the next reply of a list, and its account is the reply's latency and words."""
    engine = scripted_engine(["one", Reply("two words", latency_s=3.0)], latency_s=1.5)
    with weft.Program("p") as program:
        first, second = await ask(engine, program), await ask(engine, program, "Hello to you")
        row = program.row
    assert first["choices"][0]["message"]["content"] == "one"
    assert second["choices"][0]["message"]["content"] == "two words"
    assert second["usage"] == {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
    assert row is not None
    assert (row.calls, row.account.service_s, row.account.output_tokens) == (2, 4.5, 3)
    assert engine.clock() == 4.5


class TickingClock(FakeClock):
    """No two readings are the same."""

    def __call__(self) -> float:
        self.advance(0.001)
        return super().__call__()


async def test_a_program_begins_before_its_first_call(scripted_engine: MakeEngine) -> None:
    """A program that begins with a call is opened first, so its row and its graph agree about the order."""
    with weft.Program("p") as program:
        await ask(scripted_engine(["one"], clock=TickingClock()), program)
        row = program.row
    (call,) = program.graph.calls
    assert row is not None
    assert call.arrival_s is not None
    assert row.start_s < call.arrival_s


async def test_a_function_answers_by_the_request(scripted_engine: MakeEngine) -> None:
    """A function sees the request in OpenAI's format."""

    def reply(body: Mapping[str, Any]) -> str:
        return body["messages"][-1]["content"].upper()

    with weft.Program("p") as program:
        answer = await ask(scripted_engine(reply), program, "loud")
    assert answer["choices"][0]["message"]["content"] == "LOUD"


async def test_an_exception_is_raised_by_the_call(scripted_engine: MakeEngine) -> None:
    """Errors on demand: the agent under test sees what the engine would raise, and the next call is answered."""
    engine = scripted_engine([ContextLengthError("too long"), OverloadedError(1, 1, 0.5), "fine"])
    with weft.Program("p") as program:
        with pytest.raises(ContextLengthError):
            await ask(engine, program)
        with pytest.raises(OverloadedError):
            await ask(engine, program)
        assert (await ask(engine, program))["choices"][0]["message"]["content"] == "fine"


@pytest.mark.parametrize("replies", [[], [7], [None]])
async def test_a_script_without_a_reply_fails_the_test(scripted_engine: MakeEngine, replies: list[Any]) -> None:
    """A call that the test did not expect must not get an invented answer."""
    with weft.Program("p") as program, pytest.raises(ScriptError, match="reply"):
        await ask(scripted_engine(replies), program)


async def test_calls_wait_for_the_tests_clock(scripted_engine: MakeEngine, fake_clock: FakeClock) -> None:
    """With a clock of the test, an answer comes when the test has advanced the clock, however long that takes."""
    engine = scripted_engine([Reply("slow", latency_s=5.0), Reply("quick", latency_s=1.0)], clock=fake_clock)
    async with weft.Program("p") as program:
        slow = asyncio.create_task(ask(engine, program))
        await engine.until_waiting(1)
        quick = asyncio.create_task(ask(engine, program))
        await engine.until_waiting(2)
        fake_clock.advance(1.0)
        assert (await quick)["choices"][0]["message"]["content"] == "quick"
        assert not slow.done()
        fake_clock.advance(4.0)
        await slow


async def test_a_waiting_call_can_be_cancelled(scripted_engine: MakeEngine, fake_clock: FakeClock) -> None:
    """The call leaves the table, as on a real engine."""
    engine = scripted_engine(["never"], latency_s=1.0, clock=fake_clock)
    async with weft.Program("p") as program:
        task = asyncio.create_task(ask(engine, program))
        await engine.until_waiting(1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        row = program.row
        assert row is not None
        assert not row.active


async def test_a_deadline_passes(scripted_engine: MakeEngine, fake_clock: FakeClock) -> None:
    """The limits of a call hold as on a real engine; they are in real time, as their caller waits in real time."""
    engine = scripted_engine(["never"], latency_s=1.0, clock=fake_clock)
    with weft.Program("p") as program, pytest.raises(DeadlineError):
        await ask(engine, program, timeout_s=0.01)


async def test_a_programs_limits_travel_with_its_calls(scripted_engine: MakeEngine, fake_clock: FakeClock) -> None:
    """The scheduler is told the tenant and the time left until the deadline, on each call. A time-out of the program
    counts as a deadline that is kept by force."""
    sent: list[Any] = []
    engine = scripted_engine(["one", "two", "three"], clock=fake_clock)
    make_request = engine._link.endpoint(None).chat.make_request

    def spy(*arguments: Any) -> Any:
        sent.append(request := make_request(*arguments))
        return request

    engine._link.endpoint(None).chat.make_request = spy

    @weft.program(tenant="acme", deadline_s=30.0, timeout_s=60.0)
    async def work(program: weft.Program) -> None:
        await ask(engine, program)
        fake_clock.advance(12.0)
        await ask(engine, program)
        assert program.row is not None
        assert program.row.due_s == program.row.start_s + 30.0
        fake_clock.advance(48.0)
        with pytest.raises(DeadlineError, match="the program was not done within 60 s"):
            await ask(engine, program)

    await work()
    headers = [decode_call(request.vllm_xargs, "r", None, is_trusted=True) for request in sent[:2]]
    assert [(header.tenant, header.program_time_left_s) for header in headers] == [("acme", 30.0), ("acme", 18.0)]


@pytest.mark.parametrize("limits", [{"timeout_s": 0}, {"deadline_s": math.inf}, {"deadline_s": "soon"}])
def test_limits_of_a_program_are_seconds(limits: dict[str, Any]) -> None:
    """The decorator says so at once, not the first call."""

    def work(program: weft.Program) -> None:
        del program

    with pytest.raises(InvalidRequestError, match="must be a"):
        weft.program(**limits)(work)


async def test_an_answer_is_streamed_by_words(scripted_engine: MakeEngine) -> None:
    """The chunks have OpenAI's form, and the finishing one has the account."""
    engine = scripted_engine(["two words"])
    with weft.Program("p") as program:
        body = {**user("Hello"), "stream_options": {"include_usage": True}}
        chunks = [chunk async for chunk in engine.chat_stream(body, program, program.reports.start_call(object()))]
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    assert "".join(delta.get("content") or "" for delta in deltas) == "two words"
    assert chunks[-1]["usage"]["completion_tokens"] == 2
    assert [chunk["weft"]["output_tokens"] for chunk in chunks if "weft" in chunk] == [2]


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"max_tokens": 1_000_000}, ContextLengthError),
        ({"max_completion_tokens": 8}, ContextLengthError),
        ({"messages": user("one two three four five six seven eight")["messages"]}, ContextLengthError),
        ({"max_tokens": "many"}, InvalidRequestError),
        ({"max_tokens": 0}, InvalidRequestError),
    ],
)
async def test_limits_that_vllm_refuses_are_refused(
    scripted_engine: MakeEngine, fields: dict[str, Any], error: type[Exception]
) -> None:
    """A call that does not fit into the context, or whose limit is no number, fails without taking a reply."""
    engine = scripted_engine(["fits"], max_model_len=8)
    with weft.Program("p") as program:
        with pytest.raises(error):
            await ask(engine, program, **fields)
        assert (await ask(engine, program, max_tokens=7))["choices"][0]["message"]["content"] == "fits"


async def test_a_priority_is_refused(scripted_engine: MakeEngine) -> None:
    """Every engine does, in a stream, too: the policy ranks calls by their programs. 0 and None say nothing."""
    engine = scripted_engine(["one", "two"])
    with weft.Program("p") as program:
        with pytest.raises(InvalidRequestError, match="priority 7, which has no effect"):
            await ask(engine, program, priority=7)
        stream = engine.chat_stream({**user("Hello"), "priority": -1}, program, program.reports.start_call(object()))
        with pytest.raises(InvalidRequestError, match="priority -1, which has no effect"):
            await anext(stream)
        assert engine.calls == []
        for priority in (0, None):
            await ask(engine, program, priority=priority)
    assert len(engine.calls) == 2


async def test_max_tokens_cuts_an_answer(scripted_engine: MakeEngine) -> None:
    """An agent that must handle a cut answer can be tested."""
    with weft.Program("p") as program:
        answer = await ask(scripted_engine(["one two three"]), program, max_tokens=2)
    assert answer["choices"][0] == {
        "index": 0,
        "message": {"role": "assistant", "content": "one two"},
        "finish_reason": "length",
    }


async def test_a_langchain_agent_runs_on_a_script(scripted_engine: MakeEngine) -> None:
    """LangChain's agent calls the tool that the script asks for, and the calls form one thread."""
    pytest.importorskip("langchain", reason="the LangChain extra is not installed")
    from langchain.agents import create_agent
    from langchain_core.tools import tool

    from weft.integrations.langchain import ChatWeft

    @tool
    def weather(city: str) -> str:
        """Look up the weather."""
        return f"{city}: warm"

    engine = scripted_engine([Reply(tool_calls=[("weather", {"city": "Paris"})]), "It is warm in Paris."])

    @weft.program
    async def answer(question: str, program: weft.Program) -> tuple[str, weft.Program]:
        agent = create_agent(ChatWeft(engine=engine), tools=[weather])
        result = await agent.ainvoke({"messages": [("user", question)]}, config=program.config())
        return result["messages"][-1].content, program

    text, program = await answer("How is the weather?")
    assert text == "It is warm in Paris."
    look_up, report = program.graph.calls
    assert [edge.parent for edge in report.parents] == [look_up.call_id]
    assert report.tools == ("weather",)
    assert [call["function"]["name"] for call in engine.calls[0].body["tools"]] == ["weather"]
    assert engine.calls[1].body["messages"][-1]["content"] == "Paris: warm"


async def test_a_langchain_model_streams_from_a_script(scripted_engine: MakeEngine) -> None:
    """Streams and tool calls in streams work, too."""
    pytest.importorskip("langchain", reason="the LangChain extra is not installed")
    from weft.integrations.langchain import ChatWeft

    model = ChatWeft(engine=scripted_engine(["one two", Reply(tool_calls=[("look", {"at": "it"})])]))
    assert [chunk.text async for chunk in model.astream("Hello") if chunk.text] == ["one", " two"]
    whole = None
    async for chunk in model.astream("Hello"):
        whole = chunk if whole is None else whole + chunk
    assert whole is not None
    assert [(call["name"], call["args"]) for call in whole.tool_calls] == [("look", {"at": "it"})]


async def test_an_autogen_team_runs_on_a_script(scripted_engine: MakeEngine) -> None:
    """AutoGen's agents take the engine's client as they do with a real engine."""
    pytest.importorskip("autogen_agentchat", reason="the AutoGen extra is not installed")
    from autogen_agentchat.agents import AssistantAgent
    from autogen_agentchat.conditions import MaxMessageTermination
    from autogen_agentchat.teams import RoundRobinGroupChat

    from weft.integrations.autogen import WeftChatCompletionClient, bind_team

    client = WeftChatCompletionClient(scripted_engine(["A plan.", "A report."]))
    agents = [AssistantAgent(name, client) for name in ("planner", "writer")]
    team = RoundRobinGroupChat(agents, termination_condition=MaxMessageTermination(3))
    async with weft.Program("team") as program:
        result = await bind_team(team, program).run(task="Go")
    assert [message.to_text() for message in result.messages] == ["Go", "A plan.", "A report."]
    assert [call.label for call in program.graph.calls] == ["planner", "writer"]


async def test_an_openai_client_runs_on_a_script(scripted_engine: MakeEngine) -> None:
    """The transport of OpenAI's client ends in the script."""
    pytest.importorskip("openai", reason="the OpenAI package is not installed")
    from weft.integrations.openai import openai_client

    engine = scripted_engine(["Good day."])
    answer = await openai_client(engine).chat.completions.create(
        model=engine.model, messages=[{"role": "user", "content": "Hello"}]
    )
    assert answer.choices[0].message.content == "Good day."


def test_code_without_an_event_loop_runs_on_a_script(scripted_engine: MakeEngine) -> None:
    """The blocking calls work from any thread."""
    engine = scripted_engine(["one", "two"])
    with weft.Program("p") as program:
        engine.chat_sync(user("Hello"), program, program.reports.start_call(object()))
        chunks = engine.chat_stream_sync(user("Hello"), program, program.reports.start_call(object()))
        assert "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks) == "two"


def test_an_engine_without_references_ends_its_thread() -> None:
    """Test suites make thousands of engines and forget to shut some down."""
    before = threading.active_count()
    engine = ScriptedEngine(["one"])
    assert threading.active_count() == before + 1
    del engine
    gc.collect()
    assert threading.active_count() == before


def test_vllm_is_not_imported() -> None:
    """A unit test must start quickly, and must run where vLLM is not installed."""
    code = "import sys, weft.testing; assert not {'vllm', 'torch'} & set(sys.modules), sorted(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
