"""Workloads whose contexts fit in a model: longer ones would be rejected, so they are drawn again or end earlier."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from random import Random
from typing import Final

from weft.core.sim import TraceProgram
from weft.core.trace.workloads import chat, search, swe, tenants, web

CONTEXT_TOKENS: Final = 32_768  # a model's longest context, and that of SAGA's paper
TURNS: Final = 12


def bounded(program: TraceProgram) -> TraceProgram:
    """A program that ends before its context is too long."""
    fits = itertools.takewhile(lambda call: call.prompt_tokens + call.output_tokens <= CONTEXT_TOKENS, program.calls)
    return replace(program, calls=tuple(fits))


def bounded_chat(rng: Random, program: str) -> TraceProgram:
    """A chat whose context is never too long."""
    while True:
        candidate = chat(rng, program)
        if candidate.calls[-1].prompt_tokens + candidate.calls[-1].output_tokens <= CONTEXT_TOKENS:
            return candidate


def conversation(rng: Random, program: str) -> TraceProgram:
    """A chat of at least 12 turns."""
    while True:
        candidate = bounded_chat(rng, program)
        if len(candidate.calls) >= TURNS:
            return candidate


def _cut(make: Callable[[Random, str], TraceProgram], rng: Random, program: str) -> TraceProgram:
    return bounded(make(rng, program))


WORKLOADS: Final[dict[str, Callable[[Random, str], TraceProgram]]] = {
    "conversation": conversation,
    "chat": bounded_chat,
    "search": search,
    **{name: partial(_cut, make) for name, make in (("swe", swe), ("web", web), ("tenants", tenants))},
}
