"""The batch of a simulated replica: its calls, the tokens of the next step, and the next event of each call.

Calls that decode are not updated in each step. Heaps hold the steps with which calls end, and the times at which they
will have used their quanta. So the replica knows how many steps it can jump over.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import cast

from weft.core.policies import Call, Rank, StepTokens
from weft.core.sim.kv_cache.cache import KvCache, Segment
from weft.core.sim.settings import SimSettings
from weft.core.sim.sim_programs import SimCall


@dataclass(slots=True)
class Jump:
    """Steps with the same batch. Step number n, from 0, takes first_s + n * growth_s seconds."""

    began_s: float
    first_s: float
    growth_s: float
    steps: int

    @property
    def end_s(self) -> float:
        """The time at which the last step ends."""
        return self.began_s + self.duration_s(self.steps)

    def duration_s(self, steps: int) -> float:
        """Seconds that the first `steps` steps take together."""
        return steps * self.first_s + self.growth_s * (steps * (steps - 1) // 2)

    def steps_until(self, duration_s: float) -> int:
        """The fewest steps, at least one, that take `duration_s` seconds or more."""
        if duration_s <= self.first_s:
            return 1
        if self.growth_s == 0:
            steps = math.ceil(duration_s / self.first_s)
        else:
            linear = self.first_s - self.growth_s / 2
            root = math.sqrt(linear * linear + 2 * self.growth_s * duration_s)
            steps = math.ceil((root - linear) / self.growth_s)
        # The estimate may be a step off, because floats are rounded.
        while self.duration_s(steps) < duration_s:
            steps += 1
        while steps > 1 and self.duration_s(steps - 1) >= duration_s:
            steps -= 1
        return steps


class RunningBatch:
    """The calls that run, and the steps that have been made.

    Args:
        token_s: Service for each computed token, in seconds. None: service is the duration of the steps.
        block_tokens: Calls take KV in blocks of this many tokens.
    """

    def __init__(self, token_s: float | None, block_tokens: int = 1) -> None:
        self.ranks: dict[SimCall, Rank] = {}  # of the running calls
        self.chunks: dict[SimCall, int] = {}  # of the calls that compute a prompt: their tokens in the next step
        self.admitted: dict[SimCall, None] = {}  # calls admitted before the next step, in this order
        self.decoding = 0  # number of calls that decode
        self.steps = 0  # steps that the replica has made so far
        self._token_s = token_s
        self._block_tokens = block_tokens
        # The decoding calls by (context - steps) % block_tokens, which does not change while a call decodes.
        self._phases = [0] * block_tokens
        self._busy_s = 0.0  # duration of these steps
        self._context_tokens = 0  # tokens that the decoding calls attend to in the next step
        self._pushes = itertools.count()  # breaks ties, so that calls are never compared
        self._ends: list[tuple[int, int, SimCall]] = []  # heap by the step with which a decoding call ends
        self._quanta: list[tuple[float, int, SimCall]] = []  # heap by the decode clock when a call has used its quantum
        self._charges: list[tuple[int, int, SimCall]] = []  # heap by the step after which a decoding call is charged

    @property
    def decode_clock_s(self) -> float:
        """The service of a call that decodes in every step, in seconds. The difference of two readings is a charge."""
        return self._busy_s if self._token_s is None else self.steps * self._token_s

    @property
    def growth_tokens(self) -> int:
        """The most tokens of KV that the next step adds."""
        return self.decoding + len(self.chunks)

    def step_tokens(self) -> tuple[int, int, int]:
        """The next step's tokens: decoded ones, those of prompts, and those in the KV cache that both attend to."""
        computed_tokens = sum(call.context_tokens - call.prefill_left for call, tokens in self.chunks.items() if tokens)
        return self.decoding, sum(self.chunks.values()), self._context_tokens + computed_tokens

    def padding(self, ahead: int, chunks: Mapping[Call, int]) -> int:
        """The tokens by which the blocks of the running calls exceed their tokens.

        Args:
            ahead: 0: with the blocks for the next step. -1: with those for the steps that have been made, in which the
                KV of the tokens generated last is not computed yet.
            chunks: By call that computes a prompt, its tokens in the next step.
        """
        block_tokens = self._block_tokens
        if block_tokens == 1:
            return 0
        padding = ahead * self.decoding
        for phase, count in enumerate(self._phases):
            if count:
                padding += count * (-(phase + self.steps + ahead) % block_tokens)
        for call in self.chunks:
            padding += -(call.context_tokens - call.prefill_left + chunks.get(call, 0)) % block_tokens
        return padding

    def growing_tokens(self) -> int:
        """The tokens of the blocks that decoding calls take in the next step, because their last ones are full."""
        return self._phases[-self.steps % self._block_tokens] * self._block_tokens

    def divide_step(self, step_tokens: int, now_s: float) -> StepTokens:
        """Begin to divide a step's tokens: one for each call that decodes, the rest for prompts in rank order."""
        prompts = [call for call in self.in_rank_order(self.chunks) if call.ready_s <= now_s]
        return StepTokens(step_tokens - self.decoding, [(call, call.prefill_left) for call in prompts])

    def lowest_rank(self) -> Rank:
        """The rank of the running call that is preempted first. At least one call must run."""
        return max(self.ranks.values())

    def lowest_call(self) -> SimCall:
        """The running call that is preempted first. At least one call must run."""
        return max(self.ranks, key=self.ranks.__getitem__)

    def in_rank_order(self, calls: dict[SimCall, None] | dict[SimCall, int]) -> list[SimCall]:
        return sorted(calls, key=lambda call: self.ranks[call])

    # -- calls enter and leave

    def start_decoding(self, call: SimCall) -> None:
        """A call has its prompt in the KV cache and generates a token with each step from now on."""
        self.decoding += 1
        self._phases[(call.context_tokens - self.steps) % self._block_tokens] += 1
        self._context_tokens += call.context_tokens
        call.charged_step, call.charged_clock_s = self.steps, self.decode_clock_s
        call.end_step = self.steps + call.spec.output_tokens - call.output_tokens
        heapq.heappush(self._ends, (call.end_step, next(self._pushes), call))
        self.watch_quantum(call)

    def watch_quantum(self, call: SimCall) -> None:
        """Note when a decoding call, which has just been charged, will have used its quantum or is to be charged."""
        if call.quantum_s < math.inf:
            heapq.heappush(self._quanta, (call.charged_clock_s + call.quantum_s, next(self._pushes), call))
        if call.charge_at_tokens < math.inf:
            call.charge_step = self.steps + max(1, int(call.charge_at_tokens) - call.output_tokens)
            heapq.heappush(self._charges, (call.charge_step, next(self._pushes), call))

    def remove(self, call: SimCall) -> None:
        """A call ends or is preempted."""
        if call.end_step >= 0:
            self.decoding -= 1
            self._phases[(call.context_tokens - self.steps) % self._block_tokens] -= 1
            self._context_tokens -= call.context_tokens
            call.end_step = call.charge_step = -1
        self.chunks.pop(call, None)
        del self.ranks[call]

    # -- steps

    def advance(self, jump: Jump) -> None:
        """The steps of a jump have been made."""
        self.steps += jump.steps
        self._busy_s += jump.duration_s(jump.steps)
        self._context_tokens += self.decoding * jump.steps

    def steps_of_chunks(self, now_s: float) -> float:
        """How many steps compute as much of the same prompts as the next one, and end none. One prompt gets all tokens
        that a step has left, or else the first step ends one."""
        served = [(call, tokens) for call, tokens in self.chunks.items() if tokens]
        if any(call.ready_s > now_s for call in self.chunks) or len(served) != 1:
            return 1
        call, tokens = served[0]
        return (call.prefill_left - 1) // tokens

    def steps_to_next_event(self, jump: Jump) -> float:
        """The steps of a jump after which the first decoding call ends or may have used its quantum."""
        while self._ends and self._ends[0][2].end_step != self._ends[0][0]:
            heapq.heappop(self._ends)
        steps = self._ends[0][0] - self.steps if self._ends else math.inf
        while self._charges and self._charges[0][2].charge_step != self._charges[0][0]:
            heapq.heappop(self._charges)
        if self._charges:
            steps = min(steps, self._charges[0][0] - self.steps)
        if self._quanta:
            left_s = self._quanta[0][0] - self.decode_clock_s
            steps = min(steps, jump.steps_until(left_s) if self._token_s is None else math.ceil(left_s / self._token_s))
        return steps

    def pop_calls_to_charge(self, jump: Jump, *, every_call: bool) -> list[SimCall]:
        """Return the calls to charge after the steps of a jump, in rank order.

        These are the calls that compute a prompt, and those that end, have used their quantum or are due by
        `charge_at_tokens`. vLLM sorts its batch before it admits calls. Therefore calls that were admitted before a
        single step come last. `every_call` says whether to return all running calls.
        """
        calls = dict.fromkeys(self.ranks if every_call else self.chunks)
        while self._ends and self._ends[0][0] <= self.steps:
            end_step, _, call = heapq.heappop(self._ends)
            if call.end_step == end_step:
                calls[call] = None
        while self._charges and self._charges[0][0] <= self.steps:
            charge_step, _, call = heapq.heappop(self._charges)
            if call.charge_step == charge_step:
                calls[call] = None
        clock_s = self.decode_clock_s
        while self._quanta and self._quanta[0][0] <= clock_s:
            used_s, _, call = heapq.heappop(self._quanta)
            if call.end_step >= 0 and call.charged_clock_s + call.quantum_s == used_s:
                calls[call] = None
        in_order = self.in_rank_order(calls)
        if jump.steps > 1 or not self.admitted:
            return in_order
        return [call for call in in_order if call not in self.admitted] + [c for c in self.admitted if c in calls]

    def is_empty(self) -> bool:
        """Whether no call runs and all counts are zero."""
        return not (self.ranks or self.chunks or self.decoding or self._context_tokens or any(self._phases))


