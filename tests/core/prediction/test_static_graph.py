"""Static graphs of LangGraph and AutoGen, as their own classes draw them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, TypedDict

import pytest

from weft.core.errors import ArgumentTypeError
from weft.core.prediction import StaticGraph, read_static_graph
from weft.core.prediction.static_graph import Targets


class State(TypedDict):
    done: bool


def test_a_langgraph_graph_is_read_without_its_tool_nodes() -> None:
    """A tool node makes no call: what follows it follows the agent that chose the tool."""
    graph = pytest.importorskip("langgraph.graph")
    prebuilt = pytest.importorskip("langgraph.prebuilt")

    def node(state: State) -> State:
        return state

    builder = graph.StateGraph(State)
    for name in ("plan", "act", "check"):
        builder.add_node(name, node)
    builder.add_node("tools", prebuilt.ToolNode([]))
    builder.add_edge(graph.START, "plan")
    builder.add_edge("plan", "act")
    builder.add_edge("plan", "check")
    builder.add_edge("tools", "act")
    builder.add_edge("check", graph.END)
    builder.add_conditional_edges("act", lambda _: "tools", {"tools": "tools", "stop": graph.END})
    found = read_static_graph(builder.compile())
    assert {name: (set(each.always), set(each.one_of)) for name, each in found.nodes.items()} == {
        "plan": ({"act", "check"}, set()),
        "act": (set(), {"act", ""}),
        "check": (set(), set()),
    }


def test_a_digraph_of_autogen_is_read() -> None:
    """With its conditions; an agent without edges is an end."""
    teams = pytest.importorskip("autogen_agentchat.teams")
    agents = pytest.importorskip("autogen_agentchat.agents")
    client = pytest.importorskip("autogen_ext.models.replay").ReplayChatCompletionClient(["x"])
    writer, editor, reader = (agents.AssistantAgent(name, client) for name in ("writer", "editor", "reader"))
    builder = teams.DiGraphBuilder()
    builder.add_node(writer).add_node(editor).add_node(reader)
    builder.add_edge(writer, editor)
    builder.add_edge(editor, writer, condition="REVISE")
    builder.add_edge(editor, reader, condition=lambda message: "APPROVE" in message.to_model_text())
    builder.set_entry_point(writer)
    assert read_static_graph(builder.build()) == StaticGraph(
        {"writer": Targets(always=("editor",)), "editor": Targets(one_of=("writer", "reader")), "reader": Targets()}
    )


@pytest.mark.parametrize("given", [None, "plan", 3, object(), lambda: None, {"a": 1}])
def test_what_is_no_graph_is_refused(given: Any) -> None:
    """The error says what to give."""
    with pytest.raises(ArgumentTypeError, match=r"graph is .* Give a compiled LangGraph graph or an AutoGen DiGraph"):
        read_static_graph(given)


def test_a_graph_beyond_the_bounds_is_refused() -> None:
    """It would not fit where programs are counted."""

    nodes = {f"n{number}": SimpleNamespace(name=f"n{number}", data=None) for number in range(300)}
    drawn = SimpleNamespace(get_graph=lambda: SimpleNamespace(nodes=nodes, edges=[]))
    with pytest.raises(ArgumentTypeError, match="of less than 256 nodes"):
        read_static_graph(drawn)


def test_a_node_is_bypassed_with_all_its_targets() -> None:
    """Of a choice the targets become choices, and of a fork more branches; its loop to itself is gone."""
    graph = StaticGraph(
        {
            "a": Targets(always=("gone",)),
            "b": Targets(one_of=("gone", "a")),
            "gone": Targets(always=("a",), one_of=("gone", "b")),
        }
    )
    assert graph.without(["gone", "unknown"]) == StaticGraph(
        {"a": Targets(always=("a",), one_of=("b",)), "b": Targets(one_of=("a", "b"))}
    )
