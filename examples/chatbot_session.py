"""A chatbot with two users at once: each has one session of many turns, and each turn is a program.

Run it with `python examples/chatbot_session.py`, or `--model Qwen/Qwen2.5-0.5B-Instruct`. What makes it a Weft example
is four lines: the engine, `@weft.program`, `ChatWeft(engine=...)` and `answer.options(session_id=...)`.

A turn is a reply, followed by two calls in parallel that suggest what the user might ask next. All three calls begin
with the conversation so far, so most of their prompts is in vLLM's prefix cache. A table shows how much.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple, cast

import typer
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage
from langchain_core.runnables import RunnableParallel
from rich import box
from rich.table import Table

import weft
from weft.core.program.graph import ProgramGraph
from weft.examples._run import QUICK, Model, Picture, console, finish, play, tell
from weft.integrations.langchain import ChatWeft

# The users' questions, one for each turn. Ben begins later, while Ada's session goes on.
USERS: Final = {
    "Ada": [
        "I would like to grow tomatoes on my balcony. Where do I begin?",
        "How often should I water them?",
        "What can I plant next to them?",
        "When are they ripe?",
    ],
    "Ben": [
        "I want to learn the guitar. How do I begin?",
        "How long should I practise each day?",
        "Do I need a teacher?",
    ],
}
LATER_S: Final = 2.0

SYSTEM: Final = "You are a friendly assistant who answers in one short sentence."
NEXT: Final = HumanMessage("Write a question that I could ask you next.")
# vLLM constrains the output to these forms. A model of 135 million parameters would answer instead of asking.
NEXT_FORMS: Final = {"how": r"How do I [a-z ]{8,80}\?", "why": r"Why should I [a-z ]{8,80}\?"}


class Turn(NamedTuple):
    """The result of a turn."""

    question: str
    reply: AIMessage
    suggestions: list[str]  # questions that the user might ask next
    prompt_tokens: int  # of all three calls
    cached_tokens: int  # prompt tokens that were in the prefix cache
    graph: ProgramGraph


def _account(message: AIMessage) -> dict[str, Any]:
    """The account of the call that generated a message."""
    return cast("dict[str, Any]", message.response_metadata["weft"][0])


@weft.program
async def answer(conversation: list[BaseMessage], chat: ChatWeft, program: weft.Program) -> Turn:
    """One turn: reply to the last message of a conversation, and suggest questions to ask next."""
    config = program.config()
    reply = await chat.with_config(run_name="reply").ainvoke(conversation, config)
    suggest = RunnableParallel(
        {
            word: chat.bind(structured_outputs={"regex": form}).with_config(run_name=f"suggest {word}")
            for word, form in NEXT_FORMS.items()
        }
    )
    suggested = await suggest.ainvoke([*conversation, reply, NEXT], config)
    accounts = [_account(message) for message in (reply, *suggested.values())]
    return Turn(
        question=conversation[-1].text,
        reply=reply,
        suggestions=[message.text for message in suggested.values()],
        prompt_tokens=sum(account["prompt_tokens"] for account in accounts),
        cached_tokens=sum(account["cached_tokens"] for account in accounts),
        graph=program.graph,
    )


async def talk(user: str, questions: list[str], chat: ChatWeft) -> list[Turn]:
    """Hold a session: one turn after another, each with the whole conversation before it."""
    conversation: list[BaseMessage] = [SystemMessage(SYSTEM)]
    turns: list[Turn] = []
    for number, question in enumerate(questions, 1):
        conversation.append(HumanMessage(question))
        turn = await answer.options(name=f"{user} {number}", session_id=f"chat-{user}")(conversation, chat)
        conversation.append(turn.reply)
        turns.append(turn)
    return turns


def cache_table(sessions: dict[str, list[Turn]]) -> Table:
    """Make a table of the prompt tokens that each turn found in the prefix cache."""
    view = Table(title="prefix cache", title_justify="left", box=box.SIMPLE_HEAD, padding=0)
    view.add_column("turn")
    for heading in ("prompt tokens", "cached", "share"):
        view.add_column(heading, justify="right")
    for user, turns in sessions.items():
        for number, turn in enumerate(turns, 1):
            share = turn.cached_tokens / turn.prompt_tokens
            view.add_row(f"{user} {number}", str(turn.prompt_tokens), str(turn.cached_tokens), f"{share:.0%}")
    return view


async def run(model: str | None, turns: int | None, picture: Path) -> None:
    """Start an engine, hold both sessions at once, and print the conversations and the tables."""
    # Few calls run at once, so that programs compete. Blocks are small, since only whole blocks are cached.
    engine = await weft.Engine.create(model, max_num_seqs=2, block_size=32, **QUICK)
    async with engine:
        # An answer is one sentence, with its full stop.
        sentence = {"include_stop_str_in_output": True}
        chat = ChatWeft(engine=engine, temperature=0, max_tokens=32, stop=[". ", "? ", "\n"], model_kwargs=sentence)

        async def visit(user: str, later_s: float) -> list[Turn]:
            await asyncio.sleep(later_s)
            return await talk(user, USERS[user][:turns], chat)

        with console.status("talking ..."):
            visits = (visit(user, number * LATER_S) for number, user in enumerate(USERS))
            sessions = dict(zip(USERS, await asyncio.gather(*visits), strict=True))
        for user, held in sessions.items():
            tell(f"\n{user}", style="bold")
            for turn in held:
                tell(f"  {turn.question}")
                tell(f"    {' '.join(turn.reply.text.split())}", style="italic")
                tell(f"      suggested: {' '.join(turn.suggestions)}", style="dim")
        console.print()
        console.print(cache_table(sessions))
        finish(engine, sessions["Ada"][-1].graph, picture)


def main(
    *,
    model: Model = None,
    turns: Annotated[int | None, typer.Option(min=1, help="Turns of a session, at most (default: all).")] = None,
    picture: Picture = Path("chatbot_session.svg"),
) -> None:
    """Hold the sessions, and print the conversations, the prefix cache and the process table."""
    play(run(model, turns, picture))


if __name__ == "__main__":
    typer.run(main)