# -- what the next step of a simulated replica has room for, if some calls started and others were preempted


class SimRoom:
    """The `Room` of a simulated replica. KV that another running call reads is neither needed nor given back.

    Args:
        free_tokens: The tokens of KV that calls may take.
        steps: The steps that the replica has made. A decoding call has generated a token with each step since its last
            charge.
    """

    def __init__(
        self, kv: KvCache, free_tokens: float, steps: int, step_tokens: StepTokens, settings: SimSettings
    ) -> None:
        self._kv = kv
        self._step_tokens = step_tokens
        self._free_tokens = free_tokens
        self._steps = steps
        self._settings = settings
        self._counts_blocks = settings.block_tokens > 1
        self._pins: dict[Segment, int] = {}  # the pins of segments whose number would change
        # Prefixes that starting calls would bring, with their lengths in tokens.
        self._prefixes: dict[Hashable, int] = {}
        self._call: SimCall | None = None
        self._segment: Segment | None = None
        self._hit = 0

    def offer(self, call: Call) -> bool:
        self._call = cast("SimCall", call)
        self._segment, self._hit = self._kv.find(self._call.prefixes()) if self._settings.shares_prefixes else (None, 0)
        return self._step_tokens.left_for(call) > 0

    def fits(self) -> bool:
        return self._needed_tokens() <= self._free_tokens

    def start(self) -> None:
        call = cast("SimCall", self._call)
        if not self._settings.unit_steps:
            self._step_tokens.take(call.tokens_to_compute(max(self._hit, self._brought_tokens())))
        self._free_tokens -= self._needed_tokens()
        segment = self._segment
        while segment is not None:
            pins = self._pins_of(segment)
            self._pins[segment] = pins + 1
            if pins:
                break
            segment = segment.parent
        if self._settings.shares_prefixes:
            self._prefixes.update(self._kv.shared_prefixes(call))

    def keep(self, call: Call) -> None:
        self._step_tokens.keep(call)

    def preempt(self, call: Call) -> None:
        self._step_tokens.preempt(call)
        call = cast("SimCall", call)
        own = cast("Segment", call.segment)
        segment: Segment | None = own
        is_decoding = call.end_step >= 0
        uncounted = self._steps - call.charged_step if is_decoding else 0  # tokens that its segment lacks yet
        if self._counts_blocks:
            self._free_tokens += self._blocks(call.context_tokens - call.prefill_left + uncounted) - own.end
        else:  # with the token that the call would generate in the next step
            self._free_tokens += 1 + uncounted
        while segment is not None:
            self._pins[segment] = self._pins_of(segment) - 1
            if self._pins[segment]:
                return
            self._free_tokens += segment.tokens
            segment = segment.parent

    def _needed_tokens(self) -> int:
        """The offered call's tokens that no running call has."""
        call, segment = cast("SimCall", self._call), self._segment
        while segment is not None and not self._pins_of(segment):
            segment = segment.parent
        shared = min(segment.end, self._hit) if segment is not None else 0
        return self._blocks(call.context_tokens) - max(shared, self._brought_tokens())

    def _blocks(self, tokens: int) -> int:
        """The tokens that fit into the blocks which `tokens` tokens take."""
        return -(-tokens // self._settings.block_tokens) * self._settings.block_tokens

    def _brought_tokens(self) -> int:
        """The tokens of the offered call's prefix that starting calls would bring."""
        if self._prefixes:
            for key, shared in self._kv.shared_prefixes(cast("SimCall", self._call)):
                if key in self._prefixes:
                    return min(self._prefixes[key], shared)
        return 0

    def _pins_of(self, segment: Segment) -> int:
        return self._pins.get(segment, segment.pins)
