"""Astraea's Stateful-MLFQ (§4.3.2, Algorithm 1), with the highest response ratio next inside a queue (§4.3.3).

Where the paper leaves something open, Weft reads it so (docs/reference/policies.md#astraea):

- The cost of a call is the number of tokens that are computed for the first time. Prompts are long and mostly cached.
  If whole prompts counted, all programs would be in the last queue at once.
- Ageing applies to all queues but the first. In the paper it applies to the last queue only, so calls of the queues in
  between may starve.
- A free slot is filled from the first queue that has a call. In the paper a queue is served until it is empty.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from weft.core.errors import PolicyError
from weft.core.policies.papers.multilevel import Starvation
from weft.core.policies.policy import Policy, PolicyEvent, register
from weft.core.policies.queues import RankQueue, WaitingCalls
from weft.core.policies.steps import StepCosts
from weft.core.policies.view import Call, ProgramEnded, ProgramView, Rank
from weft.core.prediction import OutputLengths
from weft.core.registries import check_number

THRESHOLDS_TOKENS: Final = (128, 256, 384, 512, 640)
TAU: Final = 5.0
_LEAST_S: Final = 1e-6  # of a predicted service, which a ratio is divided by


@dataclass(frozen=True, slots=True)
class AstraeaParameters:
    """The parameters of Astraea.

    Args:
        thresholds_tokens: A threshold for each queue but the last, which has that of the queue before it. A call that
            computes more new tokens than its queue's threshold moves its program one queue down. Other calls move it
            one queue up.
        tau: A call moves to the first queue at this ratio of wait and predicted service to predicted service.
        preempt: Whether a call of a better queue takes the place of a running one. The paper does not preempt.
        wait: The wait that counts for the order inside a queue: that of the whole "program" so far, or of the "call".

    Raises:
        PolicyError: The thresholds are not positive and increasing, tau is not above 1, or another value is unknown.
    """

    thresholds_tokens: tuple[int, ...] = THRESHOLDS_TOKENS
    tau: float = TAU
    preempt: bool = False
    wait: Literal["program", "call"] = "program"

    def __post_init__(self) -> None:
        values: object = self.thresholds_tokens
        if not isinstance(values, Sequence) or isinstance(values, str) or not values:
            raise PolicyError(f"thresholds_tokens must be a list of tokens, at least one, not {values!r:.60}.")
        edges = [0.0, *(check_number(each, "each of thresholds_tokens", PolicyError) for each in values)]
        if any(not low < high < math.inf for low, high in itertools.pairwise(edges)):
            raise PolicyError(f"thresholds_tokens must be positive and increasing, not {list(values)!r:.80}.")
        if not check_number(self.tau, "tau", PolicyError) > 1:
            raise PolicyError(f"tau must be above 1, and inf to never move calls up by age, not {self.tau}.")
        if not isinstance(self.preempt, bool):
            raise PolicyError(f"preempt must be true or false, not {self.preempt!r:.60}.")
        if self.wait not in ("program", "call"):
            raise PolicyError(f'wait must be "program" or "call", not {self.wait!r:.60}.')


@dataclass(eq=False, slots=True)
class _Program:
    """What is known of a program that has not ended."""

    level: int = 0
    context_tokens: int = 0  # of its call that left last; the next call finds most of them in the prefix cache
    forgiven_s: float = 0.0  # its wait when it was last moved up by age, which does not count again
    calls: dict[Call, int] = field(default_factory=dict)  # calls in progress, each with the number of calls before it


@register("astraea", "six queues by the tokens of the latest calls, and highest response ratio next", AstraeaParameters)
class Astraea(Policy):
    """Programs whose calls compute few tokens before they yield to a tool go first.

    Inside a queue, the call with the highest ratio of wait to predicted service goes first. The prediction follows from
    the output lengths of earlier calls of programs with the same name.
    """

    order_follows_clock = True

    def __init__(
        self, thresholds_tokens: Sequence[int], tau: float, preempt: bool, wait: Literal["program", "call"]
    ) -> None:
        super().__init__()
        self.waiting = ByResponseRatio()
        self.preempts = preempt
        self.costs = StepCosts()
        self._thresholds_tokens = tuple(thresholds_tokens)
        self._counts_program_wait = wait == "program"
        self._programs: dict[ProgramView, _Program] = {}
        self._starvation = Starvation(None if math.isinf(tau) else tau - 1)
        self._lengths = OutputLengths()
        self._arrivals = itertools.count()

        self.levels = len(self._thresholds_tokens) + 1

    def rank(self, call: Call, now_s: float) -> Rank:
        view = call.program
        program = self._programs.setdefault(view, _Program())
        program.calls[call] = max(0, view.calls - 1)
        call.predicted_service_s = max(_LEAST_S, self._predict_s(call, program))
        return Rank(program.level, now_s, next(self._arrivals))

    def start(self, call: Call, now_s: float) -> None:
        self.waiting.now_s = now_s
        super().start(call, now_s)
        self._starvation.discard(call)

    def leave(self, call: Call) -> None:
        super().leave(call)
        self._starvation.discard(call)
        program = self._programs.get(call.program)
        calls_before = program.calls.pop(call, None) if program is not None else None
        if program is None or calls_before is None:  # the program has ended before
            return
        if call.computed_tokens + call.output_tokens == 0:  # it was aborted, or moved to another engine, before it ran
            return
        self._lengths.observe(call.program.name, None, calls_before, call.output_tokens)
        program.context_tokens = call.prompt_tokens + call.output_tokens
        last = len(self._thresholds_tokens)
        if call.computed_tokens + call.output_tokens > self._thresholds_tokens[min(program.level, last - 1)]:
            program.level = min(program.level + 1, last)
        else:
            program.level = max(program.level - 1, 0)

    def on_event(self, event: PolicyEvent) -> None:
        match event:
            case StepCosts():
                self.costs = event
            case ProgramEnded(program):
                self._programs.pop(program, None)

    def decide(self, now_s: float) -> list[Call]:
        self.waiting.now_s = now_s
        return super().decide(now_s)

    def promote(self, now_s: float) -> list[Call]:
        aged = self._starvation.pop_starved(now_s)
        aged.sort(key=lambda call: call.rank)
        for call in aged:
            call.rank = call.rank._replace(level=0)
            self.waiting.update(call)
            program = self._programs.get(call.program)
            if program is not None:
                program.level = 0
                program.forgiven_s = call.program.attained.wait_s + call.wait_s + now_s - call.waiting_since_s
        return aged

    def next_change_s(self) -> float:
        return self._starvation.next_s()

    def outranks(self, call: Call, running: Call) -> bool:
        return call.rank.level < running.rank.level

    def level_of(self, program: ProgramView) -> int:
        """The queue that a program's next call enters."""
        found = self._programs.get(program)
        return found.level if found is not None else 0

    def wait(self, call: Call, now_s: float) -> None:
        """A call waits from now on. Its rank says since when it would have waited without a pause."""
        self.waiting.now_s = call.waiting_since_s = now_s
        waited_s = call.wait_s + (call.program.attained.wait_s if self._counts_program_wait else 0.0)
        call.rank = call.rank._replace(order=now_s - waited_s)
        self.waiting.push(call)
        program = self._programs.get(call.program)
        if call.rank.level > 0 and program is not None:
            waited_s = call.program.attained.wait_s + call.wait_s - program.forgiven_s
            self._starvation.watch(call, max(0.0, waited_s), call.predicted_service_s)

    def _predict_s(self, call: Call, program: _Program) -> float:
        """The predicted service of a call that is alone in its steps, and finds its program's context cached."""
        output_tokens = self._lengths.mean_tokens(call.program.name, None, program.calls[call])
        new_tokens = max(0, call.prompt_tokens - program.context_tokens)
        return new_tokens * self.costs.prefill_token_s + output_tokens * self._decode_s

    @property
    def _decode_s(self) -> float:
        """Seconds for an output token of a call that is alone in its steps."""
        return self.costs.fixed_s + self.costs.decode_token_s


