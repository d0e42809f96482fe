"""Programs, rounds and a fake engine for the tests of `weft.bench`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from weft.bench.clock import STEP_S, Clock
from weft.bench.load import Prompts
from weft.bench.replay import EngineCall
from weft.bench.results.records import Measurement, Outcome, Round, RoundCounts
from weft.core.sim import StepSample, TraceCall, TraceProgram

PROMPTS = Prompts("0", range(10, 900))
# The calls b and c follow a, c after a tool of two steps; d follows both. This takes 3 + max(2, 2 + 4) + 1 steps.
FORK = TraceProgram(
    "fork",
    (
        TraceCall("a", (), output_tokens=3, prompt_tokens=10),
        TraceCall("b", ("a",), output_tokens=2, prompt_tokens=14, shared_prefix_tokens=13),
        TraceCall("c", ("a",), output_tokens=4, prompt_tokens=14, shared_prefix_tokens=13, gap_s=2 * STEP_S),
        TraceCall("d", ("b", "c"), output_tokens=1, prompt_tokens=17, shared_prefix_tokens=16),
    ),
    name="fork",
)


class FakeEngine:
    """In each step of half a second, the first `slots` calls in flight get one token."""

    is_program_aware = False

    def __init__(self, *, counts_steps: bool = True, slots: int = 100) -> None:
        self._slots = slots
        self._time_s = 0.0
        self.clock = Clock(counts_steps=counts_steps, timer=lambda: self._time_s)
        self.sent: list[EngineCall] = []
        self._tokens_left: dict[str, int] = {}

    def activate(self) -> None:
        self._time_s += 100.0  # Meanwhile, other engines have stepped.

    def send(self, call: EngineCall, extra_args: dict[str, Any] | None) -> None:
        assert extra_args is None
        self.sent.append(call)
        self._tokens_left[call.request_id] = call.output_tokens

    def step(self) -> list[Any]:
        self.clock.begin_step()
        self._time_s += 0.5
        self.clock.end_step()
        for key in list(self._tokens_left)[: self._slots]:
            self._tokens_left[key] -= 1
        ended = [key for key, left in self._tokens_left.items() if left == 0]
        for key in ended:
            del self._tokens_left[key]
        return [SimpleNamespace(request_id=key, outputs=[SimpleNamespace(token_ids=[1, 2, 3])]) for key in ended]


def outcome(steps: int, tokens: int, path_tokens: int, unloaded_steps: int = 10) -> Outcome:
    return Outcome("p", "chat", steps, steps * 0.5, tokens, path_tokens, unloaded_steps)


def measurement(*programs: Outcome, **counts: Any) -> Measurement:
    all_counts = RoundCounts(steps=50, prompt_tokens=10, **counts)
    return Measurement(list(programs), 100, 50.0, all_counts, [StepSample(1, 0, 5, 0.5)])


def rounds(**steps: list[int]) -> list[Round]:
    """Rounds with one program of 10 tokens each; for each baseline, the program's steps in every round."""
    count = len(next(iter(steps.values())))
    return [
        Round("1", number, 100, 0, {name: measurement(outcome(own[number], 10, 10)) for name, own in steps.items()})
        for number in range(count)
    ]
