"""Language agent tree search (LATS) over the game of 24, as a LangGraph graph; three puzzles at once on one engine.

Run it with `python examples/mcts_langgraph.py`, or add puzzles of your own: `"2 4 6 8" "1 5 5 5"`. What makes it a
Weft example is four lines: the engine, `@weft.program`, `ChatWeft(engine=...)` and `config=program.config()`.

A round of the search has the steps select, expand, evaluate, simulate, back-propagate and reflect. The game offers the
legal moves. The model chooses among them (structured output allows nothing else), estimates the value of positions,
plays them to the end, and reflects on what went wrong. Code keeps the tree and checks the arithmetic. A model of 135
million parameters finds the last move of a game, but judges positions no better than chance. The search compensates
for that.
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
from weft.examples._run import QUICK, Model, Picture, console, finish, play, tell
from weft.examples._search import GOAL, Node, Numbers, formula, is_solved, moves, start
from weft.integrations.langchain import ChatWeft

PUZZLES: Final = ["4 4 4 6", "1 2 3 4", "4 7 8 8"]  # easy ones first, so that short and long programs compete

VALUES: Final = {"sure": 0.9, "likely": 0.5, "impossible": 0.1}


class Judgement(BaseModel):
    """The model's judgement of a position. vLLM constrains the output to this form."""

    chance: Literal["sure", "likely", "impossible"]


def _position(numbers: Numbers) -> str:
    return f"Numbers: {' '.join(str(number.value) for number in numbers)}. Goal: {GOAL}."


def _examples(system: str, *pairs: tuple[str, str]) -> list[BaseMessage]:
    messages: list[BaseMessage] = [SystemMessage(system)]
    for given, answer in pairs:
        messages += [HumanMessage(given), AIMessage(answer)]
    return messages


# A move begins with its result, because a small model finds a result that it wants more easily than a way to it.
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
    """Join the results of parallel tasks; None empties the list."""
    return [] if more is None else before + more


class State(TypedDict, total=False):
    """The state that the steps of the search pass on."""

    root: Node
    leaf: Node  # the position to expand
    children: Annotated[list[Node], _collect]  # of this round
    played: Node  # the child from which the game was played to its end
    end: Numbers  # the number that was left at the end
    rollouts: int
    lessons: list[str]


class Hand(TypedDict):
    """The moves among which the model chooses one."""

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

    width: int  # positions that one expansion adds, in parallel
    rollouts: int  # games played to their end before the search gives up


