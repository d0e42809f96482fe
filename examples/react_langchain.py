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
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NamedTuple

import typer
from langchain.agents import create_agent
from langchain.agents.middleware import AgentMiddleware, ModelRequest, ModelResponse
from langchain_core.messages import AIMessage, AnyMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from pydantic import Field
from rich.live import Live

import weft
from weft.core.policies import DEFAULT_POLICY, POLICIES
from weft.core.process_table import ProcessTable
from weft.core.tables import Table
from weft.engine.host.frontend import FrontEnd
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

    after_tokens: int  # it starts when the engine has written so many tokens, or when all others have ended
    questions: list[str]


# Six long programs begin together. The short programs begin when the long ones have attained some service. Under FCFS,
# the calls of a short program queue behind those of the long ones. Under Weft's policies, they go first. The starts are
# counted in tokens, so that a slow machine changes nothing.
TASKS: Final = {
    "rivers": Task(0, ["How long is the Nile?", "How long is the Amazon?", "What is 6650 - 6400?"]),
    "space": Task(0, ["How far away is the Moon?", "How many moons does Mars have?", "What is 384400 / 2?"]),
    "mountains": Task(0, ["How high is Everest?", "How high is Kilimanjaro?", "What is 8849 - 5895?"]),
    "deserts": Task(0, ["How big is the Sahara?", "What is 9200000 / 2?", "What is 9200000 / 4?"]),
    "waters": Task(0, ["How deep is Lake Baikal?", "How long is the Danube?", "What is 2850 - 1642?"]),
    "numbers": Task(0, ["What is 144 / 12?", "What is 17 * 3?", "What is 1000 - 1?"]),
    "volcanoes": Task(250, ["How many volcanoes does Iceland have?", "What is 130 / 10?"]),
    "multiply": Task(350, ["What is 12 * 7?"]),
    "Everest": Task(450, ["How high is Everest?"]),
    "divide": Task(550, ["What is 81 / 9?"]),
}
SHORT: Final = 2  # A program with at most this many questions is short.
MOST_PROGRAMS: Final = 1000  # The process table keeps the rows of so many programs that have ended.
ALIKE: Final = 1.2  # Seconds of two turns are compared if a token cost at most so many times as much in one of them.
EQUAL: Final = 0.05  # A smaller change of a mean is none: it depends on when a program's start was noticed.

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
    """What the agents did under one policy. All but the answers is by program, from its start to its end."""

    answers: dict[str, list[str]]
    took_tokens: dict[str, int]  # the tokens that the engine wrote meanwhile, for all programs
    took_s: dict[str, float]
    token_s: float  # seconds of service that a token cost, on average over all programs


def written_tokens(table: ProcessTable) -> int:
    """The tokens that an engine has written so far, for all programs."""
    rows = {row.info.program_id: row for row in [*table, *table.ended()]}  # one may end in between
    return sum(
        row.account.output_tokens + sum(call.account.output_tokens for call in row.active.values())
        for row in rows.values()
    )


def only_programs(table: ProcessTable) -> Table:
    """The process table without the tables that are shown below it."""
    return table.to_table()._replace(below=None)


async def play_turn(engine: FrontEnd, tasks: dict[str, Task]) -> Turn:
    """Run the agents at once on an engine, and print the process table."""
    chat = ChatWeft(engine=engine, temperature=0, max_tokens=48)
    took_tokens: dict[str, int] = {}

    async def answer(name: str, task: Task) -> list[str]:
        before = written_tokens(engine.table)
        answers = await react.options(name=name)(task.questions, chat)
        took_tokens[name] = written_tokens(engine.table) - before
        return answers

    running: dict[str, asyncio.Task[list[str]]] = {}
    with Live(get_renderable=lambda: only_programs(engine.table), console=console, transient=True):
        try:
            for name, task in sorted(tasks.items(), key=lambda item: item[1].after_tokens):
                while (  # noqa: ASYNC110  the table sets no event
                    written_tokens(engine.table) < task.after_tokens
                    and not all(map(asyncio.Task.done, running.values()))
                ):
                    await asyncio.sleep(0.05)
                running[name] = asyncio.create_task(answer(name, task))
            answers = dict(zip(running, await asyncio.gather(*running.values()), strict=True))
        finally:  # after an error or Ctrl-C, the others end with it
            for each in running.values():
                each.cancel()
            await asyncio.gather(*running.values(), return_exceptions=True)
    console.print(only_programs(engine.table))
    console.print()
    rows = engine.table.ended()
    took_s = {row.info.name: row.end_s - row.start_s for row in rows}
    service_s = sum(row.account.service_s for row in rows)
    return Turn(answers, took_tokens, took_s, service_s / max(1, written_tokens(engine.table)))


