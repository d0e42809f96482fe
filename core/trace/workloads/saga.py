"""The workloads of SAGA (§9.1).

Numbers of steps, rates, ranges of lengths and the quantiles of the tools' times (Table 1) are the paper's. Which tools
are used is Weft's choice. The paper takes the lengths of tenants' calls from BurstGPT, and here they are Weft's choice.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import Final

from weft.core.trace.format import TraceCall, TraceProgram
from weft.core.trace.workloads.parts import chain, long_tail

# SAGA, Table 1: the medians, 95th and 99th percentiles of tools' times.
TOOL_TIMES_S: Final = {
    "code": (0.18, 2.4, 28.0),
    "files": (0.045, 0.32, 1.2),
    "web": (0.85, 4.5, 45.0),
    "database": (0.12, 0.89, 3.5),
}
_INSTRUCTIONS_TOKENS: Final = 1024
_LARGEST_CONTEXT: Final = 131_072
_TENANTS: Final = {
    f"{kind}-{number}": (kind, steps)
    for kind, count, steps in (("heavy", 3, 100), ("medium", 4, 30), ("light", 3, 10))
    for number in range(1, count + 1)
}
_TENANT_RATES: Final = (16,) * 3 + (8,) * 4 + (4,) * 3  # programs a minute


def swe(rng: random.Random, program: str) -> TraceProgram:
    """Make a program like an agent's work on an issue of SWE-bench: its context grows with each step.

    Means: 37 calls (at most 150). The first prompt has 2,000 to 4,000 tokens, an output 100 to 500. A tool's answer has
    550 tokens on average, so contexts end at about 35,000 tokens. A program ends before its context exceeds 131,072.
    """
    count = long_tail(37, 150, 0.7).draw(rng)
    answer = long_tail(550, 8192, 1.0)
    first = iter([rng.randint(2000, 4000)])
    calls = chain(
        rng,
        count,
        lambda rng: next(first, 0) or answer.draw(rng),
        lambda rng: rng.randint(100, 500),
        pause=lambda: _tool(rng, ("code", "files"), (2, 3)),
    )
    fitting = itertools.takewhile(lambda call: call.prompt_tokens + call.output_tokens <= _LARGEST_CONTEXT, calls)
    return TraceProgram(program, tuple(fitting), name="swe")


def web(rng: random.Random, program: str) -> TraceProgram:
    """Make a program like an agent in a browser (WebArena). Each prompt ends with a page, which the next one replaces.

    Means: 18 calls (at most 80). A prompt has 4,000 to 8,000 tokens in a program of average length: instructions that
    all programs share, what the agent has said so far, and the page. An output has 50 to 200 tokens.
    """
    history, calls = _INSTRUCTIONS_TOKENS, []  # type: int, list[TraceCall]
    for number in range(long_tail(18, 80, 0.6).draw(rng)):
        tool, gap_s = _tool(rng, ("web",)) if number else (None, 0.0)
        said = calls[-1].output_tokens if calls else 0
        call = TraceCall(
            call_id=f"c{number}",
            parents=(calls[-1].call_id,) if calls else (),
            output_tokens=rng.randint(50, 200),
            prompt_tokens=history + said + rng.randint(2500, 6000),
            gap_s=gap_s,
            tool=tool,
            shared_prefix_tokens=history,  # the page before the latest output is gone
        )
        history += said
        calls.append(call)
    return TraceProgram(program, tuple(calls), name="web")


def tenants(rng: random.Random, program: str) -> TraceProgram:
    """Make a program of one of ten tenants: three heavy, four medium and three light ones.

    Their programs have about 100, 30 and 10 calls, with a tool before each call but the first. They arrive in the
    proportion 16 : 8 : 4.
    """
    (tenant, (kind, steps)) = rng.choices(list(_TENANTS.items()), weights=_TENANT_RATES)[0]
    count = long_tail(steps, round(2.2 * steps), 0.3).draw(rng)
    prefill, output = long_tail(160, 2048, 0.8), long_tail(60, 512, 0.6)
    calls = chain(rng, count, prefill.draw, output.draw, pause=lambda: _tool(rng, tuple(TOOL_TIMES_S)))
    return TraceProgram(program, tuple(calls), name=kind, tenant=tenant)


def tool_time_s(tool: str, part: float) -> float:
    """A quantile of a tool's time in seconds, interpolated in the logarithm between the published quantiles.

    The least time is a tenth of the median, and no time exceeds the 99th percentile. Both are Weft's choice.

    Args:
        tool: one of `TOOL_TIMES_S`.
        part: the quantile, from 0 to 1.
    """
    median, p95, p99 = TOOL_TIMES_S[tool]
    points = ((0.0, median / 10), (0.5, median), (0.95, p95), (0.99, p99), (1.0, p99))
    upper = next(index for index, (high, _) in enumerate(points) if index and part <= high)
    (low, low_s), (high, high_s) = points[upper - 1 : upper + 1]
    return float(min(high_s, low_s * (high_s / low_s) ** ((part - low) / (high - low))))


def _tool(rng: random.Random, tools: Sequence[str], weights: Sequence[float] | None = None) -> tuple[str, float]:
    """Draw a tool, and its time in seconds."""
    tool = rng.choices(tools, weights)[0]
    return tool, tool_time_s(tool, rng.random())
