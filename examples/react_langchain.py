"""ReAct agents of different lengths at once on one engine: LangChain's `create_agent`, a calculator and a lookup.

Run it with `weft demo`, or `python examples/react_langchain.py --model Qwen/Qwen2.5-0.5B-Instruct`. What makes it a
Weft example is four lines: the engine, `@weft.program`, `ChatWeft(engine=...)` and `config=program.config()`.
"""

from __future__ import annotations

import ast
import asyncio
import itertools
import operator
import re
import statistics
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NamedTuple

import typer
from langchain.agents import create_agent
from langchain.agents.middleware import AgentMiddleware, ModelRequest, ModelResponse
from langchain_core.messages import AIMessage, AnyMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from pydantic import Field
from rich import box
from rich.live import Live
from rich.table import Table

import weft
from weft.core.policies import DEFAULT_POLICY, POLICIES
from weft.examples._run import QUICK, Model, console, play, tell
from weft.integrations.langchain import ChatWeft

# The text that the lookup tool searches. Each line is one fact.
ALMANAC: Final = """\
Everest is 8849 metres high.
The Nile is 6650 kilometres long.
The Amazon is 6400 kilometres long.
The Moon is 384400 kilometres away.
The Sahara covers 9200000 square kilometres.
Mars has 2 moons.
The Danube is 2850 kilometres long.
Kilimanjaro is 5895 metres high.
Lake Baikal is 1642 metres deep.
Iceland has 130 volcanoes."""

Topic = Literal["Amazon", "Baikal", "Danube", "Everest", "Iceland", "Kilimanjaro", "Mars", "Moon", "Nile", "Sahara"]


class Task(NamedTuple):
    """One program: its start, and its questions, which it answers one after another."""

    start_s: float
    questions: list[str]


# Six long programs begin together. The short programs begin when the long ones have attained some service. Under FCFS,
# the calls of a short program queue behind those of the long ones. Under Weft's policies, they go first.
TASKS: Final = {
    "rivers": Task(0, ["How long is the Nile?", "How long is the Amazon?", "What is 6650 - 6400?"]),
    "space": Task(0, ["How far away is the Moon?", "How many moons does Mars have?", "What is 384400 / 2?"]),
    "mountains": Task(0, ["How high is Everest?", "How high is Kilimanjaro?", "What is 8849 - 5895?"]),
    "deserts": Task(0, ["How big is the Sahara?", "What is 9200000 / 2?", "What is 9200000 / 4?"]),
    "waters": Task(0, ["How deep is Lake Baikal?", "How long is the Danube?", "What is 2850 - 1642?"]),
    "numbers": Task(0, ["What is 144 / 12?", "What is 17 * 3?", "What is 1000 - 1?"]),
    "volcanoes": Task(5, ["How many volcanoes does Iceland have?", "What is 130 / 10?"]),
    "multiply": Task(7, ["What is 12 * 7?"]),
    "Everest": Task(9, ["How high is Everest?"]),
    "divide": Task(11, ["What is 81 / 9?"]),
}
SHORT: Final = 2  # A program with at most this many questions is short.

_OPERATORS: Final[dict[type[ast.operator], Callable[[float, float], float]]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


@tool
def calculator(expression: Annotated[str, Field(pattern=r"^[0-9]{1,7}( [-+*/] [0-9]{1,7}){1,2}$")]) -> str:
    """Work out arithmetic such as 15 * 4."""

    def value(node: ast.expr) -> float:
        if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
            return node.value
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            return _OPERATORS[type(node.op)](value(node.left), value(node.right))
        raise ValueError(f"not arithmetic: {expression}")

    try:
        return f"{expression} = {value(ast.parse(expression, mode='eval').body):.10g}"
    except (SyntaxError, ValueError, ZeroDivisionError) as error:
        return f"{expression} cannot be worked out: {error}"


@tool
def lookup(topic: Topic) -> str:
    """Find a fact about a place."""
    return next((line for line in ALMANAC.splitlines() if topic in line), f"The almanac has nothing on {topic}.")


class OneToolFirst(AgentMiddleware[Any, Any, Any]):
    """Makes the model call a tool before it answers, and offers only the tool that fits.

    A model of 135 million parameters fills in arguments well, but chooses tools badly. A larger model does not need
    this.
    """

    async def awrap_model_call(
        self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], Awaitable[ModelResponse[Any]]]
    ) -> ModelResponse[Any]:
        question = request.messages[-1]
        if isinstance(question, HumanMessage):
            fitting = calculator if re.search(r"\d", question.text) else lookup
            request = request.override(
                tools=[fitting], tool_choice="any", model_settings={"parallel_tool_calls": False}
            )
        return await handler(request)


