"""Generates programs with the published statistics of Autellix's workloads (§6.1, Fig. 11), and their arrivals.

The paper gives the means and the largest numbers of calls. The distributions are Weft's choice; they have long tails,
as in the figure. The paper's prefill of a call is taken as the part of the prompt that the program's earlier calls do
not have. It cannot be the whole prompt: in a chat of 256 prompt tokens a call, no tokens would be left for the history.
"""

from __future__ import annotations

import functools
import itertools
import math
import random
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from weft.core.errors import SimulationError
from weft.core.trace.format import TraceCall, TraceProgram


class LongTail:
    """A distribution of whole numbers from 1 to `largest`: a log-normal density that is cut off at `largest`.

    Args:
        mean: the mean of the distribution after the cut.
        largest: the largest number.
        spread: the standard deviation of the logarithm before the cut.

    Raises:
        SimulationError: no such distribution exists.
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


def chat(rng: random.Random, program: str) -> TraceProgram:
    """Make a ShareGPT-like program: a conversation without pauses.

    Means: 6.66 calls (at most 80), 277 output tokens and 256 tokens of prefill a call.
    """
    calls, prefill, output = _long_tail(6.66, 80, 1.0), _long_tail(256, 4096, 1.0), _long_tail(277, 2048, 0.8)
    return TraceProgram(program, tuple(_chain(rng, calls.draw(rng), prefill.draw, output.draw)), name="chat")


def tools(rng: random.Random, program: str) -> TraceProgram:
    """Make a BFCL-like program: a ReAct loop with tools that take half a second.

    All programs have the same long system prompt. Means: 10.75 calls (at most 70), 34.14 output tokens and 735.06
    tokens of prefill a call.
    """
    count = _long_tail(10.75, 70, 0.6).draw(rng)
    # The system prompt is prefill of one call only, so the other calls have less prefill than the mean.
    later = _long_tail((735.06 * 10.75 - _SYSTEM_TOKENS) / 10.75, 4096, 0.8)
    output = _long_tail(34.14, 512, 0.6)
    calls = _chain(rng, count, later.draw, output.draw, system=_SYSTEM_TOKENS, tool="tool", gap_s=0.5)
    return TraceProgram(program, tuple(calls), name="tools")


def search(rng: random.Random, program: str) -> TraceProgram:
    """Make a LATS-like program: tree search in rounds of five parallel calls, each round after the whole previous one.

    Six rounds descend the tree, then the search starts at its root again. Means: 159.7 calls, 72.6 output tokens and
    467.2 tokens of prefill a call.
    """
    prefill, output = _long_tail(467.2, 4096, 0.5), _long_tail(72.6, 512, 0.5)
    calls = list(_chain(rng, 1, prefill.draw, output.draw))
    rounds = _long_tail((159.7 - 1) / _WIDTH, 80, 0.35).draw(rng)
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


WORKLOADS: Final[dict[str, Callable[[random.Random, str], TraceProgram]]] = {
    "chat": chat,
    "tools": tools,
    "search": search,
    "mixed": mixed,
}


def poisson(rng: random.Random, rate: float) -> Iterator[float]:
    """Return an endless iterator over the arrival times of a Poisson process, in seconds.

    Args:
        rng: the source of randomness.
        rate: programs a second, on average.

    Raises:
        SimulationError: the rate is not positive and finite.
    """
    return _arrivals(rng, rate, 1.0)


def bursty(rng: random.Random, rate: float, variation: float = 4.0) -> Iterator[float]:
    """Return an endless iterator over arrival times in bursts, in seconds: the times in between are gamma distributed.

    Args:
        rng: the source of randomness.
        rate: programs a second, on average.
        variation: the standard deviation of the times between arrivals, as a multiple of their mean (Poisson: 1).

    Raises:
        SimulationError: the rate or the variation is not positive and finite.
    """
    return _arrivals(rng, rate, variation)


def generate(workload: str, programs: int, arrivals: Iterator[float], rng: random.Random) -> list[TraceProgram]:
    """Generate a trace. The same seeds give the same trace.

    Args:
        workload: one of `WORKLOADS`.
        programs: the number of programs. Their ids are p0, p1, ...
        arrivals: the arrival times of the programs, in seconds.
        rng: the source of randomness.

    Raises:
        SimulationError: the workload is unknown, or the number of programs is below 1.
    """
    if workload not in WORKLOADS or programs < 1:
        raise SimulationError(f"{programs} programs of {workload!r}: give at least one of {', '.join(WORKLOADS)}.")
    make = WORKLOADS[workload]
    return [_at(make(rng, f"p{number}"), next(arrivals)) for number in range(programs)]


_SYSTEM_TOKENS: Final = 2048
_WIDTH: Final = 5
_DEPTH: Final = 6

_long_tail = functools.cache(LongTail)


def _chain(
    rng: random.Random,
    count: int,
    prefill: Callable[[random.Random], int],
    output: Callable[[random.Random], int],
    *,
    system: int = 0,
    tool: str | None = None,
    gap_s: float = 0.0,
) -> Iterator[TraceCall]:
    """Yield a chain of calls, each with the prompts and outputs of all earlier calls in its prompt."""
    history, parents = system, ()  # type: int, tuple[str, ...]
    for number in range(count):
        call = TraceCall(
            call_id=f"c{number}",
            parents=parents,
            output_tokens=output(rng),
            prompt_tokens=history + prefill(rng),
            gap_s=rng.expovariate(1 / gap_s) if gap_s and number else 0.0,
            tool=tool if number else None,
            shared_prefix_tokens=history,
        )
        yield call
        history, parents = call.prompt_tokens + call.output_tokens, (call.call_id,)


def _arrivals(rng: random.Random, rate: float, variation: float) -> Iterator[float]:
    if not 0 < rate < math.inf or not 0 < variation < math.inf:
        raise SimulationError(f"{rate} programs a second with variation {variation}: give finite numbers above 0.")
    shape = 1 / variation**2
    return itertools.accumulate(rng.gammavariate(shape, 1 / (rate * shape)) for _ in itertools.count())


def _at(program: TraceProgram, arrival_s: float) -> TraceProgram:
    return TraceProgram(program.program, program.calls, arrival_s, program.name, program.tenant)


def prefill_tokens(calls: Sequence[TraceCall]) -> int:
    """Return the prompt tokens that the calls of a program do not share with earlier calls of the program."""
    return sum(call.prompt_tokens - (call.shared_prefix_tokens if call.parents else 0) for call in calls)
