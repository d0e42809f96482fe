"""Programs made at random of LangChain's and LangGraph's parts have the DAG that their structure implies."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

pytest.importorskip("langchain", reason="the LangChain extra is not installed")

from langchain_shapes import drive
from random_programs import Edges, Maker, answers, name_of, reachable

import weft
from weft.integrations.langchain import ChatWeft
from weft.testing import ScriptedEngine

pytestmark = pytest.mark.anyio
pytest_plugins = ["weft.testing.fixtures"]

METHODS = ("invoke", "stream", "ainvoke", "astream", "events v2")


@pytest.mark.parametrize("quotes", [True, False])
@pytest.mark.parametrize("how", METHODS)
@pytest.mark.parametrize("seed", range(6))
async def test_a_random_program_has_the_edges_of_its_structure(
    scripted_engine: Callable[..., ScriptedEngine], seed: int, how: str, quotes: bool
) -> None:
    """No edge is missing and no exact edge is wrong. Where calls quote what came before, no guess is wrong either."""
    rng = random.Random(f"{seed} {how} {quotes}")
    engine = scripted_engine(answers(rng))
    is_async, streams = how.startswith(("a", "e")), "invoke" not in how
    maker = Maker(rng, ChatWeft(engine=engine), is_async=is_async, streams=streams, quotes=quotes)
    part = maker.part(rng.randint(1, 4))
    implied: Edges = set()
    part.after(frozenset(), implied)
    async with weft.Program("random") as program:
        await drive(part.run, "Begin.", program.config(), how)
    names = {call.call_id: name_of(call) for call in engine.calls}
    assert sorted(names.values()) == sorted(maker.calls), part.text
    seen = {
        (names[edge.parent], names[call.call_id], edge.exact) for call in program.graph.calls for edge in call.parents
    }
    exact = {(parent, child) for parent, child, is_exact in seen if is_exact}
    guesses = {(parent, child) for parent, child, is_exact in seen if not is_exact}
    assert exact - reachable(implied) == set(), part.text
    assert implied - reachable(exact | guesses) == set(), part.text
    if quotes:
        assert implied - reachable(exact) == set(), part.text
