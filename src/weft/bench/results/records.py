"""What a benchmark measured, and the journal that keeps it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

from pydantic import TypeAdapter

from weft.core.errors import BenchError
from weft.core.sim.settings import StepSample

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
class RoundCounts:
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
    seconds: float  # between the same two moments
    counts: RoundCounts
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
        """Return the round as values that JSON can hold."""
        return asdict(self)


_ROUND: Final = TypeAdapter(Round)


FILE: Final = "rounds.jsonl"
_SHOWN: Final = 60  # characters of a setting in an error


class Journal:
    """`rounds.jsonl`: one line with the settings, then one line for each finished round.

    Args:
        settings: the settings under which the rounds are comparable, as JSON.

    Raises:
        BenchError: the file has other settings, is not a journal, or cannot be read or written.
    """

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        self.path = folder / FILE
        self.rounds: dict[tuple[str, int], Round] = {}  # by load and number
        try:
            folder.mkdir(parents=True, exist_ok=True)
            text = self.path.read_text(encoding="utf-8") if self.path.exists() else ""
            # A session that is killed may leave an incomplete last line.
            complete = text[: text.rfind("\n") + 1]
            if complete:
                self._read(complete.splitlines(), settings)
                if complete != text:
                    self.path.write_text(complete, encoding="utf-8")
            else:
                self.path.write_text(json.dumps({"settings": settings}) + "\n", encoding="utf-8")
        except OSError as error:
            raise BenchError(f"{self.path}: {error.strerror or error}. Choose another --out.") from None

    def _read(self, lines: list[str], settings: dict[str, Any]) -> None:
        try:
            found = json.loads(lines[0])["settings"]
            if found != settings:
                raise self._other_settings(found, settings)
            for line in lines[1:]:
                round_ = _ROUND.validate_json(line)
                self.rounds[round_.load, round_.number] = round_
        except (KeyError, TypeError, ValueError) as error:
            if isinstance(error, BenchError):
                raise
            raise BenchError(f"{self.path} is not a journal of `weft bench`; choose another --out.") from None

    def _other_settings(self, found: dict[str, Any], settings: dict[str, Any]) -> BenchError:
        keys = [key for key in settings | found if found.get(key) != settings.get(key)]
        differences = ", ".join(
            f"{key}: {_short(found.get(key))} there, {_short(settings.get(key))} now" for key in keys
        )
        return BenchError(
            f"{self.path.parent} holds rounds of other settings ({differences}). Choose another --out, give the same "
            f"settings to resume, or delete {self.path} to begin again."
        )

    def add(self, round_: Round) -> None:
        """Keep a finished round."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(round_.to_json()) + "\n")
        self.rounds[round_.load, round_.number] = round_


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 1]}…"