def _example(question: str, name: str, arguments: dict[str, str], result: str, answer: str) -> list[AnyMessage]:
    call = {"name": name, "args": arguments, "id": f"example-{name}"}
    return [
        HumanMessage(question),
        AIMessage("", tool_calls=[call]),
        ToolMessage(result, tool_call_id=call["id"]),
        AIMessage(answer),
    ]


SYSTEM_PROMPT: Final = "You answer questions with the help of tools."
EXAMPLES: Final = [
    *_example("What is 15 * 4?", "calculator", {"expression": "15 * 4"}, "15 * 4 = 60", "15 * 4 = 60"),
    *_example("How long is the Rhine?", "lookup", {"topic": "Rhine"}, "The Rhine is 1230 kilometres long.",
              "The Rhine is 1230 kilometres long."),
]  # fmt: skip


@weft.program
async def react(questions: list[str], model: ChatWeft, program: weft.Program) -> list[str]:
    """Answer the questions one after another."""
    agent = create_agent(model, [calculator, lookup], system_prompt=SYSTEM_PROMPT, middleware=[OneToolFirst()])
    answers = []
    for question in questions:
        result = await agent.ainvoke({"messages": [*EXAMPLES, HumanMessage(question)]}, config=program.config())
        answers.append(str(result["messages"][-1].text))
    return answers


class Turn(NamedTuple):
    """What the agents did under one policy."""

    answers: dict[str, list[str]]  # by program
    took_s: dict[str, float]  # by program, from its start to its end


async def play_turn(model: str | None, policy: str, tasks: dict[str, Task]) -> Turn:
    """Start an engine, run the agents on it at once, and print the process table."""
    # Few calls run at once, so that programs compete.
    engine = await weft.Engine.create(model, policy=policy, max_num_seqs=3, **QUICK)
    async with engine:
        tell(f"{len(tasks)} agents at once on {Path(engine.model).name}, policy {policy}", style="bold")
        chat = ChatWeft(engine=engine, temperature=0, max_tokens=48)

        async def start(name: str, task: Task) -> list[str]:
            await asyncio.sleep(task.start_s)
            return await react.options(name=name)(task.questions, chat)

        with Live(get_renderable=lambda: engine.table, console=console, transient=True):
            answers = await asyncio.gather(*(start(name, task) for name, task in tasks.items()))
        console.print(engine.table)
        console.print()
        took_s = {row.info.name: row.end_s - row.start_s for row in engine.table.ended()}
        return Turn(dict(zip(tasks, answers, strict=True)), took_s)


def summary(tasks: dict[str, Task], turns: dict[str, Turn]) -> Table:
    """How long programs took under each policy: all of them, the short ones and the long ones."""
    short = [name for name, task in tasks.items() if len(task.questions) <= SHORT]
    groups = {
        "all {} programs": [*tasks],
        f"{{}} programs of up to {SHORT} questions": short,
        f"{{}} programs of more than {SHORT}": [name for name in tasks if name not in short],
    }
    table = Table(title="seconds that programs took, on average", box=box.SIMPLE)
    table.add_column()
    for policy in turns:
        table.add_column(policy, justify="right")
    for title, names in groups.items():
        if names:
            means_s = [statistics.fmean(turn.took_s[name] for name in names) for turn in turns.values()]
            table.add_row(title.format(len(names)), *(f"{mean_s:.1f}" for mean_s in means_s))
    return table


async def run(model: str | None, policy: str, programs: int | None) -> dict[str, list[str]]:
    """Run the agents in vLLM's own order and then under a policy, and print the answers and what the policy changed.

    Returns:
        The answers of each program under the policy.
    """
    names = itertools.islice(itertools.cycle(TASKS), programs or len(TASKS))
    tasks = {name if n < len(TASKS) else f"{name} {n // len(TASKS) + 1}": TASKS[name] for n, name in enumerate(names)}
    turns = {each: await play_turn(model, each, tasks) for each in dict.fromkeys(("fcfs", policy))}
    answers = turns[policy].answers
    for name, task in tasks.items():
        tell(name, style="bold")
        for question, answer in zip(task.questions, answers[name], strict=True):
            tell(f"  {question:38} {answer}")
    console.print()
    console.print(summary(tasks, turns))
    return answers


def run_demo(
    model: Model = None,
    policy: Annotated[
        str, typer.Option(help=f"The policy to compare with vLLM's own order: {', '.join(POLICIES)}.")
    ] = DEFAULT_POLICY,
    programs: Annotated[int | None, typer.Option(min=1, help="Number of agents, which run at once.")] = None,
) -> int:
    """Run the ReAct agents in vLLM's own order and under a policy, and print answers, process tables and times."""
    play(run(model, policy, programs))
    return 0


if __name__ == "__main__":
    typer.run(run_demo)
