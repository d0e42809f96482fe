"""The LangChain and OpenAI examples as users run them, and their parts that need no engine."""

from __future__ import annotations

import random
import re
import runpy
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import pytest
import typer
from background import ROOT, CommandResult
from scripts_on_one_engine import on_one_engine, printed_by

pytest.importorskip("langgraph", reason="the LangChain extra is not installed")

from langchain_core.callbacks import CallbackManagerForLLMRun
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.runnables import RunnableLambda

import weft
from weft.examples import chatbot_session, map_reduce_langchain, mcts_langgraph, react_langchain
from weft.examples._search import Node, formula, is_solved, moves, start
from weft.examples.react_langchain import Task, Turn
from weft.integrations.langchain import ChatWeft
from weft.testing import Reply, ScriptedEngine

EXAMPLES = ROOT / "examples"
NAMES = ("mcts_langgraph", "map_reduce_langchain", "chatbot_session", "openai_sdk")


def check_solutions(printed: str) -> int:
    """Check every printed solution, and return how many there are."""
    found = re.findall(r"^([\d ]+): (.+) = 24, found after \d+ rollouts?$", printed, flags=re.MULTILINE)
    for puzzle, solution in found:
        assert sorted(re.findall(r"\d+", solution)) == sorted(puzzle.split())
        assert re.fullmatch(r"[\d()+*/ -]+", solution)
        assert eval(solution) == 24  # noqa: S307  digits, signs and brackets only
    return len(found)


class Dice(BaseChatModel):
    """A model in place of `ChatWeft` that chooses at random. `last_move` says how it treats a winning move."""

    last_move: Literal["seen", "not seen", "avoided"]

    @property
    def _llm_type(self) -> str:
        return "dice"

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        *,
        structured_outputs: dict[str, Any],
        seed: int = 0,
        **_more: Any,
    ) -> ChatResult:
        choices = structured_outputs.get("choice", [structured_outputs.get("regex")])
        winning = [choice for choice in choices if choice.startswith("24 =")]
        others = [choice for choice in choices if choice not in winning]
        preferred = {"seen": winning, "not seen": choices, "avoided": others}[self.last_move]
        text = random.Random(seed).choice(preferred or choices)
        return ChatResult(generations=[ChatGeneration(message=AIMessage(text))])

    def with_structured_output(self, schema: Any, **_more: Any) -> Any:
        def judge(_messages: list[BaseMessage], seed: int) -> Any:
            return schema(chance=random.Random(seed).choice(["sure", "likely", "impossible"]))

        return RunnableLambda(judge)


async def search(
    puzzle: str, rollouts: int, seed: int, last_move: Literal["seen", "not seen", "avoided"] = "seen"
) -> mcts_langgraph.Outcome:
    """Search with `Dice` in place of a model."""
    values = [int(word) for word in puzzle.split()]
    dice: Any = Dice(last_move=last_move)
    return await mcts_langgraph.solve(values, dice, mcts_langgraph.Budget(3, rollouts), random.Random(seed))


# -- without an engine


def test_the_moves_of_the_game() -> None:
    """The moves are the sums, differences, products and whole quotients of all pairs, once each and not negative."""
    assert list(moves(start([3, 8]))) == ["11 = 8 + 3", "5 = 8 - 3", "24 = 8 * 3"]
    assert list(moves(start([2, 6]))) == ["8 = 6 + 2", "4 = 6 - 2", "12 = 6 * 2", "3 = 6 / 2"]
    assert list(moves(start([0, 5]))) == ["5 = 5 + 0", "5 = 5 - 0", "0 = 5 * 0"]
    assert len(moves(start([1, 2, 4]))) == 12
    assert len(moves(start([7, 7, 7]))) == 4


def test_a_solution_says_how_it_came_about() -> None:
    """The last number carries the formula that made it."""
    last = moves(moves(start([1, 2, 4]))["8 = 4 * 2"])["8 = 8 / 1"]
    assert formula(last) == "(4 * 2) / 1 = 8"
    assert not is_solved(last)
    assert is_solved(moves(start([4, 6]))["24 = 6 * 4"])
    assert not is_solved(start([24, 1]))


def test_the_deal_is_complete() -> None:
    """The hands together hold all untried moves, no hand is empty, and a seed gives the same deal."""
    node = Node(start([1, 2, 4]))
    hands = node.deal(5, random.Random(1))
    assert sorted(move for hand in hands for move in hand) == sorted(moves(node.numbers))
    assert hands == node.deal(5, random.Random(1)) != node.deal(5, random.Random(2))
    assert [len(hand) for hand in Node(start([3, 8])).deal(5, random.Random(1))] == [1, 1, 1]