def groups(tasks: dict[str, Task]) -> dict[str, list[str]]:
    """The short programs and the long ones, by what the table calls them. A group has at least one program."""
    short = [name for name, task in tasks.items() if len(task.questions) <= SHORT]
    long = [name for name in tasks if name not in short]
    titles = {
        f"short programs, up to {SHORT} questions: {len(short)}": short,
        f"long programs, more than {SHORT}: {len(long)}": long,
    }
    return {title: names for title, names in titles.items() if names}


def summary(tasks: dict[str, Task], turns: dict[str, Turn]) -> list[Table | str]:
    """How long programs took under each policy: in tokens, in seconds if these can be compared, and in a sentence."""
    costs_s = {policy: turn.token_s for policy, turn in turns.items()}
    tables: list[Table | str] = [
        means("tokens that the engine wrote from a program's start to its end, on average", "{:.0f}", tasks,
              {policy: turn.took_tokens for policy, turn in turns.items()}),
    ]  # fmt: skip
    if max(costs_s.values()) <= ALIKE * min(costs_s.values()):
        took_s = {policy: turn.took_s for policy, turn in turns.items()}
        tables.append(means("seconds from a program's start to its end, on average", "{:.1f}", tasks, took_s))
    else:
        costs = " and ".join(f"{cost_s:.3f} s under {policy}" for policy, cost_s in costs_s.items())
        tables.append(f"The machine was busy: a token cost {costs}. Run again to compare seconds.")
    return [*tables, *verdict(tasks, turns)]


def means(title: str, form: str, tasks: dict[str, Task], took: Mapping[str, Mapping[str, float]]) -> Table:
    """A table with a row for each group of programs and a column for each policy."""
    rows = [
        (group, *(form.format(statistics.fmean(by_name[name] for name in names)) for by_name in took.values()))
        for group, names in groups(tasks).items()
    ]
    return Table(title, ("", *took), rows, frozenset(range(1, len(took) + 1)), widest=60)


def verdict(tasks: dict[str, Task], turns: dict[str, Turn]) -> list[str]:
    """One sentence that says what the second policy changed; none if there was only one."""
    if len(turns) < 2:
        return []
    first, second = turns
    changes = []
    for title, names in groups(tasks).items():
        before, after = (statistics.fmean(turn.took_tokens[name] for name in names) for turn in turns.values())
        change = after / before - 1
        more = "about as many" if abs(change) < EQUAL else f"{abs(change):.0%} {'fewer' if change < 0 else 'more'}"
        changes.append(f"the {title.split(',')[0]} end after {more} tokens")
    return [f"Under {second}, {', and '.join(changes)}, compared with {first}, vLLM's own order."]


async def run(model: str | None, policy: str, programs: int | None) -> dict[str, list[str]]:
    """Run the agents in vLLM's own order and then under a policy, and print the answers and what the policy changed.

    Returns:
        The answers of each program under the policy.
    """
    names = itertools.islice(itertools.cycle(TASKS), programs or len(TASKS))
    tasks = {name if n < len(TASKS) else f"{name} {n // len(TASKS) + 1}": TASKS[name] for n, name in enumerate(names)}
    turns = {}
    for each in dict.fromkeys(("fcfs", policy)):
        # Few calls run at once, so that programs compete. All agents may have one in flight.
        async with await weft.Engine.create(
            model, policy=each, max_num_seqs=3, max_calls=len(tasks), **QUICK
        ) as engine:
            tell(f"{len(tasks)} agents at once on {Path(engine.model).name}, policy {each}", style="bold")
            turns[each] = await play_turn(engine, tasks)
    answers = turns[policy].answers
    for name, task in tasks.items():
        tell(name, style="bold")
        for question, answer in zip(task.questions, answers[name], strict=True):
            tell(f"  {question:38} {answer}")
    for part in summary(tasks, turns):
        console.print()
        console.print(part, highlight=False)
    return answers


def run_demo(
    model: Model = None,
    policy: Annotated[
        str, typer.Option(help=f"The policy to compare with vLLM's own order: {', '.join(POLICIES)}.")
    ] = DEFAULT_POLICY,
    programs: Annotated[
        int | None, typer.Option(min=1, max=MOST_PROGRAMS, help="Number of agents, which run at once.")
    ] = None,
) -> int:
    """Run the ReAct agents in vLLM's own order and under a policy, and print answers, process tables and times."""
    play(run(model, policy, programs))
    return 0


if __name__ == "__main__":
    typer.run(run_demo)
