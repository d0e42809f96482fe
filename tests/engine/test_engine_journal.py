"""Journals of real engines: what `weft replay` makes of them, without the model."""

from __future__ import annotations

import asyncio
import gzip
from pathlib import Path

import pytest
from tiny_engine import ENGINE_ARGS

import weft
from weft.integrations.langchain import ChatWeft

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.anyio]

SCHEMA = {"type": "object", "properties": {"far": {"type": "boolean"}}, "required": ["far"]}
FORM = {"type": "json_schema", "json_schema": {"name": "look", "schema": SCHEMA}}


async def test_the_journals_of_two_replicas_come_out_again(tiny_model: Path, tmp_path: Path) -> None:
    """They read each other's host memory. Some calls have a grammar, and some are cancelled. No text is in a file."""
    from weft.testing.replay import replay

    folder = tmp_path / "journals"
    with weft.AsyncMultiLLMEngine(
        tiny_model,
        replicas=2,
        swap=weft.SwapConfig(space_gib=0.1, min_tokens=0),
        policy="atlas",
        journal=folder,
        **{**ENGINE_ARGS, "max_model_len": 1024, "hf_overrides": {}, "max_num_seqs": 2},
    ) as engine:
        model = ChatWeft(engine=engine, temperature=0, max_tokens=40, model_kwargs={"ignore_eos": True})

        async def agent(number: int) -> None:
            with weft.Program(f"kind {number % 3}") as program:
                history = [("user", f"Kangaroo {number} counts ships. " * 20)]
                for turn in range(4):
                    kwargs = {"response_format": FORM} if (number, turn) in ((1, 1), (2, 2)) else {}
                    call = model.ainvoke(history, config=program.config(), **kwargs)
                    limit_s = 0.02 if (number, turn) == (3, 2) else None
                    try:
                        answer = await asyncio.wait_for(call, limit_s)
                    except TimeoutError:
                        return
                    history += [("assistant", answer.text), ("user", f"Go on, {turn}.")]

        await asyncio.gather(*map(agent, range(10)))
    paths = sorted(folder.iterdir())
    found = [replay(path) for path in paths]
    assert len(found) == 2
    assert sum(each.calls for each in found) > 35
    assert sum(each.steps for each in found) > 200
    text = b"".join(gzip.decompress(path.read_bytes()) for path in paths).decode()
    assert 'awaits_grammar":true' in text
    assert "kind 2" in text
    assert [word for word in ("Kangaroo", "ships", "Go on") if word in text] == []