def test_selection_goes_where_rollouts_went_well() -> None:
    """UCT prefers the child with the higher mean value, until that child has many more visits."""
    root = Node(start([2, 3, 4]))
    good, bad = root.children = [root.child("6 = 3 * 2"), root.child("1 = 3 - 2")]
    good.add(0.9)
    bad.add(0.1)
    assert root.select(width=2) is good
    for _ in range(3):
        good.add(0.0)
    assert bad.uct > good.uct
    assert root.visits == 5
    assert root.total == pytest.approx(1.0)


def test_selection_widens_and_leaves_dead_ends() -> None:
    """A position that is visited often gets more children. A position without untried moves is never selected."""
    root = Node(start([2, 3, 4]))
    only = root.child("6 = 3 * 2")
    root.children = [only]
    only.add(0.5)
    assert root.select(width=1) is only
    for _ in range(9):
        only.add(0.5)
    assert root.select(width=1) is root
    only.untried.clear()
    assert only.is_dead
    assert not root.is_dead
    assert root.select(width=1) is root


@pytest.mark.anyio
@pytest.mark.parametrize("seed", range(5))
async def test_the_search_solves(seed: int) -> None:
    """With a player that recognises only the last move, the search finds a correct solution."""
    outcome = await search("4 4 4 6", rollouts=20, seed=seed)
    assert check_solutions(f"4 4 4 6: {outcome.sentence()}") == 1
    assert len(outcome.lessons) == outcome.rollouts - 1


@pytest.mark.anyio
async def test_a_reflection_knows_what_went_wrong() -> None:
    """The form of a reflection begins with the result, whether it is above or below 24, and what to do about that."""
    lessons = [*(await search("1 1 1 1", 3, seed=0)).lessons, *(await search("9 9 9 9", 8, seed=0)).lessons]
    form = r"(\d+) is too (much|little), so \((subtract\|divide|add\|multiply)\) \[a-z ].*"
    matches = [re.fullmatch(form, lesson) for lesson in lessons]
    sides = [(int(match[1]) > 24, match[2], match[3]) for match in matches if match]
    assert len(sides) == len(lessons)
    assert set(sides) == {(True, "much", "subtract|divide"), (False, "little", "add|multiply")}


@pytest.mark.anyio
@pytest.mark.parametrize("puzzle", ["2 3 4", "5 8 8"])
async def test_three_numbers_are_searched_through(puzzle: str) -> None:
    """A player that avoids the last move makes it in the end, since no move is tried twice from a position."""
    outcome = await search(puzzle, rollouts=30, seed=0, last_move="avoided")
    assert is_solved(outcome.last)
    assert outcome.rollouts > 1


@pytest.mark.anyio
async def test_the_search_gives_up() -> None:
    """Without a solution, the search ends when its budget is spent or every move has been tried."""
    outcome = await search("1 1 1 1", rollouts=4, seed=0)
    assert outcome.rollouts == 4
    assert outcome.sentence().startswith("not solved in 4 rollouts; the last was ")
    everything = await search("1 1", rollouts=100, seed=0)
    assert everything.rollouts < 10
    assert len(everything.lessons) == everything.rollouts - 1


@pytest.mark.anyio
async def test_a_seed_repeats_a_search() -> None:
    """The same seed and the same model output give the same search."""
    one, other, third = [await search("4 7 8 8", rollouts=8, seed=seed) for seed in (1, 1, 2)]
    assert one.sentence() == other.sentence() != third.sentence()


@pytest.mark.parametrize("text", [*map_reduce_langchain.DOCUMENTS.values(), "word " * 500, "x" * 999])
def test_a_text_is_split_without_loss(text: str) -> None:
    """The parts contain all words in order, and no part is too long."""
    parts = map_reduce_langchain.split(text)
    assert "".join("".join(parts).split()) == "".join(text.split())
    assert max(map(len, parts)) <= map_reduce_langchain.PART


