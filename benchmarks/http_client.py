"""The client of `bench_http.py`: it plays programs against a server, with the ids that the server reads."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
from http_servers import MODEL

from weft.bench.load import Prompts
from weft.core.trace.format import TraceCall, TraceProgram, path_tokens

Ids = Callable[[TraceProgram, str, bool], dict[str, Any]]  # of a call: its program, the program's id, whether it ends


def no_ids(_program: TraceProgram, _program_id: str, _is_last: bool) -> dict[str, Any]:
    return {}


def weft_ids(program: TraceProgram, program_id: str, is_last: bool) -> dict[str, Any]:
    ids: dict[str, Any] = {"program_id": program_id, "program_name": program.name or ""}
    return ids | ({"program_end": 1} if is_last else {})


def router_ids(_program: TraceProgram, program_id: str, is_last: bool) -> dict[str, Any]:
    context: dict[str, Any] = {"program_id": program_id}
    return {"agentic_context": json.dumps(context | ({"expected_resume": False} if is_last else {}))}


@dataclass(frozen=True)
class Target:
    """Where programs are sent, with which ids."""

    name: str
    address: str
    backend: str  # the vLLM server whose prefix cache is emptied
    ids: Ids


@dataclass(frozen=True)
class Outcome:
    """One program."""

    program: str
    name: str | None
    calls: int
    seconds: float  # from its arrival to its end
    path_tokens: int  # output tokens on its critical path


class Client:
    """Plays programs against a target, through one connection pool."""

    def __init__(self, session: aiohttp.ClientSession, target: Target, prompts: Prompts, turn: str) -> None:
        self._session, self._target, self._prompts, self._turn = session, target, prompts, turn

    async def play(self, programs: Sequence[TraceProgram], advance: Callable[[], object]) -> list[Outcome]:
        """Start each program when it arrives; returns when all have ended."""

        async def later(program: TraceProgram) -> Outcome:
            await asyncio.sleep(program.arrival_s)
            outcome = await self.run(program)
            advance()
            return outcome

        return await asyncio.gather(*map(later, programs))

    async def run(self, program: TraceProgram) -> Outcome:
        """Run one program: each call is sent when its parents have ended and its gap is over."""
        began_s = time.perf_counter()
        calls = {call.call_id: asyncio.Event() for call in program.calls}
        histories: dict[str, list[int]] = {}
        unsent = len(program.calls)

        async def serve(call: TraceCall) -> None:
            nonlocal unsent
            for parent in call.parents:
                await calls[parent].wait()
            if call.gap_s:
                await asyncio.sleep(call.gap_s)
            unsent -= 1
            history = histories[call.parents[0]] if call.parents else []
            prompt = self._prompts.make(program, call, history)
            histories[call.call_id] = prompt + await self._complete(program, call, prompt, is_last=unsent == 0)
            calls[call.call_id].set()

        async with asyncio.TaskGroup() as group:
            for call in program.calls:
                group.create_task(serve(call))
        seconds = time.perf_counter() - began_s
        return Outcome(program.program, program.name, len(calls), seconds, path_tokens(program.calls))

    async def _complete(self, program: TraceProgram, call: TraceCall, prompt: list[int], *, is_last: bool) -> list[int]:
        body: dict[str, Any] = {
            "model": MODEL,
            "prompt": prompt,
            "max_tokens": call.output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        if ids := self._target.ids(program, f"{self._turn}-{program.program}", is_last):
            body["vllm_xargs"] = ids
        async with self._session.post(f"{self._target.address}/v1/completions", json=body) as response:
            if response.status != 200:
                raise SystemExit(f"{self._target.name} answered {response.status}: {(await response.text())[:1000]}")
            answer = await response.json()
        tokens: list[int] = answer["choices"][0]["token_ids"]
        if len(tokens) != call.output_tokens:
            raise SystemExit(f"{self._target.name} returned {len(tokens)} tokens instead of {call.output_tokens}.")
        return tokens
