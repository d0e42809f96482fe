"""Summaries of long texts by map and reduce with LangChain's `abatch`; two documents at once on one engine.

Run it with `python examples/map_reduce_langchain.py`, or add text files of your own. What makes it a Weft example is
four lines: the engine, `@weft.program`, `ChatWeft(engine=...)` and `config=program.config()`.

The parts of a text are summarised in parallel. Then groups of summaries are summarised again, in parallel, until one
summary is left. In the graph these calls are a fork into threads, followed by joins.
"""

from __future__ import annotations

import asyncio
import textwrap
from pathlib import Path
from typing import Annotated, Final, NamedTuple

import typer
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate

import weft
from weft.core.program.graph import ProgramGraph
from weft.examples._run import QUICK, Model, Picture, console, finish, play, tell
from weft.integrations.langchain import ChatWeft

# Two invented reports. Their lengths differ, so that a long program and a short one compete.
DOCUMENTS: Final = {
    "harbour": """\
The harbour of Ostry was quiet in January. Ice closed the northern basin for eleven days, and the ferry to the islands
ran only twice a week. The pilots used the time to repaint their three boats, and the harbour master had the old crane
on the coal quay taken down after its brake had failed for the second time.

In February the first timber ships came. They waited outside for two days because the channel markers had drifted in the
ice, and a crew of four put them back with a borrowed tug. One buoy was never found. A fisherman said that he had seen
it far to the east, still blinking.

Spring brought the dredging. For six weeks a machine dug mud out of the southern basin, where large ships had touched
the ground at low tide. It cost more than planned, since an old wreck lay under the mud, and divers had to lift it in
pieces. The depth is now nine metres, and ships of the next larger class can enter.

In June the fish market moved into its new hall. The roof collects rain water for washing the floors, and the cold store
runs on the power of the panels above it. Traders complained about the narrow gates for a month, until a second gate was
opened towards the railway.

The summer was the busiest in twenty years. Sixty-two sailing boats came for the regatta in one week, and the guest
moorings were full until September. A storm on the last day drove two yachts against the pier, but no one was hurt, and
both were repaired in the town.

In August the ferry company put its first electric ship into service. It needs forty minutes to load its batteries at
the quay, so the timetable had to change, and the café at the landing stage now opens an hour earlier.

Autumn was spent on safety. All ladders along the quays were replaced, and lamps that shine only downwards were put up,
because birds on their way south had flown into the old ones. The fire brigade held an exercise at night on a tanker.

In December the council agreed to the plan for the next five years: a longer breakwater in the west, a school for
pilots, and a bridge for walkers across the lock. The money for the breakwater is there; the bridge has to wait.""",
    "orchard": """\
The orchard on the hill was planted by forty families, each with two trees of an old kind of apple or pear. In the first
year a third of the young trees died, because mice had eaten the bark under the snow. The families wound wire around
the stems and planted again.

In the third year there were enough blossoms for bees. A teacher brought two hives, and her class counted how many bees
came back in a minute at different temperatures. Below ten degrees hardly any flew, so they learned why a cold May
means few apples.

The first real harvest came in the sixth year, nearly a ton. Half of it was pressed into juice in the fire station, and
the rest was given away at the market. The families agreed that no one sells fruit from the hill for money.

Last year a letter came from the city, which wants to build a road there. The families answered with a list of every
tree, its kind and who looks after it. The road will now go around the hill, and the city has asked for ten trees for
a park.""",
}

PART: Final = 450  # maximum length of a part, in characters
GROUP: Final = 4  # summaries that one call joins

# The prompt for parts and for groups of summaries. A small model needs an example.
PROMPT: Final = ChatPromptTemplate(
    [
        ("system", "You say in one short sentence what happened."),
        ("user", "Text: The library was closed for most of the spring, because water had come through the roof. "
                 "Volunteers carried four thousand books to the school, where they were dried.\nIn one sentence:"),
        ("assistant", "Water came into the library, but volunteers saved the books."),
        ("user", "Text: {text}\nIn one sentence:"),
    ]
)  # fmt: skip
# The form of a summary of summaries. Without it, a small model repeats one of the summaries word for word. Then two
# calls have the same output, and lineage cannot tell which of them the next call comes after.
JOINED: Final = r"In short, [^.\n]{30,110}, and [^.\n]{20,110}\."


def split(text: str) -> list[str]:
    """Split a text into parts of whole paragraphs. A long paragraph is cut between words."""
    parts: list[str] = []
    for paragraph in text.split("\n\n"):
        for piece in textwrap.wrap(paragraph, PART):
            if parts and len(parts[-1]) + len(piece) < PART:
                parts[-1] += "\n" + piece
            else:
                parts.append(piece)
    return parts


class Summary(NamedTuple):
    """The summary of a text."""

    text: str
    parts: int  # into which the text was split
    graph: ProgramGraph


@weft.program
async def summarise(text: str, chat: ChatWeft, program: weft.Program) -> Summary:
    """Summarise the parts of a text, then groups of summaries, until one summary is left."""
    config = program.config()
    mapper = PROMPT | chat.with_config(run_name="map") | StrOutputParser()
    joined = {"regex": JOINED}
    reducer = PROMPT | chat.bind(structured_outputs=joined).with_config(run_name="reduce") | StrOutputParser()
    parts = split(text)
    summaries = await mapper.abatch([{"text": part} for part in parts], config)
    while len(summaries) > 1:
        groups = [summaries[first : first + GROUP] for first in range(0, len(summaries), GROUP)]
        summaries = await reducer.abatch([{"text": "\n".join(group)} for group in groups], config)
    return Summary(" ".join(summaries[0].split()), len(parts), program.graph)


async def run(model: str | None, documents: dict[str, str], picture: Path) -> None:
    """Start an engine, summarise all documents at once, and print the summaries and the process table."""
    engine = await weft.Engine.create(model, max_num_seqs=4, **QUICK)  # few slots, so programs compete
    async with engine:
        # An answer is one sentence, with its full stop.
        sentence = {"include_stop_str_in_output": True}
        chat = ChatWeft(engine=engine, temperature=0, max_tokens=64, stop=[". ", "\n"], model_kwargs=sentence)
        with console.status("summarising ..."):
            running = (summarise.options(name=name)(text, chat) for name, text in documents.items())
            summaries = dict(zip(documents, await asyncio.gather(*running), strict=True))
        for name, summary in summaries.items():
            tell(f"\n{name}, in {summary.parts} parts", style="bold")
            tell(f"  {summary.text}")
        largest = max((summary.graph for summary in summaries.values()), key=len)
        finish(engine, largest, picture)


def _read(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise typer.BadParameter(f"{path} cannot be read: {error}") from None
    if not text:
        raise typer.BadParameter(f"{path} is empty.")
    return text


def main(
    files: Annotated[list[Path] | None, typer.Argument(help="Texts to summarise (default: two built-in ones).")] = None,
    *,
    model: Model = None,
    picture: Picture = Path("map_reduce_langchain.svg"),
) -> None:
    """Summarise the documents, and print the summaries and the process table."""
    documents = {path.name: _read(path) for path in files} if files else DOCUMENTS
    play(run(model, documents, picture))


if __name__ == "__main__":
    typer.run(main)
