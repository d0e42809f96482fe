"""Generates programs with the published statistics of the papers' workloads, and their arrivals.

`weft trace make` and the benchmarks use `generate`, which makes a trace of a workload. Each paper has a section below.
"""

from __future__ import annotations

import functools
import itertools
import math
import random
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Final

from weft.core.errors import SimulationError
from weft.core.trace.format import TraceCall, TraceProgram

# -- parts of workloads: whole numbers with a long tail, and chains of calls


class LongTail:
    """A distribution of whole numbers from 1 to `largest`: a log-normal density that is cut off at `largest`.

    Args:
        mean: the mean of the distribution after the cut.
        largest: the largest number.
        spread: the standard deviation of the logarithm before the cut.

    Raises:
        SimulationError: the mean is not between 1 and half of `largest`, or the spread is not positive.
    """

    def __init__(self, mean: float, largest: int, spread: float) -> None:
        if not 1 < mean < (1 + largest) / 2 or spread <= 0:
            raise SimulationError(f"a mean of {mean} must lie between 1 and half of the largest number, {largest}.")
        low, high = -10.0, math.log(largest) + 1
        for _ in range(60):  # bisection: the mean grows with the centre of the logarithm
            middle = (low + high) / 2
            weights = [math.exp(-(((math.log(n) - middle) / spread) ** 2) / 2) / n for n in range(1, largest + 1)]
            if sum(n * weight for n, weight in enumerate(weights, 1)) < mean * sum(weights):
                low = middle
            else:
                high = middle
        self._sums = list(itertools.accumulate(weights))

    def draw(self, rng: random.Random) -> int:
        """Draw one number."""
        return bisect_left(self._sums, rng.random() * self._sums[-1]) + 1


long_tail: Final = functools.cache(LongTail)


def chain(
    rng: random.Random,
    count: int,
    prefill: Callable[[random.Random], int],
    output: Callable[[random.Random], int],
    *,
    system: int = 0,
    pause: Callable[[], tuple[str, float]] | None = None,
) -> Iterator[TraceCall]:
    """Yield a chain of calls, each with the prompts and outputs of all earlier calls in its prompt.

    Args:
        prefill: draws the tokens that a prompt adds to those of the earlier calls.
        output: draws the output tokens of a call.
        system: tokens of the system prompt, which all programs of the same name share.
        pause: draws the tool before a call that is not the first, and its time in seconds.
    """
    history, parents = system, ()  # type: int, tuple[str, ...]
    for number in range(count):
        output_tokens, prompt_tokens = output(rng), history + prefill(rng)
        tool, gap_s = pause() if pause is not None and number else (None, 0.0)
        call = TraceCall(
            call_id=f"c{number}",
            parents=parents,
            output_tokens=output_tokens,
            prompt_tokens=prompt_tokens,
            gap_s=gap_s,
            tool=tool,
            shared_prefix_tokens=history,
        )
        yield call
        history, parents = call.prompt_tokens + call.output_tokens, (call.call_id,)


# -- the workloads of Autellix (§6.1, Fig. 11)

# The paper gives the means and the largest numbers of calls. The distributions are Weft's choice; they have long tails,
# as in the figure. The paper's prefill of a call is taken as the part of the prompt that the program's earlier calls do
# not have. It cannot be the whole prompt: with 256 prompt tokens a call, a chat would have no tokens left for its
# history.

_TOOLS_SYSTEM_TOKENS: Final = 2048
_WIDTH: Final = 5  # parallel calls in a round of a search
_DEPTH: Final = 6  # rounds from the root of the tree to a leaf


def chat(rng: random.Random, program: str) -> TraceProgram:
    """Make a ShareGPT-like program: a conversation without pauses.

    Means: 6.66 calls (at most 80), 277 output tokens and 256 tokens of prefill a call.
    """
    calls, prefill, output = long_tail(6.66, 80, 1.0), long_tail(256, 4096, 1.0), long_tail(277, 2048, 0.8)
    return TraceProgram(program, tuple(chain(rng, calls.draw(rng), prefill.draw, output.draw)), name="chat")


def tools(rng: random.Random, program: str) -> TraceProgram:
    """Make a BFCL-like program: a ReAct loop with tools that take half a second.

    All programs have the same long system prompt. Means: 10.75 calls (at most 70), 34.14 output tokens and 735.06
    tokens of prefill a call.
    """
    count = long_tail(10.75, 70, 0.6).draw(rng)
    # The system prompt is prefill of one call only, so the other calls have less prefill than the mean.
    later = long_tail((735.06 * 10.75 - _TOOLS_SYSTEM_TOKENS) / 10.75, 4096, 0.8)
    output = long_tail(34.14, 512, 0.6)
    calls = chain(
        rng, count, later.draw, output.draw, system=_TOOLS_SYSTEM_TOKENS, pause=lambda: ("tool", rng.expovariate(2.0))
    )
    return TraceProgram(program, tuple(calls), name="tools")


