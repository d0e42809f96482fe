"""Language agent tree search (LATS) over the game of 24, as a LangGraph graph; three puzzles at once on one engine.

Run it with `python examples/mcts_langgraph.py`, or add puzzles of your own: `"2 4 6 8" "1 5 5 5"`. What makes it a
Weft example is four lines: the engine, `@weft.program`, `ChatWeft(engine=...)` and `config=program.config()`.

A round of the search goes select, expand, evaluate, simulate, back-propagate, reflect. The game offers the legal moves;
the model takes its pick (held to them by structured output), says what positions are worth, plays them to the end, and
reflects on what went wrong. Code keeps the tree and checks the arithmetic. A model of 135 million parameters sees the
last move, and judges positions no better than chance; the search makes up for it.
"""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Annotated, Final, Literal, NamedTuple, cast

import typer
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage
from langchain_core.runnables import RunnableConfig
from langgraph.graph import END, START, StateGraph
from langgraph.graph.state import CompiledStateGraph
from langgraph.types import Command, Send
from pydantic import BaseModel
from typing_extensions import TypedDict

import weft
from weft.core.program.graph import ProgramGraph
from weft.examples._run import QUICK, Model, Picture, console, finish, play, starting, tell
from weft.examples._search import GOAL, Node, Numbers, formula, is_solved, moves, start
from weft.integrations.langchain import ChatWeft

PUZZLES: Final = ["4 4 4 6", "1 2 3 4", "4 7 8 8"]  # from easy to hard, so that short and long programs compete

WORTH: Final = {"sure": 0.9, "likely": 0.5, "impossible": 0.1}


class Value(BaseModel):
    """What the model says of a position, held to this form by vLLM."""

    chance: Literal["sure", "likely", "impossible"]


def _position(numbers: Numbers) -> str:
    return f"Numbers: {' '.join(str(number.value) for number in numbers)}. Goal: {GOAL}."


def _examples(system: str, *pairs: tuple[str, str]) -> list[BaseMessage]:
    messages: list[BaseMessage] = [SystemMessage(system)]
    for given, answer in pairs:
        messages += [HumanMessage(given), AIMessage(answer)]
    return messages


# A move begins with its result, because a small model sees sooner what it wants than how to come by it.
PLAY: Final = _examples(
    f"You play the game of {GOAL}: combine the numbers, two at a time, until {GOAL} is left.",
    ("Numbers: 12 3 2 1. Goal: 24.", "3 = 2 + 1"),
    ("Numbers: 9 3 3. Goal: 24.", "27 = 9 * 3"),
    ("Numbers: 6 4. Goal: 24.", "24 = 6 * 4"),
    ("Numbers: 20 4. Goal: 24.", "24 = 20 + 4"),
)
JUDGE: Final = _examples(
    f"You judge whether the numbers can make {GOAL}.",
    ("Numbers: 2 1. Goal: 24.", '{"chance": "impossible"}'),
    ("Numbers: 6 4. Goal: 24.", '{"chance": "sure"}'),
    ("Numbers: 4 3 2. Goal: 24.", '{"chance": "likely"}'),
)
REFLECT: Final = _examples(
    "You say in one short sentence what to do better.",
    ("You tried 12 * 2 + 6 = 30. Goal: 24.", "30 is too much, so subtract the small numbers."),
    ("You tried 12 + 2 + 1 = 15. Goal: 24.", "15 is too little, so multiply the large numbers first."),
    ("You tried 12 * 4 - 6 = 42. Goal: 24.", "42 is too much, so divide before you subtract."),
)


def _collect(before: list[Node], more: list[Node] | None) -> list[Node]:
    """What parallel tasks return is put together; None begins anew."""
    return [] if more is None else before + more


class State(TypedDict, total=False):
    """What the steps of the search hand on."""

    root: Node
    leaf: Node  # the position to expand
    children: Annotated[list[Node], _collect]  # of this round
    played: Node  # the child that was played to its end
    end: Numbers  # where that led
    rollouts: int
    lessons: list[str]


class Hand(TypedDict):
    """What one candidate is chosen from."""

    leaf: Node
    choices: list[str]
    seed: int
    lessons: list[str]


class Candidate(TypedDict):
    """A position to judge."""

    child: Node
    seed: int


