"""An AutoGen GraphFlow: a writer's text goes to three reviewers at once, and a summariser joins what they say.

Run it with `python examples/graphflow_autogen.py`, or `--model Qwen/Qwen2.5-0.5B-Instruct`. What makes it a Weft
example is four lines: the engine, `@weft.program`, `WeftChatCompletionClient(engine)` and `bind_team(team, program)`.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Annotated, Final

import typer
from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.messages import BaseChatMessage
from autogen_agentchat.teams import DiGraphBuilder, GraphFlow
from rich.console import Console

import weft
from weft.console import process_table
from weft.graph_view import save
from weft.integrations.autogen import WeftChatCompletionClient, bind_team

SUBJECTS: Final = ("the lighthouse", "the night train")
REVIEWERS: Final = ("grammar", "style", "ending")


def make_team(engine: weft.Engine) -> GraphFlow:
    """A writer, reviewers beside each other, and a summariser after them."""

    def agent(name: str, task: str, opening: str) -> AssistantAgent:
        """An agent. A model of 135 million parameters keeps to its task if the opening of its answer is given."""
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
    """Have a text written and reviewed.

    Returns:
        What was said, and the program, for its graph.
    """
    team = bind_team(make_team(engine), program)
    result = await team.run(task=f"A story about {subject}.")
    messages = [message for message in result.messages[1:] if isinstance(message, BaseChatMessage)]
    return [f"{message.source:11} {' '.join(message.to_text().split())}" for message in messages], program


async def run(model: str | None, picture: Path, console: Console) -> None:
    """Start an engine, have all subjects written about at once, and print the reviews and the process table."""
    with console.status("starting vLLM (half a minute to a minute) ..."):
        engine = await weft.Engine.create(
            model,
            max_num_seqs=4,
            max_model_len=2048,
            enforce_eager=True,  # a slower step for a quicker start
            use_tqdm_on_load=False,
        )
    async with engine:
        reviews = await asyncio.gather(*(review.options(name=subject)(subject, engine) for subject in SUBJECTS))
        for subject, (said, _) in zip(SUBJECTS, reviews, strict=True):
            console.print(f"\n[bold]{subject}[/]")
            for line in said:
                console.print(f"  {line}", markup=False, highlight=False, soft_wrap=True)
        console.print()
        console.print(process_table(engine.table))
        _, first = reviews[0]
        save(first.graph, picture)
        console.print(f"graph of the first program: {picture}", highlight=False)


def main(
    model: Annotated[str | None, typer.Option(help="A folder in Hugging Face format, or a hub name.")] = None,
    picture: Annotated[Path, typer.Option(help="Graph to draw: .svg, .png, .mmd, .dot.")] = Path(
        "graphflow_autogen.svg"
    ),
) -> None:
    """Have the texts reviewed, and print what was said and what it took."""
    # This is a program of its own, so it may quiet the libraries; `VLLM_LOGGING_LEVEL=INFO` brings vLLM's log back.
    os.environ.setdefault("VLLM_CONFIGURE_LOGGING", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "CRITICAL")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    os.environ.setdefault("TORCH_LOGS", "-torch._library")
    os.environ.setdefault("PYTHONWARNINGS", "ignore")
    asyncio.run(run(model, picture, Console()))


if __name__ == "__main__":
    typer.run(main)