def search(rng: random.Random, program: str) -> TraceProgram:
    """Make a LATS-like program: a tree search in rounds of five parallel calls.

    A round begins when the whole round before it has ended. After six rounds the search starts at the root again.
    Means: 159.7 calls, 72.6 output tokens and 467.2 tokens of prefill a call.
    """
    prefill, output = long_tail(467.2, 4096, 0.5), long_tail(72.6, 512, 0.5)
    calls = list(chain(rng, 1, prefill.draw, output.draw))
    rounds = long_tail((159.7 - 1) / _WIDTH, 80, 0.35).draw(rng)
    root = node = calls[0]
    before: tuple[str, ...] = (root.call_id,)
    for number in range(rounds):
        if number % _DEPTH == 0:
            node = root
        parents = (node.call_id, *(call_id for call_id in before if call_id != node.call_id))
        shared = node.prompt_tokens + node.output_tokens
        branches = [
            TraceCall(
                call_id=f"c{len(calls) + branch}",
                parents=parents,
                output_tokens=output.draw(rng),
                prompt_tokens=shared + prefill.draw(rng),
                shared_prefix_tokens=shared,
            )
            for branch in range(_WIDTH)
        ]
        calls += branches
        before = tuple(branch.call_id for branch in branches)
        node = rng.choice(branches)
    return TraceProgram(program, tuple(calls), name="search")


def mixed(rng: random.Random, program: str) -> TraceProgram:
    """Make a program of one of the three workloads, each as likely as the others (§6.1 mixes programs, not calls)."""
    return rng.choice((chat, tools, search))(rng, program)


# -- the workloads of SAGA (§9.1)

# Numbers of steps, rates, ranges of lengths and the quantiles of the tools' times (Table 1) are the paper's. Which
# tools are used is Weft's choice. The paper takes the lengths of tenants' calls from BurstGPT, and here they are Weft's
# choice.

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


# -- the workload of Astraea (§5.1)

# The number of calls and the mean times of three tools are the paper's. All other figures are Weft's choice.

_INTERCEPTED_SYSTEM_TOKENS: Final = 1024
_INTERCEPTIONS: Final[dict[str, str | float]] = {  # the tool of `TOOL_TIMES_S`, or the mean in seconds
    "arithmetic": 9e-5,
    "questions": "web",
    "environment": "code",
    "chatbot": 28.6,
    "image": 20.03,
    "speech": "web",
}


def intercepted(rng: random.Random, program: str) -> TraceProgram:
    """Make a program of one of six classes, each of which waits for one kind of tool between its calls.

    Means: 5.17 calls; arithmetic takes 0.09 ms, a human's answer in a chat 28.6 s and an image 20.03 s. The paper does
    not give the means of the other three. Questions and speech have SAGA's times of "web", and a virtual environment
    those of "code".
    """
    kind = rng.choice(list(_INTERCEPTIONS))
    of = _INTERCEPTIONS[kind]
    count = long_tail(5.17, 40, 0.6).draw(rng)
    later, output = long_tail(64, 1024, 0.8), long_tail(96, 1024, 0.8)

    def pause() -> tuple[str, float]:
        part = rng.random()
        return kind, tool_time_s(of, part) if isinstance(of, str) else -of * math.log1p(-part)

    calls = chain(rng, count, later.draw, output.draw, system=_INTERCEPTED_SYSTEM_TOKENS, pause=pause)
    return TraceProgram(program, tuple(calls), name=kind)


# -- traces of a workload, and arrivals

AUTELLIX: Final = ("chat", "tools", "search", "mixed")

WORKLOADS: Final[dict[str, Callable[[random.Random, str], TraceProgram]]] = {
    "chat": chat,
    "tools": tools,
    "search": search,
    "mixed": mixed,
    "swe": swe,
    "web": web,
    "tenants": tenants,
    "intercepted": intercepted,
}


def generate(workload: str, programs: int, arrivals: Iterator[float], rng: random.Random) -> list[TraceProgram]:
    """Generate the programs of a trace. The same seeds give the same trace.

    Args:
        programs: the number of programs. Their ids are p0, p1, ...
        arrivals: the arrival times of the programs, in seconds.

    Raises:
        SimulationError: the workload is unknown, or the number of programs is below 1.
    """
    if workload not in WORKLOADS or programs < 1:
        raise SimulationError(f"{programs} programs of {workload!r}: give at least one of {', '.join(WORKLOADS)}.")
    make = WORKLOADS[workload]
    return [replace(make(rng, f"p{number}"), arrival_s=next(arrivals)) for number in range(programs)]


def poisson(rng: random.Random, rate: float) -> Iterator[float]:
    """Return an endless iterator over the arrival times of a Poisson process, in seconds.

    Args:
        rate: programs a second, on average.

    Raises:
        SimulationError: the rate is not positive and finite.
    """
    return _arrivals(rng, rate, 1.0)


def bursty(rng: random.Random, rate: float, variation: float = 4.0) -> Iterator[float]:
    """Return an endless iterator over arrival times in bursts, in seconds. The times in between are gamma distributed.

    Args:
        rate: programs a second, on average.
        variation: the standard deviation of the times between arrivals, as a multiple of their mean (Poisson: 1).

    Raises:
        SimulationError: the rate or the variation is not positive and finite.
    """
    return _arrivals(rng, rate, variation)


def _arrivals(rng: random.Random, rate: float, variation: float) -> Iterator[float]:
    if not 0 < rate < math.inf or not 0 < variation < math.inf:
        bursts = "" if variation == 1 else f" with variation {variation}"
        raise SimulationError(f"{rate} programs a second{bursts}: give finite numbers above 0.")
    shape = 1 / variation**2
    return itertools.accumulate(rng.gammavariate(shape, 1 / (rate * shape)) for _ in itertools.count())