class Budget(NamedTuple):
    """How much to search."""

    width: int  # how many candidates an expansion looks at, in parallel
    rollouts: int  # how many games are played to their end before a puzzle is given up


class TreeSearch:
    """The steps of the search, each a node of the graph.

    Args:
        chat: plays, judges and reflects.
        budget: how much to search.
        rng: shuffles moves and seeds the model's sampling.
    """

    def __init__(self, chat: ChatWeft, budget: Budget, rng: random.Random) -> None:
        self.chat = chat
        self.judge = chat.with_structured_output(Value)
        self.budget = budget
        self.rng = rng

    def graph(self) -> CompiledStateGraph[State, None, State, State]:
        """The search as a LangGraph graph."""
        graph = StateGraph(State)
        graph.add_node("select", self.select)
        graph.add_node("expand", self.expand)
        graph.add_node("evaluate", self.evaluate)
        graph.add_node("simulate", self.simulate)
        graph.add_node("back_propagate", self.back_propagate)
        graph.add_node("reflect", self.reflect)
        graph.add_edge(START, "select")
        graph.add_edge("evaluate", "simulate")
        graph.add_edge("simulate", "back_propagate")
        graph.add_conditional_edges("back_propagate", self.is_over, {True: END, False: "reflect"})
        graph.add_edge("reflect", "select")
        return graph.compile()

    def select(self, state: State) -> Command[Literal["expand"]]:
        """Walk down to the position with the best bound, and deal out its moves."""
        leaf = state["root"].select(self.budget.width)
        hands = [
            Send("expand", Hand(leaf=leaf, choices=choices, seed=self.seed(), lessons=state["lessons"]))
            for choices in leaf.deal(self.budget.width, self.rng)
        ]
        return Command(update={"leaf": leaf, "children": None}, goto=hands)

    async def expand(self, state: Hand, config: RunnableConfig) -> Command[Literal["evaluate"]]:
        """Have the model choose one move of a hand. Runs in parallel, once for each hand."""
        leaf = state["leaf"]
        move = await self.choose(leaf.numbers, state["choices"], state["seed"], state["lessons"], config)
        return Command(goto=Send("evaluate", Candidate(child=leaf.child(move), seed=state["seed"])))

    async def evaluate(self, state: Candidate, config: RunnableConfig) -> State:
        """Have the model say what a new position is worth. Runs in parallel, once for each."""
        child = state["child"]
        if len(child.numbers) == 1:  # the game is over
            child.add(float(is_solved(child.numbers)))
        else:
            question = HumanMessage(_position(child.numbers))
            value = await self.judge.ainvoke([*JUDGE, question], config, seed=state["seed"])
            child.add(WORTH[cast("Value", value).chance])
        return {"children": [child]}

    async def simulate(self, state: State, config: RunnableConfig) -> State:
        """Have the model play the best new position to its end."""
        state["leaf"].children += state["children"]
        best = max(state["children"], key=lambda child: child.total)
        numbers = best.numbers
        while len(numbers) > 1:
            offered = moves(numbers)
            numbers = offered[await self.choose(numbers, list(offered), self.seed(), state["lessons"], config)]
        return {"played": best, "end": numbers}

    def back_propagate(self, state: State) -> State:
        """Tell the positions on the way what came of it."""
        state["played"].add(float(is_solved(state["end"])))
        return {"rollouts": state["rollouts"] + 1}

    def is_over(self, state: State) -> bool:
        """Whether it is solved, or there is nothing left to try, or no budget."""
        return is_solved(state["end"]) or state["root"].is_dead or state["rollouts"] >= self.budget.rollouts

    async def reflect(self, state: State, config: RunnableConfig) -> State:
        """Have the model say what to do better, for the next round's choices."""
        value = state["end"][0].value
        side, cure = ("much", "(subtract|divide)") if value > GOAL else ("little", "(add|multiply)")
        tried = HumanMessage(f"You tried {formula(state['end'])}. Goal: {GOAL}.")
        # A small model keeps to the point if its opening is given.
        form = {"regex": rf"{value} is too {side}, so {cure} [a-z ]{{8,60}}\."}
        lesson = await self.chat.ainvoke([*REFLECT, tried], config, seed=self.seed(), structured_outputs=form)
        return {"lessons": [*state["lessons"], lesson.text]}

    async def choose(
        self, numbers: Numbers, choices: list[str], seed: int, lessons: list[str], config: RunnableConfig
    ) -> str:
        """The model's choice among moves; vLLM lets it say nothing else."""
        lesson = f"{lessons[-1]}\n" if lessons else ""
        messages = [*PLAY, HumanMessage(lesson + _position(numbers))]
        answer = await self.chat.ainvoke(messages, config, seed=seed, structured_outputs={"choice": choices})
        return answer.text

    def seed(self) -> int:
        """A seed for one call."""
        return self.rng.getrandbits(31)


