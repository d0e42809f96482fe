"""DSPy: a ReAct agent with a tool."""

from __future__ import annotations

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from uuid import uuid4

import dspy


def weather(city: str) -> str:
    """Look up the weather of a city."""
    return f"{city}: warm"


model = dspy.LM("openai/scripted", api_base=os.environ["OPENAI_BASE_URL"], api_key="none", cache=False)


def ask(question: str) -> str:
    with dspy.context(lm=model):
        return str(dspy.ReAct("question -> answer", tools=[weather])(question=question).answer)


if sys.argv[1] == "header":  # two at once that share nothing
    run = model.copy(extra_headers={"weft-program-id": str(uuid4())})
    with ThreadPoolExecutor(2) as pool, dspy.context(lm=run):
        name = dspy.Predict("question -> answer")
        list(pool.map(lambda thing: name(question=f"Name a {thing}.", lm=run), ("fish", "bird")))
elif sys.argv[1] == "resume":
    said = dspy.History(messages=[])
    with dspy.context(lm=model):
        answer = dspy.Predict("question, history: dspy.History -> answer")
        for question in ("How is the weather in Rome?", "And tomorrow?"):
            found = answer(question=question, history=said)
            said.messages.append({"question": question, **found})
elif sys.argv[1].endswith("two at once"):
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(ask, ["How is the weather in Rome?", "How is the weather in Oslo?"]))
else:
    ask("How is the weather in Rome?")
