"""The calls of a program carry names that a person knows: of the run, the model, the agent or the node."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain_core.runnables import RunnableLambda
from langgraph.graph import MessagesState, StateGraph

import weft
from weft.integrations.langchain import ChatWeft
from weft.testing import ScriptedEngine

pytest_plugins = ["weft.testing.fixtures"]

QUESTION = {"messages": [("user", "Where is the Nile?")]}


def in_a_node(model: ChatWeft) -> Any:
    graph = StateGraph(MessagesState)
    graph.add_node("plan", lambda state: {"messages": [model.invoke(state["messages"])]})
    graph.set_entry_point("plan")
    return graph.compile()


@pytest.mark.parametrize(
    ("agent", "label"),
    [
        (lambda engine: create_agent(ChatWeft(engine=engine), [], name="researcher"), "researcher"),
        (lambda engine: in_a_node(ChatWeft(engine=engine)), "plan"),
        (lambda engine: in_a_node(ChatWeft(engine=engine, name="planner")), "planner"),
        (lambda engine: create_agent(ChatWeft(engine=engine, name="planner"), [], name="researcher"), "planner"),
        (lambda engine: create_agent(ChatWeft(engine=engine, name="planner").bind(seed=1), []), "planner"),
        (lambda engine: in_messages() | ChatWeft(engine=engine, name="planner"), "planner"),
        (lambda engine: in_messages() | ChatWeft(engine=engine).with_config(run_name="draft"), "draft"),
        (lambda engine: in_messages() | ChatWeft(engine=engine, name="p").with_config(run_name="draft"), "draft"),
    ],
)
def test_a_call_is_labelled(
    agent: Callable[[ScriptedEngine], Any], label: str, scripted_engine: Callable[..., ScriptedEngine]
) -> None:
    """The name of the run comes first, then the model's, because the user gave them; then the agent's or node's."""
    with weft.Program("p") as program:
        agent(scripted_engine(["In Africa."])).invoke(QUESTION, config=program.config())
    (call,) = program.graph.calls
    assert call.label == label


def in_messages() -> RunnableLambda[Any, Any]:
    return RunnableLambda(lambda state: state["messages"])


def test_a_call_without_a_program_of_its_own_is_labelled(scripted_engine: Callable[..., ScriptedEngine]) -> None:
    """A call without a handle is a program of the model's name."""
    engine = scripted_engine(["In Africa."])
    ChatWeft(engine=engine, name="planner").invoke("Where is the Nile?")
    (row,) = engine.table.ended()
    assert row.info.name == "planner"