@pytest.mark.engine
@pytest.mark.parametrize("name", NAMES)
def test_a_mistake_gives_one_line(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A model that does not exist gives exit code 1 and one sentence, without a traceback."""
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--model", str(tmp_path / "nowhere")])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    assert ended.value.code == 1
    assert re.fullmatch(r"error: model '.*nowhere' cannot be loaded: .*\n", capfd.readouterr().err)


@pytest.mark.parametrize("puzzle", ["", "24", "1 2 3 x", "1 2 3 4 5 6", "1 2 1000", "1 -2"])
def test_a_bad_puzzle_is_refused(puzzle: str) -> None:
    """A puzzle that is not a list of a few whole numbers is a usage error."""
    with pytest.raises(typer.BadParameter, match="is not a puzzle"):
        mcts_langgraph._numbers(puzzle)


# -- the demo, without an engine

DEMO_TASKS = {"long": Task(0, ["?", "?", "?"]), "short": Task(100, ["?"]), "brief": Task(200, ["?", "?"])}


def turn(long_tokens: int, short_tokens: int, brief_tokens: int, token_s: float = 0.01) -> Turn:
    tokens = {"long": long_tokens, "short": short_tokens, "brief": brief_tokens}
    return Turn({}, tokens, {name: 1.5 * count * token_s for name, count in tokens.items()}, token_s)


def printed_summary(tasks: dict[str, Task], turns: dict[str, Turn]) -> str:
    return "\n\n".join(map(str, react_langchain.summary(tasks, turns)))


def test_the_demo_compares_tokens_and_ends_in_a_verdict() -> None:
    """The tables have the means of the short programs and of the long ones, and the last line says what changed."""
    printed = printed_summary(DEMO_TASKS, {"fcfs": turn(800, 400, 600), "auto": turn(880, 150, 250, token_s=0.0119)})
    rows = [line.split(": ")[1].split() for line in printed.splitlines() if "questions: " in line or "than 2: " in line]
    assert rows == [["2", "500", "200"], ["1", "800", "880"], ["2", "7.5", "3.6"], ["1", "12.0", "15.7"]]
    assert printed.splitlines()[-1] == (
        "Under auto, the short programs end after 60% fewer tokens, and the long programs end after 10% more tokens, "
        "compared with fcfs, vLLM's own order."
    )


def test_on_a_busy_machine_the_demo_compares_no_seconds() -> None:
    """If a token cost more than 20 % more in one turn, a line says so in place of the seconds; the verdict stays."""
    printed = printed_summary(DEMO_TASKS, {"fcfs": turn(800, 400, 600), "auto": turn(810, 400, 610, token_s=0.0121)})
    assert "seconds from" not in printed
    assert "The machine was busy: a token cost 0.010 s under fcfs and 0.012 s under auto." in printed
    assert printed.splitlines()[-1].startswith("Under auto, the short programs end after about as many tokens, and ")


def test_the_demo_of_one_policy_or_of_long_programs_only() -> None:
    """With one policy there is no verdict, and a group without programs has no row."""
    long = {"long": DEMO_TASKS["long"]}
    assert "Under" not in printed_summary(DEMO_TASKS, {"fcfs": turn(8, 4, 6)})
    printed = printed_summary(long, {"fcfs": turn(800, 0, 0), "auto": turn(400, 0, 0)})
    assert "short" not in printed
    assert "Under auto, the long programs end after 50% fewer tokens, compared" in printed


def tool_then_answer(body: Mapping[str, Any]) -> Reply:
    """A call of a tool, then an answer of 40 tokens."""
    if body["messages"][-1]["role"] == "tool":
        return Reply("word " * 39 + "word")
    return Reply(tool_calls=[("lookup", {"topic": "Nile"})])


@pytest.mark.anyio
async def test_programs_of_the_demo_start_by_the_tokens_of_the_others() -> None:
    """A program that is to start after 100 tokens makes its first call when so many are written, however long that
    takes; one that waits for more tokens than there are starts when all others have ended."""
    tasks = {"last": Task(10**9, ["?"]), "late": Task(100, ["?"]), "long": Task(0, ["?"] * 4)}
    with ScriptedEngine(tool_then_answer) as engine:
        took = await react_langchain.play_turn(engine, tasks)
        by_id = {row.info.program_id: row.info.name for row in engine.table.ended()}
        names = [by_id[call.program_id] for call in engine.calls]
    assert names[-2:] == ["last", "last"]
    assert names[: names.index("late")].count("long") >= 6, "three answers of 40 tokens, with the calls of their tools"
    assert took.took_tokens["last"] == 41
    assert 41 <= took.took_tokens["late"] <= 82
    assert took.took_tokens["long"] >= 4 * 41
    assert [*took.answers] == ["long", "late", "last"]


# -- on the tests' engine


@pytest.mark.engine
@pytest.mark.anyio
async def test_the_graph_of_map_and_reduce(engine: weft.Engine) -> None:
    """The graph has eight parts in parallel, two groups of four summaries, and one call that joins the groups. The
    code waits for all parts before it makes a group, so those of the other group are guesses."""
    text = map_reduce_langchain.DOCUMENTS["harbour"]
    summary = await map_reduce_langchain.summarise(text, ChatWeft(engine=engine, temperature=0, max_tokens=24))
    calls = summary.graph.calls
    assert [call.label for call in calls] == ["map"] * 8 + ["reduce"] * 3
    ids = [call.call_id for call in calls]
    parents = [[ids.index(edge.parent) for edge in call.parents if edge.exact] for call in calls]
    assert parents == [[]] * 8 + [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert len(summary.graph.threads) == 8
    assert summary.parts == 8


@pytest.mark.engine
@pytest.mark.anyio
async def test_the_session_of_a_chat(engine: weft.Engine) -> None:
    """Each turn is a program of the user's session, its reply forks into two suggestions, and the prefix is cached."""
    chat = ChatWeft(engine=engine, temperature=0, max_tokens=16)
    turns = await chatbot_session.talk("Eve", ["Hello, who are you?", "And what can you do?"], chat)
    rows = [row for row in engine.table.ended() if row.info.session_id == "chat-Eve"]
    rows.sort(key=lambda row: row.start_s)
    assert [row.info.name for row in rows] == ["Eve 1", "Eve 2"]
    for turn, row in zip(turns, rows, strict=True):
        reply, *more = turn.graph.calls
        assert reply.label == "reply"
        assert {call.label for call in more} == {"suggest how", "suggest why"}
        assert [[edge.parent for edge in call.parents] for call in more] == [[reply.call_id]] * 2
        assert turn.prompt_tokens == row.account.prompt_tokens
        assert turn.cached_tokens == row.account.cached_tokens
    assert turns[1].prompt_tokens > turns[0].prompt_tokens


# -- whole examples


@pytest.mark.engine
@on_one_engine
def test_tree_search_runs(command_result: CommandResult) -> None:
    """Two puzzles are two programs, and the picture shows the steps of the search."""
    printed = printed_by(command_result, "mcts_langgraph")
    names = ["1 1 1 1", "1 1 1 2"]
    assert [row.split("  ")[0].strip() for row in printed.finished(*names)] == names
    assert printed.text.count(": not solved in 2 rollouts; the last was ") == 2
    assert printed.text.count("    its last reflection: ") == 2
    assert {"expand", "evaluate", "simulate", "reflect", "thread 2"} <= printed.words


@pytest.mark.engine
@on_one_engine
def test_map_and_reduce_runs(command_result: CommandResult) -> None:
    """Two documents are two programs, each with a summary."""
    printed = printed_by(command_result, "map_reduce_langchain")
    assert [row.split()[0] for row in printed.finished("harbour", "orchard")] == ["harbour", "orchard"]
    assert "harbour, in 8 parts\n  " in printed.text
    assert "orchard, in 4 parts\n  " in printed.text
    assert {"map", "reduce", "thread 7"} <= printed.words


@pytest.mark.engine
@on_one_engine
def test_chat_runs(command_result: CommandResult) -> None:
    """Two users with three turns each are six programs, and every turn finds tokens in the prefix cache."""
    printed = printed_by(command_result, "chatbot_session")
    assert len(printed.finished("Ada ", "Ben ")) == 6
    shares = re.findall(r"^ *(?:Ada|Ben) \d +\d+ +\d+ +(\d+)% *$", printed.text, flags=re.MULTILINE)
    assert len(shares) == 6
    assert min(map(int, shares)) > 0
    assert {"reply", "suggest how", "suggest why", "thread 1"} <= printed.words


@pytest.mark.engine
@on_one_engine
def test_the_openai_agents_run(command_result: CommandResult) -> None:
    """Three questions are three programs. Each has a plan, two parallel lookups of two calls, and an answer."""
    printed = printed_by(command_result, "openai_sdk")
    assert printed.text.count("What are the capitals of") == 3
    # All three run at once, so each of them may be first.
    names = {"France, Japan", "Egypt, Peru", "Norway, Kenya"}
    assert {row.split("  ")[0].strip() for row in printed.finished(*names)} == names
    assert len(printed.finished(*names)) == 3
    assert {"thread 0", "thread 1"} <= printed.words


@pytest.mark.soak
@pytest.mark.engine
@pytest.mark.background(EXAMPLES / "mcts_langgraph.py", "--rollouts", "30", "2 3 4")
def test_tree_search_solves(command_result: CommandResult) -> None:
    """Thirty rollouts are enough to try every move, so the embedded model solves this puzzle on any machine."""
    assert check_solutions(command_result.printed()) == 1
