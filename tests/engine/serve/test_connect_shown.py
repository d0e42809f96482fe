"""What the server shows of the programs of `weft.connect`: the same as an engine in their process."""

from __future__ import annotations

import asyncio
import operator
from collections import Counter
from collections.abc import Iterator
from typing import Annotated, Any, TypedDict

import pytest
from langchain_core.messages import AnyMessage
from langgraph.graph import START, StateGraph
from polling import until
from prometheus_client.parser import text_string_to_metric_families
from served import KEY, Served
from tiny_engine import ENDLESS_TOKENS

import weft
from weft.core.errors import DeadlineError
from weft.engine.host.frontend import FrontEnd
from weft.integrations.langchain import ChatWeft

pytestmark = [pytest.mark.engine, pytest.mark.anyio]


@pytest.fixture
def remote(served: Served) -> Iterator[FrontEnd]:
    """An engine on the server."""
    with weft.connect(served.url, api_key=KEY) as engine:
        yield engine


async def ask(engine: FrontEnd, program: weft.Program, **more: Any) -> None:
    body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4, "ignore_eos": True, **more}
    await engine.chat(body, program, program.reports.start_call(object()))


def ended(served: Served, program: weft.Program) -> dict[str, Any] | None:
    """The program as the server shows it after its end."""
    rows = served.client.get("/weft/state").json()["ended"]
    return next((row for row in rows if row["program_id"] == program.program_id), None)


def counted(served: Served) -> Counter[str]:
    """How many programs have ended, by state, as Prometheus reads it. Names have a bound, so it is over all of them."""
    found: Counter[str] = Counter()
    for family in text_string_to_metric_families(served.client.get("/metrics").text):
        for sample in family.samples:
            if sample.name == "weft:programs_ended_total":
                found[sample.labels["state"]] += int(sample.value)
    return found


async def test_a_program_ends_there_as_it_ends_here(remote: FrontEnd, served: Served) -> None:
    """Its state is in `weft top`, on the page and in the metrics. One whose time is over has failed, as in process."""
    programs: dict[str, weft.Program] = {}
    before = counted(served)

    async def run(end: str, **options: Any) -> None:
        async with weft.Program(name="ends", **options) as program:
            programs[end] = program
            await ask(remote, program)
            if end == "failed":
                raise ValueError
            if end == "cancelled":
                raise asyncio.CancelledError
            if end == "late":
                await ask(remote, program, max_tokens=ENDLESS_TOKENS)

    await run("finished")
    for end, error in (("failed", ValueError), ("cancelled", asyncio.CancelledError)):
        with pytest.raises(error):
            await run(end)
    with pytest.raises(DeadlineError):
        await run("late", timeout_s=1.0)
    await until(lambda: all(ended(served, program) for program in programs.values()))
    states = {end: (ended(served, program) or {})["state"] for end, program in programs.items()}
    assert states == {"finished": "finished", "failed": "failed", "cancelled": "cancelled", "late": "failed"}
    assert counted(served) - before >= Counter(finished=1, failed=2, cancelled=1)


class _State(TypedDict):
    messages: Annotated[list[AnyMessage], operator.add]


async def test_the_names_of_calls_and_the_tools_before_them_are_shown(remote: FrontEnd, served: Served) -> None:
    """A LangGraph node is the name of its call, on the page and for what the server learns of programs."""
    model = ChatWeft(engine=remote, max_tokens=4)

    def node(state: _State) -> _State:
        return {"messages": [model.invoke(state["messages"])]}

    graph: Any = StateGraph(_State)
    graph.add_node("planner", node)
    graph.add_node("writer", node)
    graph.add_edge(START, "planner")
    graph.add_edge("planner", "writer")
    agent = graph.compile()
    with weft.Program("graph") as program:
        await agent.ainvoke({"messages": [("user", "Hello")]}, config=program.config())
        program.reports.note_tools("run", ["search"])
        await ask(remote, program)
        made = served.client.get(f"/weft/programs/{program.program_id}/timeline").json()
        here = program.graph.calls
    assert [call["label"] for call in made["calls"]] == [node.label for node in here] == ["planner", "writer", ""]
    assert [gap["tools"] for gap in made["gaps"]][-1] == list(here[-1].tools) == ["search"]
    assert [call["call_id"] for call in made["calls"]] == [node.call_id for node in here]
