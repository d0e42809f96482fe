"""Debates between AutoGen agents, several at once: one agent for, one against, and a judge after each round.

Run it with `python examples/debate_autogen.py`, or `--model Qwen/Qwen2.5-0.5B-Instruct`. What makes it a Weft example
is four lines: the engine, `@weft.program`, `WeftChatCompletionClient(engine)` and `bind_team(team, program)`.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Final, Literal

import typer
from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.messages import BaseChatMessage, StructuredMessage
from autogen_agentchat.teams import RoundRobinGroupChat
from pydantic import BaseModel

import weft
from weft.examples._run import QUICK, Model, Picture, finish, play, tell
from weft.integrations.autogen import WeftChatCompletionClient, bind_team

# The motions, and how many rounds each is debated. The engine has two slots, so the debates compete, and the short ones
# go before the long one.
MOTIONS: Final = {"Cities should ban cars": 3, "Homework helps children": 1, "Tea is better than coffee": 1}


class Verdict(BaseModel):
    """The judge's answer. vLLM constrains the output to this form."""

    winner: Literal["pro", "contra"]
    by: Literal["a little", "a lot"]


def make_team(engine: weft.Engine, rounds: int) -> RoundRobinGroupChat:
    """Make a team of two debaters and a judge, who speak in turn."""

    def client(opening: str | None = None) -> WeftChatCompletionClient:
        """Make a client for one agent. A model of 135 million parameters keeps to its side if its opening is given."""
        form = {"regex": rf"{opening}, because [^.\n]{{20,80}}\."} if opening else None
        return WeftChatCompletionClient(
            engine, temperature=0, max_tokens=40, repetition_penalty=1.2, structured_outputs=form
        )

    pro = AssistantAgent("pro", client("Yes"), system_message="You are for it. Give a reason.")
    contra = AssistantAgent("contra", client("No"), system_message="You are against it. Give a reason.")
    judge = AssistantAgent("judge", client(), system_message="Judge who argues better.", output_content_type=Verdict)
    members = [pro, contra, judge]
    return RoundRobinGroupChat([*members], max_turns=3 * rounds, custom_message_types=[StructuredMessage[Verdict]])


@weft.program
async def debate(motion: str, engine: weft.Engine, program: weft.Program) -> tuple[list[str], weft.Program]:
    """Debate a motion.

    Returns:
        The lines of the debate, and the program, for its graph.
    """
    team = bind_team(make_team(engine, MOTIONS[motion]), program)
    result = await team.run(task=f"{motion}. Yes or no?")
    messages = [message for message in result.messages[1:] if isinstance(message, BaseChatMessage)]
    return [f"{message.source:7} {' '.join(message.to_text().split())}" for message in messages], program


async def run(model: str | None, picture: Path) -> None:
    """Start an engine, hold the debates at once, and print them and the process table."""
    engine = await weft.Engine.create(model, max_num_seqs=2, **QUICK)  # few slots, so programs compete
    async with engine:
        debates = await asyncio.gather(*(debate.options(name=motion)(motion, engine) for motion in MOTIONS))
        for motion, (lines, _) in zip(MOTIONS, debates, strict=True):
            tell(f"\n{motion}", style="bold")
            for line in lines:
                tell(f"  {line}")
        _, longest = debates[0]
        finish(engine, longest.graph, picture)


def main(model: Model = None, picture: Picture = Path("debate_autogen.svg")) -> None:
    """Hold the debates, and print them and the process table."""
    play(run(model, picture))


if __name__ == "__main__":
    typer.run(main)
