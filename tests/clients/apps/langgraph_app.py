"""LangGraph: map and reduce with Send, a supervisor, a swarm, reflection, Deep Agents, and LangChain's batch."""

from __future__ import annotations

import asyncio
import operator
import sys
from typing import Annotated, Any, TypedDict
from uuid import uuid4

from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, StateGraph
from langgraph.types import Send

MODEL = ChatOpenAI(model="scripted", streaming=True)


class Report(TypedDict):
    topics: list[str]
    sections: Annotated[list[str], operator.add]
    report: str


async def send(question: str) -> None:
    async def plan(_state: Report) -> Any:
        answer = await MODEL.ainvoke([HumanMessage(f"Name three topics of a report, one a line. {question}")])
        return {"topics": str(answer.content).strip().splitlines()}

    async def write(state: Any) -> Any:
        answer = await MODEL.ainvoke([HumanMessage(f"You are a writer. Write one section.\nTopic: {state['topic']}\n")])
        return {"sections": [str(answer.content)]}

    async def join(state: Report) -> Any:
        answer = await MODEL.ainvoke(
            [HumanMessage("Make a report of these sections:\n\n" + "\n\n".join(state["sections"]))]
        )
        return {"report": str(answer.content)}

    graph = StateGraph(Report)
    graph.add_node("plan", plan)
    graph.add_node("write", write)
    graph.add_node("join", join)
    graph.add_edge(START, "plan")
    graph.add_conditional_edges(
        "plan", lambda state: [Send("write", {"topic": each}) for each in state["topics"]], ["write"]
    )
    graph.add_edge("write", "join")
    graph.add_edge("join", END)
    await graph.compile().ainvoke({"topics": [], "sections": [], "report": ""})


async def reflection(question: str) -> None:
    """A writer and a teacher, the first of whom gets its latest draft alone, with what the other one said of it."""
    write, teach = SystemMessage("You write essays."), SystemMessage("You are a strict teacher.")
    task = HumanMessage(f"Write an essay. {question}")
    draft = await MODEL.ainvoke([write, task])
    for _ in range(2):
        grade = await MODEL.ainvoke([teach, HumanMessage(f"Grade this essay:\n\n{draft.content}")])
        draft = await MODEL.ainvoke([write, task, AIMessage(draft.content), HumanMessage(grade.content)])


def weather(city: str) -> str:
    """Look up the weather of a city."""
    return f"{city}: warm"


async def supervisor(question: str) -> None:
    from langchain.agents import create_agent
    from langgraph_supervisor import create_supervisor

    reporter = create_agent(MODEL, [weather], system_prompt="You are the reporter.", name="reporter")
    editor = create_agent(MODEL, [], system_prompt="You are the editor.", name="editor")
    team = create_supervisor([reporter, editor], model=MODEL, prompt="You are the supervisor.").compile()
    await team.ainvoke({"messages": [("user", question)]})


async def swarm(question: str) -> None:
    from langchain.agents import create_agent
    from langgraph_swarm import create_handoff_tool, create_swarm

    desk = create_agent(
        MODEL, [create_handoff_tool(agent_name="reporter")], system_prompt="You are the desk.", name="desk"
    )
    reporter = create_agent(MODEL, [weather], system_prompt="You are the reporter.", name="reporter")
    await (
        create_swarm([desk, reporter], default_active_agent="desk")
        .compile()
        .ainvoke({"messages": [("user", question)]})
    )


async def deepagents(question: str) -> None:
    from deepagents import create_deep_agent

    helper = {"name": "helper", "description": "Looks things up.", "system_prompt": "You are the helper."}
    agent = create_deep_agent(model=MODEL, tools=[weather], system_prompt="You are the chief.", subagents=[helper])
    await agent.ainvoke({"messages": [("user", question)]})


async def resume(question: str) -> None:
    from langchain.agents import create_agent
    from langgraph.checkpoint.memory import InMemorySaver

    agent = create_agent(MODEL, [weather], system_prompt="You are the reporter.", checkpointer=InMemorySaver())
    for text in (question, "And tomorrow?"):
        await agent.ainvoke({"messages": [("user", text)]}, {"configurable": {"thread_id": "one"}})


async def header(question: str) -> None:
    """Two prompts at once, which share nothing but the run."""
    model = ChatOpenAI(model="scripted", default_headers={"weft-program-id": str(uuid4())})
    await model.abatch([f"Sum up: {question}", "The keeper counts eels. In a word?"])


async def main(case: str) -> None:
    name, _, how = case.partition(" ")
    apps = {"send": send, "supervisor": supervisor, "swarm": swarm, "resume": resume, "reflection": reflection}
    apps["header"] = header
    app = apps.get(name, deepagents)
    if how == "two at once":
        await asyncio.gather(app("About ships in Rome."), app("About ships in Oslo."))
    else:
        await app("About ships in Rome.")


asyncio.run(main(sys.argv[1]))
