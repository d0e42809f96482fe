"""The results of a round, as the journal keeps them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final, NamedTuple

from weft.core.sim.step_time import StepSample

FORMAT: Final = 4  # version of the journal and of results.json


class Outcome(NamedTuple):
    """One program under one baseline. Steps and seconds count from the program's arrival to its end."""

    program: str
    kind: str | None  # the program's name in the trace
    steps: int
    seconds: float
    tokens: int  # output tokens of all calls
    path_tokens: int  # output tokens on the critical path
    unloaded_steps: int  # steps that the program takes when it is alone
    tenant: str | None = None


@dataclass(slots=True)
class Counts:
    """The work of an engine in one round, in tokens of prompts and outputs, and seconds of its scheduler.

    The seconds of calls are those of the steps: each step counts once for each call that waits during it, or is in it.
    """

    steps: int = 0  # steps that computed at least one token
    schedule_s: float = 0.0  # time in schedule()
    update_s: float = 0.0  # time in update_from_output()
    prompt_tokens: int = 0  # prompt tokens of all calls, counted when a call starts for the first time
    cached_tokens: int = 0  # the part of `prompt_tokens` that was found in the prefix cache
    computed_tokens: int = 0  # all tokens that the steps computed
    recomputed_tokens: int = 0  # the part of `computed_tokens` that the same program had computed before
    swapped_tokens: int = 0  # tokens whose KV came back from host memory
    preemptions: int = 0
    calls: int = 0  # that have started
    waiting_steps: int = 0  # steps of calls that were not in them
    running_steps: int = 0  # steps of calls that were in them
    waiting_s: float = 0.0  # seconds of calls that were not in the step
    copying_s: float = 0.0  # seconds of calls in the step, while KV was copied to host memory or back
    scheduling_s: float = 0.0  # seconds of calls in the step, in schedule() and update_from_output()
    computing_s: float = 0.0  # the other seconds of calls in the step: the model, and the rest of vLLM


@dataclass(slots=True)
class Measurement:
    """One baseline's replay of all programs of a round."""

    programs: list[Outcome]  # in the order in which the programs ended
    steps: int  # from the start of the clock to the last program's end; the makespan of a closed batch
    seconds: float  # likewise
    counts: Counts
    samples: list[StepSample] = field(default_factory=list)


@dataclass(slots=True)
class Round:
    """One round of one load: the measurements of all baselines on the same programs."""

    load: str
    number: int
    max_call_tokens: int  # the most tokens that a call may have
    truncated_calls: int  # calls that had more tokens, and were truncated
    measurements: dict[str, Measurement]  # by baseline

    def to_json(self) -> dict[str, Any]:
        """Returns a dictionary that `from_json` reads."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Round:
        """Read a dictionary that `to_json` returned.

        Raises:
            KeyError, TypeError, ValueError: the dictionary has another shape.
        """
        measurements = {
            name: Measurement(
                programs=[Outcome(*program) for program in row["programs"]],
                steps=row["steps"],
                seconds=row["seconds"],
                counts=Counts(**row["counts"]),
                samples=[StepSample(*sample) for sample in row["samples"]],
            )
            for name, row in data["measurements"].items()
        }
        return cls(data["load"], data["number"], data["max_call_tokens"], data["truncated_calls"], measurements)
