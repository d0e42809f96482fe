"""Shares of API keys by the weights in their file, on a live server under the policy `fair`."""

from __future__ import annotations

import asyncio
from collections import Counter

import httpx
import pytest
from served import HEAVY_KEY, HEAVY_WEIGHT, LIGHT_KEY, Served

pytestmark = [pytest.mark.engine, pytest.mark.anyio]

# Clients of each key. The engine has 4 places: 3 for the heavy key and 1 for the light one. Even when all 4 calls end
# at once, calls of both keys wait, so a client that sends its next call late changes nothing.
CLIENTS = {HEAVY_KEY: 7, LIGHT_KEY: 3}
TOKENS = 64  # of a call
FIRST, COUNTED = 20, 60  # calls until the policy knows how long calls are, and calls whose shares are compared


async def test_tokens_are_shared_by_the_weights_of_keys(served: Served) -> None:
    """Two keys that always have calls waiting get about 3 tokens to 1. Without weights they would get the same."""
    answered: list[str] = []  # a key for each call; all calls have the same length

    async def ask_again_and_again(client: httpx.AsyncClient, key: str, number: int) -> None:
        headers = {"authorization": f"Bearer {key}", "weft-program-id": f"share-{number}"}
        body = {"model": "tiny", "prompt": f"Client {number}.", "max_tokens": TOKENS, "ignore_eos": True}
        while len(answered) < FIRST + COUNTED:
            answer = await client.post("/v1/completions", json=body, headers=headers)
            assert answer.status_code == 200, answer.text
            answered.append(key)

    async with httpx.AsyncClient(base_url=served.url, timeout=120) as client, asyncio.TaskGroup() as clients:
        for key, count in CLIENTS.items():
            for number in range(count):
                clients.create_task(ask_again_and_again(client, key, number))
    calls = Counter(answered[FIRST : FIRST + COUNTED])
    assert HEAVY_WEIGHT / 1.5 < calls[HEAVY_KEY] / calls[LIGHT_KEY] < HEAVY_WEIGHT * 1.5
