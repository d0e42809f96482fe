"""What arrives in a round: programs of a trace or a generator, made small enough for the engine."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from weft.bench.clock import STEP_S
from weft.core.errors import BenchError
from weft.core.trace.format import TraceCall, TraceProgram, in_order, read
from weft.core.trace.workloads import WORKLOADS, generate, poisson

AS_RECORDED: Final = "as recorded"
CLOSED: Final = "closed"


@dataclass(frozen=True, slots=True)
class Shape:
    """How programs are made to fit.

    Args:
        scale: of all lengths in tokens and all times, so that a rate means the same load at any scale.
        most_tokens: a call's prompt and output have no more than this; what is longer is cut at its end.
        whole_steps: times become whole numbers of steps.
    """

    scale: float
    most_tokens: int
    whole_steps: bool


@dataclass(frozen=True, slots=True)
class Draw:
    """The programs of one round, which all baselines play; times in seconds of the clock that arrivals go by."""

    programs: list[TraceProgram]
    cut_calls: int  # that were longer than the engine holds


def label(rate: float) -> str:
    """How a load of so many programs a second is called."""
    return f"{rate:g}"


def draw(source: str, load: str, number: int, shape: Shape, *, programs: int, seed: int) -> Draw:
    """Round `number` of a load: new programs of a generator, those of a file again. All loads of a round have the same
    programs, which arrive the closer together the higher the rate.

    Args:
        source: a workload of `weft trace`, or a trace file.
        load: programs a second, `AS_RECORDED` or `CLOSED` (all at once).
        programs: how many; of a file, at most.

    Raises:
        BenchError: a file whose programs cannot be given that rate.
        TraceError: the file is no trace.
    """
    if source in WORKLOADS:
        arrivals = poisson(random.Random(f"arrivals {seed} {number}"), 1.0)  # noqa: S311  no secret
        made = generate(source, programs, arrivals, random.Random(f"programs {seed} {number}"))  # noqa: S311
        made = [replace(program, arrival_s=program.arrival_s / _rate(load)) for program in made]
    else:
        made = sorted(read(Path(source))[:programs], key=lambda program: program.arrival_s)
        made = _recorded(made, load, source)
    return fit(made, shape)


def _rate(load: str) -> float:
    return math.inf if load == CLOSED else float(load)


def _recorded(programs: list[TraceProgram], load: str, source: str) -> list[TraceProgram]:
    first_s = programs[0].arrival_s
    lasts_s = programs[-1].arrival_s - first_s
    factor = 1.0
    if load == CLOSED:
        factor = 0.0
    elif load != AS_RECORDED:
        if lasts_s == 0:
            raise BenchError(
                f"the programs of {source} all arrive at once, so --rates cannot stretch them; leave it out, or give "
                "the programs an arrival_s."
            )
        factor = (len(programs) - 1) / lasts_s / float(load)
    return [replace(program, arrival_s=(program.arrival_s - first_s) * factor) for program in programs]


def fit(programs: Sequence[TraceProgram], shape: Shape) -> Draw:
    """Scale programs, and cut what the engine does not hold."""
    cut_calls = 0
    fitted = []
    for program in programs:
        calls = {call.call_id: call for call in program.calls}
        by_id: dict[str, TraceCall] = {}
        for call in in_order(program.calls):
            small, is_cut = _fit_call(call, by_id, calls, shape)
            by_id[call.call_id] = small
            cut_calls += is_cut
        fitted.append(
            replace(
                program,
                arrival_s=_time(program.arrival_s, shape),
                calls=tuple(by_id[call.call_id] for call in program.calls),
            )
        )
    return Draw(fitted, cut_calls)


def _fit_call(
    call: TraceCall, fitted: dict[str, TraceCall], calls: dict[str, TraceCall], shape: Shape
) -> tuple[TraceCall, bool]:
    shared = round(call.shared_prefix_tokens * shape.scale)
    own = call.prompt_tokens - call.shared_prefix_tokens
    if call.parents:  # all of what the parent has stays all of it
        parent, before = fitted[call.parents[0]], calls[call.parents[0]]
        has = parent.prompt_tokens + parent.output_tokens
        whole = call.shared_prefix_tokens >= before.prompt_tokens + before.output_tokens
        shared = has if whole else min(shared, has)
    prompt = max(1, shared + max(round(own * shape.scale), own > 0))
    output = max(1, round(call.output_tokens * shape.scale))
    is_cut = prompt + output > shape.most_tokens
    if is_cut:
        output = min(output, shape.most_tokens - 1)
        prompt = min(prompt, shape.most_tokens - output)
    small = replace(
        call,
        prompt_tokens=prompt,
        output_tokens=output,
        shared_prefix_tokens=min(shared, prompt),
        gap_s=_time(call.gap_s, shape),
    )
    return small, is_cut


def _time(time_s: float, shape: Shape) -> float:
    scaled_s = time_s * shape.scale
    return round(scaled_s / STEP_S) * STEP_S if shape.whole_steps else scaled_s


class Prompts:
    """Prompts of random tokens that share what the trace says.

    Args:
        seed: the same seed gives the same prompts.
        tokens: the ids to draw from.
    """

    def __init__(self, seed: str, tokens: range) -> None:
        self._seed = seed
        self._tokens = tokens

    def make(self, program: TraceProgram, call: TraceCall, history: list[int]) -> list[int]:
        """The prompt of a call.

        Args:
            history: prompt and output of its first parent; empty for a call without parents, whose prompt begins as
                those of all programs of the same name.
        """
        shared = call.shared_prefix_tokens
        head = history[:shared] if call.parents else self._draw(f"name {program.name}", shared)
        return head + self._draw(f"call {program.program} {call.call_id}", call.prompt_tokens - len(head))

    def _draw(self, what: str, count: int) -> list[int]:
        return random.Random(f"{self._seed} {what}").choices(self._tokens, k=count)  # noqa: S311  no secret