@register(
    "astraea-oracle", "astraea, which knows the output lengths as in its paper", AstraeaParameters, simulation_only=True
)
class AstraeaOracle(Astraea):
    """Astraea with the true output length of each call, as in all results of the paper."""

    def _predict_s(self, call: Call, program: _Program) -> float:
        return call.predicted_own_tokens * self._decode_s


_WIDTH: Final = math.log(1.1)  # of a bucket, in which a call may go before another whose ratio is up to 10 % higher


class ByResponseRatio(WaitingCalls):
    """Waiting calls: those of the first queue first, and in a queue the call with the highest response ratio (eq. 4).

    The ratio of a call's wait to its service grows faster for short calls, so the order changes while calls wait. Calls
    of about the same service are in one bucket. Inside a bucket they go by their waits, an order that does not change,
    so only the first calls of the buckets have to be compared.

    A call's rank is its queue, the time since which it counts as waiting, and its arrival. Its `predicted_service_s`
    must not change while it waits here.
    """

    def __init__(self) -> None:
        super().__init__()
        self._queues: dict[int, dict[int, RankQueue[Call]]] = {}  # by level, then by bucket; none is empty
        self._places: dict[Call, tuple[int, int]] = {}

    def push(self, member: Call) -> None:
        if member in self._places:
            raise ValueError(f"already in the queue: {member}")
        bucket = math.floor(math.log(member.predicted_service_s) / _WIDTH)
        place = self._places[member] = member.rank.level, bucket
        self._queues.setdefault(place[0], {}).setdefault(bucket, RankQueue()).push(member)

    def update(self, member: Call) -> None:
        if member in self._places:
            self.discard(member)
            self.push(member)

    def discard(self, member: Call) -> None:
        place = self._places.pop(member, None)
        if place is None:
            return
        level, bucket = place
        buckets = self._queues[level]
        buckets[bucket].discard(member)
        if not buckets[bucket]:
            del buckets[bucket]
            if not buckets:
                del self._queues[level]

    def peek(self) -> Call:
        if not self._queues:
            raise IndexError("the queue is empty")
        buckets = self._queues[min(self._queues)]
        return min((heap.peek() for heap in buckets.values()), key=self._key)

    def pop(self) -> Call:
        member = self.peek()
        self.discard(member)
        return member

    def check_integrity(self) -> None:
        for heap in (heap for buckets in self._queues.values() for heap in buckets.values()):
            heap.check_integrity()
        for member, (level, _) in self._places.items():
            if level != member.rank.level:
                raise AssertionError(f"in queue {level}: {member}")

    def _key(self, call: Call) -> tuple[float, Rank]:
        return (call.rank.order - self.now_s) / call.predicted_service_s, call.rank

    def __contains__(self, member: object) -> bool:
        return member in self._places

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[Call]:
        for level in sorted(self._queues):
            yield from heapq.merge(*self._queues[level].values(), key=self._key)
