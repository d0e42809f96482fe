"""An AutoGen GraphFlow: a writer's text goes to three reviewers at once, and a summariser joins their reviews.

Run it with `python examples/graphflow_autogen.py`, or `--model Qwen/Qwen2.5-0.5B-Instruct`. What makes it a Weft
example is four lines: the engine, `@weft.program`, `WeftChatCompletionClient(engine)` and `bind_team(team, program)`.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Final

import typer
from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.messages import BaseChatMessage
from autogen_agentchat.teams import DiGraphBuilder, GraphFlow

import weft
from weft.examples._run import QUICK, Model, Picture, finish, play, tell
from weft.integrations.autogen import WeftChatCompletionClient, bind_team

SUBJECTS: Final = ("the lighthouse", "the night train")
REVIEWERS: Final = ("grammar", "style", "ending")


def make_team(engine: weft.Engine) -> GraphFlow:
    """Make a team of a writer, reviewers that work in parallel, and a summariser after them."""

    def agent(name: str, task: str, opening: str) -> AssistantAgent:
        """Make an agent. A model of 135 million parameters keeps to its task if its answer's opening is given."""
        form = {"regex": rf"{opening} [^.\n]{{20,80}}\."}
        client = WeftChatCompletionClient(
            engine, temperature=0, max_tokens=40, repetition_penalty=1.2, structured_outputs=form
        )
        return AssistantAgent(name, client, system_message=task)

    writer = agent("writer", "You write the first sentence of a story.", "It was night and")
    reviewers = [
        agent(name, f"You review the {name} of a text.", f"The {name} is (good|fair|weak), because")
        for name in REVIEWERS
    ]
    summariser = agent("summariser", "You sum up what the reviewers said.", "All in all,")
    graph = DiGraphBuilder()
    for node in (writer, *reviewers, summariser):
        graph.add_node(node)
    for reviewer in reviewers:
        graph.add_edge(writer, reviewer).add_edge(reviewer, summariser)
    return GraphFlow([writer, *reviewers, summariser], graph=graph.build())


@weft.program
async def review(subject: str, engine: weft.Engine, program: weft.Program) -> tuple[list[str], weft.Program]:
    """Have the team write and review a text.

    Returns:
        The messages, and the program, for its graph.
    """
    team = bind_team(make_team(engine), program)
    result = await team.run(task=f"A story about {subject}.")
    messages = [message for message in result.messages[1:] if isinstance(message, BaseChatMessage)]
    return [f"{message.source:11} {' '.join(message.to_text().split())}" for message in messages], program


async def run(model: str | None, picture: Path) -> None:
    """Start an engine, run a review for each subject at once, and print the reviews and the process table."""
    engine = await weft.Engine.create(model, max_num_seqs=4, **QUICK)
    async with engine:
        reviews = await asyncio.gather(*(review.options(name=subject)(subject, engine) for subject in SUBJECTS))
        for subject, (lines, _) in zip(SUBJECTS, reviews, strict=True):
            tell(f"\n{subject}", style="bold")
            for line in lines:
                tell(f"  {line}")
        _, first = reviews[0]
        finish(engine, first.graph, picture)


def main(model: Model = None, picture: Picture = Path("graphflow_autogen.svg")) -> None:
    """Run the reviews, and print them and the process table."""
    play(run(model, picture))


if __name__ == "__main__":
    typer.run(main)
