"""AutoGen's teams as parts of random programs."""

from __future__ import annotations

from typing import Any

from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.teams import DiGraphBuilder, GraphFlow, RoundRobinGroupChat
from autogen_agentchat.tools import AgentTool
from nesting_parts import Part

import weft
from weft.integrations.autogen import WeftChatCompletionClient, bind_team


async def run_team(engine: Any, handle: weft.Program, part: Part, text: str) -> str:
    """Run the team of a part on a text, and return its last message."""

    def agent(name: str, **more: Any) -> AssistantAgent:
        return AssistantAgent(f"{part.name}_{name}", WeftChatCompletionClient(engine), **more)

    team: Any
    if part.style == "round robin":
        team = RoundRobinGroupChat([agent("a"), agent("b")], max_turns=3)
    elif part.style == "flow":
        a, b, c, d = agents = [agent(name) for name in "abcd"]
        graph = DiGraphBuilder()
        for each in agents:
            graph.add_node(each)
        graph.add_edge(a, b).add_edge(a, c).add_edge(b, d).add_edge(c, d)
        team = GraphFlow(agents, graph=graph.build())
    else:
        reflects = part.style == "tools"
        team = agent("a", tools=[AgentTool(agent(name)) for name in "bc"], reflect_on_tool_use=reflects)
    result = await bind_team(team, handle).run(task=text if part.passes_text else "go on")
    spoken = [message for message in result.messages if message.source != "user" and hasattr(message, "to_model_text")]
    return str(spoken[-1].to_model_text())
