"""What a round gave, as it is kept in files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from weft.core.sim.step_time import StepSample


class Outcome(NamedTuple):
    """What became of one program."""

    program: str
    kind: str | None  # its name in the trace
    steps: int  # from its arrival to its end
    seconds: float
    tokens: int  # output, of all its calls
    path_tokens: int  # output, on its critical path
    unloaded_steps: int  # from its arrival to its end, had it been alone


@dataclass(slots=True)
class Counts:
    """What an engine did in one round. Tokens of prompts and outputs of calls; seconds of its scheduler."""

    steps: int = 0  # with tokens in them
    schedule_s: float = 0.0  # in schedule()
    update_s: float = 0.0  # in update_from_output()
    prompt_tokens: int = 0  # of calls when they started first
    cached_tokens: int = 0  # of these, found in the prefix cache
    computed_tokens: int = 0  # all that the steps computed
    recomputed_tokens: int = 0  # of these, those that the same call had computed before
    swapped_tokens: int = 0  # that came back from host memory
    preemptions: int = 0


@dataclass(slots=True)
class Run:
    """One baseline's play of all programs of a round."""

    programs: list[Outcome]  # in the order in which they ended
    steps: int  # from the clock's beginning to the last end: the makespan of a closed batch
    seconds: float
    counts: Counts
    samples: list[StepSample] = field(default_factory=list)


@dataclass(slots=True)
class Round:
    """One round of one load: every baseline's play of the same programs."""

    load: str
    number: int
    longest_tokens: int  # of a call
    cut_calls: int  # that were longer
    runs: dict[str, Run]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Round:
        """Read what `to_json` gave.

        Raises:
            KeyError, TypeError, ValueError: it is something else.
        """
        runs = {
            name: Run(
                programs=[Outcome(*row) for row in run["programs"]],
                steps=run["steps"],
                seconds=run["seconds"],
                counts=Counts(**run["counts"]),
                samples=[StepSample(*row) for row in run["samples"]],
            )
            for name, run in data["runs"].items()
        }
        return cls(data["load"], data["number"], data["longest_tokens"], data["cut_calls"], runs)