class TreeSearch:
    """The steps of the search, each a node of the graph.

    Args:
        chat: The model that plays, judges and reflects.
        budget: How much to search.
        rng: Shuffles moves and seeds the model's sampling.
    """

    def __init__(self, chat: ChatWeft, budget: Budget, rng: random.Random) -> None:
        self.chat = chat
        self.judge = chat.with_structured_output(Judgement)
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
        """Select the position to expand, and divide its moves into hands."""
        leaf = state["root"].select(self.budget.width)
        hands = [
            Send("expand", Hand(leaf=leaf, choices=choices, seed=self.seed(), lessons=state["lessons"]))
            for choices in leaf.deal(self.budget.width, self.rng)
        ]
        return Command(update={"leaf": leaf, "children": None}, goto=hands)

    async def expand(self, state: Hand, config: RunnableConfig) -> Command[Literal["evaluate"]]:
        """Have the model choose one move of a hand. This step runs in parallel, once for each hand."""
        leaf = state["leaf"]
        move = await self.choose(leaf.numbers, state["choices"], state["seed"], state["lessons"], config)
        return Command(goto=Send("evaluate", Candidate(child=leaf.child(move), seed=state["seed"])))

    async def evaluate(self, state: Candidate, config: RunnableConfig) -> State:
        """Have the model judge a new position. This step runs in parallel, once for each position."""
        child = state["child"]
        if len(child.numbers) == 1:  # the game is over
            child.add(float(is_solved(child.numbers)))
        else:
            question = HumanMessage(_position(child.numbers))
            judgement = await self.judge.ainvoke([*JUDGE, question], config, seed=state["seed"])
            child.add(VALUES[cast("Judgement", judgement).chance])
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
        """Add the result of the game to all positions that led to it."""
        state["played"].add(float(is_solved(state["end"])))
        return {"rollouts": state["rollouts"] + 1}

    def is_over(self, state: State) -> bool:
        """Whether the puzzle is solved, no move is left to try, or the budget is spent."""
        return is_solved(state["end"]) or state["root"].is_dead or state["rollouts"] >= self.budget.rollouts

    async def reflect(self, state: State, config: RunnableConfig) -> State:
        """Have the model say what to do better. The next round's prompts contain its sentence."""
        value = state["end"][0].value
        side, cure = ("much", "(subtract|divide)") if value > GOAL else ("little", "(add|multiply)")
        tried = HumanMessage(f"You tried {formula(state['end'])}. Goal: {GOAL}.")
        # A small model keeps to the point if the opening of its answer is given.
        form = {"regex": rf"{value} is too {side}, so {cure} [a-z ]{{8,60}}\."}
        lesson = await self.chat.ainvoke([*REFLECT, tried], config, seed=self.seed(), structured_outputs=form)
        return {"lessons": [*state["lessons"], lesson.text]}

    async def choose(
        self, numbers: Numbers, choices: list[str], seed: int, lessons: list[str], config: RunnableConfig
    ) -> str:
        """Have the model choose one of some moves. vLLM constrains the output to these."""
        lesson = f"{lessons[-1]}\n" if lessons else ""
        messages = [*PLAY, HumanMessage(lesson + _position(numbers))]
        answer = await self.chat.ainvoke(messages, config, seed=seed, structured_outputs={"choice": choices})
        return answer.text

    def seed(self) -> int:
        """Draw the seed of one call."""
        return self.rng.getrandbits(31)


class Outcome(NamedTuple):
    """The result of a search."""

    last: Numbers
    rollouts: int
    lessons: list[str]
    graph: ProgramGraph

    def sentence(self) -> str:
        """The result in words."""
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
    steps = 6 * budget.rollouts  # LangGraph limits the steps of a graph.
    config = program.config(recursion_limit=steps + 1)
    end = await search.graph().ainvoke(begin, config)
    return Outcome(end["end"], end["rollouts"], end["lessons"], program.graph)


async def run(puzzles: dict[str, list[int]], *, model: str | None, budget: Budget, seed: int, picture: Path) -> None:
    """Start an engine, search all puzzles at once, and print the results and the process table."""
    # Few calls run at once, so that programs compete. Blocks are small, so that the examples at the beginning of
    # each prompt are cached.
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
        smallest = min((outcome.graph for outcome in outcomes.values()), key=len)  # the others are too large to print
        finish(engine, smallest, picture)


def _numbers(puzzle: str) -> list[int]:
    words = puzzle.split()
    if not 2 <= len(words) <= 5 or not all(word.isdecimal() and int(word) <= 100 for word in words):
        raise typer.BadParameter(f"{puzzle!r} is not a puzzle: give 2 to 5 whole numbers up to 100, such as '4 7 8 8'.")
    return [int(word) for word in words]


def main(
    puzzles: Annotated[list[str] | None, typer.Argument(help=f"Numbers to make {GOAL} of, e.g. '2 4 6 8'.")] = None,
    *,
    model: Model = None,
    width: Annotated[int, typer.Option(min=1, help="Positions that one expansion adds, in parallel.")] = 3,
    rollouts: Annotated[int, typer.Option(min=1, help="Rollouts after which the search gives up.")] = 10,
    seed: Annotated[int, typer.Option(help="The seed of the search and of the model's sampling.")] = 0,
    picture: Picture = Path("mcts_langgraph.svg"),
) -> None:
    """Search the puzzles, and print the results and the process table."""
    wanted = {puzzle: _numbers(puzzle) for puzzle in puzzles or PUZZLES}
    play(run(wanted, model=model, budget=Budget(width, rollouts), seed=seed, picture=picture))


if __name__ == "__main__":
    typer.run(main)
