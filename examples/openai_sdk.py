"""An agent on the OpenAI SDK alone: it plans, looks up facts in parallel, and streams its answer.

Run it with `python examples/openai_sdk.py`, or `--model Qwen/Qwen2.5-0.5B-Instruct`. What makes it a Weft example is
three lines: the engine, `@weft.program`, and `weft.openai_client(engine, program)`.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, Final, Literal

import typer
from openai import pydantic_function_tool
from pydantic import BaseModel

import weft
from weft.core.program.graph import ProgramGraph
from weft.examples._run import QUICK, Model, Picture, finish, play, tell

# The facts of the lookup tool.
CAPITALS: Final = {
    "Egypt": "Cairo", "France": "Paris", "Japan": "Tokyo", "Kenya": "Nairobi", "Norway": "Oslo", "Peru": "Lima"
}  # fmt: skip
Country = Literal["Egypt", "France", "Japan", "Kenya", "Norway", "Peru"]

QUESTIONS: Final = {
    "France, Japan": "What are the capitals of France and Japan?",
    "Egypt, Peru": "What are the capitals of Egypt and Peru?",
    "Norway, Kenya": "What are the capitals of Norway and Kenya?",
}


class Plan(BaseModel):
    """The two countries that a question is about."""

    first: Country
    second: Country


class Lookup(BaseModel):
    """Find out what the capital of a country is."""

    country: Country


@weft.program
async def capitals(question: str, engine: weft.Engine, program: weft.Program) -> tuple[str, ProgramGraph]:
    """Answer a question about two countries.

    Returns:
        The answer, and the graph of the calls.
    """
    completions = weft.openai_client(engine, program).chat.completions
    plan = await completions.parse(
        model=engine.model,
        messages=[{"role": "system", "content": "Name the two countries."}, {"role": "user", "content": question}],
        response_format=Plan,
        temperature=0,
        max_tokens=80,
    )
    countries = plan.choices[0].message.parsed
    if countries is None:
        return "no plan", program.graph
    both = (countries.first, countries.second)
    facts = await asyncio.gather(*(look_up(country, engine, program=program) for country in both))
    prompt = f"{' '.join(facts)} {question}"
    text = ""
    stream = await completions.create(
        model=engine.model, messages=[{"role": "user", "content": prompt}], temperature=0, max_tokens=48, stream=True
    )
    async for chunk in stream:
        text += chunk.choices[0].delta.content or ""
    return text.strip(), program.graph


@weft.program
async def look_up(country: str, engine: weft.Engine, program: weft.Program) -> str:
    """Look up a capital, in a tool loop of two calls. Called with `program=`, it is a branch of that program."""
    completions = weft.openai_client(engine, program).chat.completions
    messages: list[Any] = [{"role": "user", "content": f"What is the capital of {country}?"}]
    asked = await completions.create(
        model=engine.model,
        messages=messages,
        tools=[pydantic_function_tool(Lookup, name="lookup")],
        tool_choice="required",
        parallel_tool_calls=False,
        temperature=0,
        max_tokens=80,
    )
    message = asked.choices[0].message
    messages.append(message.model_dump(exclude_none=True))
    for call in message.tool_calls or ():
        if call.type == "function":
            asked_for = Lookup.model_validate_json(call.function.arguments).country
            result = f"The capital of {asked_for} is {CAPITALS[asked_for]}."
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    answer = await completions.create(model=engine.model, messages=messages, temperature=0, max_tokens=24)
    return (answer.choices[0].message.content or "").strip()


async def run(model: str | None, picture: Path) -> list[str]:
    """Start an engine, ask all questions at once, and print the answers and the process table.

    Returns:
        The answers.
    """
    engine = await weft.Engine.create(model, max_num_seqs=4, **QUICK)
    async with engine:
        results = await asyncio.gather(
            *(capitals.options(name=name)(question, engine) for name, question in QUESTIONS.items())
        )
        for question, (answer, _) in zip(QUESTIONS.values(), results, strict=True):
            tell(question, style="bold")
            tell(f"  {answer}")
        _, graph = results[0]
        finish(engine, graph, picture)
    return [answer for answer, _ in results]


def main(model: Model = None, picture: Picture = Path("openai_sdk.svg")) -> None:
    """Run the agents, and print their answers and the process table."""
    play(run(model, picture))


if __name__ == "__main__":
    typer.run(main)
