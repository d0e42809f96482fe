"""The programs of a round, from a workload or a trace file, scaled down to what the engine can hold."""

from __future__ import annotations

import math
import random
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from weft.bench.clock import STEP_S
from weft.core.errors import BenchError
from weft.core.trace.format import TraceCall, TraceProgram, in_order, read
from weft.core.trace.workloads import WORKLOADS, generate, poisson


class Prompts:
    """Makes prompts of random tokens, which share prefixes as the trace says.

    The same `seed` gives the same prompts.
    """

    def __init__(self, seed: str, token_ids: range) -> None:
        self._seed = seed
        self._token_ids = token_ids

    def make(self, program: TraceProgram, call: TraceCall, history: list[int]) -> list[int]:
        """The prompt of a call, as `call.prompt_tokens` token ids.

        Args:
            history: prompt and output of the call's first parent. It is not used for a call without parents, whose
                prompt begins like the prompts of all programs of the same name.
        """
        shared = call.shared_prefix_tokens
        prefix = history[:shared] if call.parents else self._choose(f"name {program.name}", shared)
        return prefix + self._choose(f"call {program.program} {call.call_id}", call.prompt_tokens - len(prefix))

    def _choose(self, key: str, count: int) -> list[int]:
        """The same key gives the same tokens."""
        return random.Random(f"{self._seed} {key}").choices(self._token_ids, k=count)  # noqa: S311  not a secret


AS_RECORDED: Final = "as recorded"
CLOSED: Final = "closed"


@dataclass(frozen=True, slots=True)
class Scaling:
    """How programs are made small enough for the engine.

    Args:
        factor: a factor of all lengths in tokens and all times, so that a rate is the same load at any scale.
        max_call_tokens: the most tokens of a call, prompt and output together; a longer call is truncated.
        whole_steps: whether times are rounded to whole steps.
    """

    factor: float
    max_call_tokens: int
    whole_steps: bool

    def length(self, tokens: int) -> int:
        return round(tokens * self.factor)

    def time_s(self, time_s: float) -> float:
        scaled_s = time_s * self.factor
        return round(scaled_s / STEP_S) * STEP_S if self.whole_steps else scaled_s


@dataclass(frozen=True, slots=True)
class RoundPrograms:
    """The programs of one round, the same for all baselines. Times are seconds of the clock by which calls arrive."""

    programs: list[TraceProgram]
    truncated_calls: int


def rate_name(rate: float) -> str:
    """The name of the load in which so many programs arrive a second."""
    return f"{rate:g}"


def make_round(source: str, load: str, number: int, scaling: Scaling, *, programs: int, seed: int) -> RoundPrograms:
    """The programs of round `number` of a load.

    Each round of a workload has new programs. Each round of a trace file has the file's programs. All loads of a round
    have the same programs, which arrive closer together when the rate is higher.

    Args:
        load: programs a second, `AS_RECORDED`, or `CLOSED` (all programs at once).
        programs: the number of programs; for a trace file, the maximum.

    Raises:
        BenchError: the programs of a file all arrive at once, so they have no rate that could be changed.
        TraceError: the file is not a trace.
    """
    if source in WORKLOADS:
        arrivals = poisson(random.Random(f"arrivals {seed} {number}"), 1.0)  # noqa: S311  not a secret
        made = generate(source, programs, arrivals, random.Random(f"programs {seed} {number}"))  # noqa: S311
        rate = math.inf if load == CLOSED else float(load)
        made = [replace(program, arrival_s=program.arrival_s / rate) for program in made]
    else:
        made = sorted(read(Path(source))[:programs], key=lambda program: program.arrival_s)
        made = _with_rate(made, load, source)
    return scale_programs(made, scaling)


def _with_rate(programs: list[TraceProgram], load: str, source: str) -> list[TraceProgram]:
    """Recorded programs, which arrive at the rate of a load."""
    first_s = programs[0].arrival_s
    period_s = programs[-1].arrival_s - first_s
    factor = 1.0
    if load == CLOSED:
        factor = 0.0
    elif load != AS_RECORDED:
        if period_s == 0:
            raise BenchError(
                f"the programs of {source} all arrive at once, so --rates cannot stretch their arrivals; leave --rates "
                "out, or give the programs different values of arrival_s."
            )
        factor = (len(programs) - 1) / period_s / float(load)
    return [replace(program, arrival_s=(program.arrival_s - first_s) * factor) for program in programs]


def scale_programs(programs: Sequence[TraceProgram], scaling: Scaling) -> RoundPrograms:
    """Scale lengths and times, and truncate calls too long for the engine. Hash ids, of recorded lengths, go."""
    truncated_calls = 0
    scaled_programs = []
    for program in programs:
        calls = {call.call_id: call for call in program.calls}
        scaled: dict[str, TraceCall] = {}
        for call in in_order(program.calls):
            scaled[call.call_id], is_truncated = _scale_call(call, calls, scaled, scaling)
            truncated_calls += is_truncated
        scaled_programs.append(
            replace(
                program,
                arrival_s=scaling.time_s(program.arrival_s),
                deadline_s=None if program.deadline_s is None else scaling.time_s(program.deadline_s),
                block_tokens=None,
                calls=tuple(scaled[call.call_id] for call in program.calls),
            )
        )
    return RoundPrograms(scaled_programs, truncated_calls)


def _scale_call(
    call: TraceCall, calls: Mapping[str, TraceCall], scaled: Mapping[str, TraceCall], scaling: Scaling
) -> tuple[TraceCall, bool]:
    """The scaled call, and whether it was truncated.

    Args:
        calls: the program's calls, by id.
        scaled: those calls that were scaled already, all parents of this call among them.
    """
    shared = scaling.length(call.shared_prefix_tokens)
    own = call.prompt_tokens - call.shared_prefix_tokens
    if call.parents:
        # A call that shares its parent's whole prompt and output shares the whole of them after rounding, too.
        parent, scaled_parent = calls[call.parents[0]], scaled[call.parents[0]]
        parent_tokens = scaled_parent.prompt_tokens + scaled_parent.output_tokens
        shares_all = call.shared_prefix_tokens >= parent.prompt_tokens + parent.output_tokens
        shared = parent_tokens if shares_all else min(shared, parent_tokens)
    prompt = max(1, shared + max(scaling.length(own), own > 0))
    output = max(1, scaling.length(call.output_tokens))
    is_truncated = prompt + output > scaling.max_call_tokens
    if is_truncated:
        output = min(output, scaling.max_call_tokens - 1)
        prompt = min(prompt, scaling.max_call_tokens - output)
    scaled_call = replace(
        call,
        prompt_tokens=prompt,
        output_tokens=output,
        shared_prefix_tokens=min(shared, prompt),
        hash_ids=array("q"),
        gap_s=scaling.time_s(call.gap_s),
    )
    return scaled_call, is_truncated