class Outcome(NamedTuple):
    """What came of a search."""

    last: Numbers
    rollouts: int
    lessons: list[str]
    graph: ProgramGraph

    def sentence(self) -> str:
        rollouts = f"{self.rollouts} rollout{'s' if self.rollouts > 1 else ''}"
        if is_solved(self.last):
            return f"{formula(self.last)}, found after {rollouts}"
        return f"not solved in {rollouts}; the last was {formula(self.last)}"


@weft.program
async def solve(
    values: list[int], chat: ChatWeft, budget: Budget, rng: random.Random, program: weft.Program
) -> Outcome:
    """Search until the numbers make the goal, or the budget is spent."""
    search = TreeSearch(chat, budget, rng)
    begin = State(root=Node(start(values)), rollouts=0, lessons=[])
    steps = 6 * budget.rollouts  # of the graph; LangGraph has a limit
    config = cast("RunnableConfig", program.config(recursion_limit=steps + 1))
    end = await search.graph().ainvoke(begin, config)
    return Outcome(end["end"], end["rollouts"], end["lessons"], program.graph)


async def run(puzzles: dict[str, list[int]], *, model: str | None, budget: Budget, seed: int, picture: Path) -> None:
    """Start an engine, search all puzzles at once, and print what came of it and the process table."""
    with starting():
        # Few at once, so that programs compete; small blocks, so that the examples in front of each prompt are cached.
        engine = await weft.Engine.create(model, max_num_seqs=6, block_size=32, **QUICK)
    async with engine:
        chat = ChatWeft(engine=engine, temperature=0.7, max_tokens=40)
        with console.status("searching ..."):
            searches = (
                solve.options(name=name)(values, chat, budget, random.Random(f"{seed} {name}"))  # noqa: S311  no secret
                for name, values in puzzles.items()
            )
            outcomes = dict(zip(puzzles, await asyncio.gather(*searches), strict=True))
        for name, outcome in outcomes.items():
            tell(f"{name}: {outcome.sentence()}")
            for lesson in outcome.lessons[-1:]:
                tell(f"    its last reflection: {lesson}")
        smallest = min((outcome.graph for outcome in outcomes.values()), key=len)  # the others fill a wall
        finish(engine, smallest, picture)


def _numbers(puzzle: str) -> list[int]:
    words = puzzle.split()
    if not 2 <= len(words) <= 5 or not all(word.isdecimal() and int(word) <= 100 for word in words):
        raise typer.BadParameter(f"{puzzle!r} is no puzzle: give 2 to 5 whole numbers up to 100, such as '4 7 8 8'.")
    return [int(word) for word in words]


def main(
    puzzles: Annotated[list[str] | None, typer.Argument(help=f"Numbers to make {GOAL} of, e.g. '2 4 6 8'.")] = None,
    *,
    model: Model = None,
    width: Annotated[int, typer.Option(min=1, help="How many candidates are looked at in parallel.")] = 3,
    rollouts: Annotated[int, typer.Option(min=1, help="After how many rollouts a puzzle is given up.")] = 10,
    seed: Annotated[int, typer.Option(help="Of the search and of the model's sampling.")] = 0,
    picture: Picture = Path("mcts_langgraph.svg"),
) -> None:
    """Search the puzzles, and print what came of it and what it took."""
    wanted = {puzzle: _numbers(puzzle) for puzzle in puzzles or PUZZLES}
    play(run(wanted, model=model, budget=Budget(width, rollouts), seed=seed, picture=picture))


if __name__ == "__main__":
    typer.run(main)
