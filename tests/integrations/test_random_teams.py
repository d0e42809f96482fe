"""Teams made at random of AutoGen's parts have the DAG that their structure implies."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

pytest.importorskip("autogen_agentchat", reason="the AutoGen extra is not installed")
pytest.importorskip("langchain", reason="the LangChain extra is not installed")

from random_programs import Edges, reachable
from random_teams import Model, TeamMaker, names_of

import weft
from weft.integrations.autogen import bind_team
from weft.testing import ScriptedEngine

pytestmark = pytest.mark.anyio
pytest_plugins = ["weft.testing.fixtures"]


@pytest.mark.parametrize("seed", range(30))
async def test_a_random_team_has_the_edges_of_its_structure(
    scripted_engine: Callable[..., ScriptedEngine], seed: int
) -> None:
    """No edge is missing and no exact edge is wrong."""
    rng = random.Random(f"team {seed}")
    engine = scripted_engine(Model(rng))
    maker = TeamMaker(rng, engine)
    part = maker.team(rng.randint(1, 4))
    implied: Edges = set()
    part.after(frozenset(), implied)
    async with weft.Program("random") as program:
        await bind_team(part.run, program).run(task="Begin.")
    names = names_of(engine.calls)
    assert sorted(names.values()) == sorted(maker.calls), part.text
    seen = {
        (names[edge.parent], names[call.call_id], edge.exact) for call in program.graph.calls for edge in call.parents
    }
    exact = {(parent, child) for parent, child, is_exact in seen if is_exact}
    assert exact - reachable(implied) == set(), part.text
    assert implied - reachable({(parent, child) for parent, child, _ in seen}) == set(), part.text
