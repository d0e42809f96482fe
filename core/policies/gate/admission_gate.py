"""The gate's counts: which programs are open, and how much of the KV cache their contexts take.

`weft.core.policies.gate.gated` opens and closes programs by these counts. A program that is shut out costs nothing. If
the contexts of open programs exceed the cache, they evict each other, and each call computes its program's context
again. If they exceed it only by a little, that is most of the engine's work.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

from weft.core.policies.queues import RankQueue
from weft.core.policies.steps import StepCosts
from weft.core.policies.view import Call, ProgramView, Rank
from weft.core.prediction import ReturnTimes, ReusedPart
from weft.core.prediction.samples import Samples, SamplesByName

# Programs open until their contexts take this part of the KV cache; the rest is for what nobody expects.
FILL: Final = 0.92
# With foresight, the cache also has room for what so many further calls of each open program are expected to add, times
# the share of a call's time that its prompt takes. Where prompts take most of the time, more open programs only evict
# each other. Where outputs do, they make larger batches. With host memory, the growth counts in the KV cache's part of
# both: what outgrows the KV cache comes back from host memory, while a program that waits outside loses time.
CALLS_AHEAD: Final = 3
_KNOWN_FROM: Final = 8  # calls from which on it is known what a call adds to a context
_LATEST: Final = 0.05  # weight of the latest call in the mean output, and in the mean of computed prompt tokens


@dataclass(eq=False, slots=True)
class Resident:
    """A program as the gate sees it.

    Its context is a trunk, which its calls in progress share, and the tokens that each of these calls adds. The tokens
    that its first call found in the prefix cache belong to other programs, too, and are not counted. Between two calls,
    only the tokens that the next call is expected to use are counted.
    """

    program: ProgramView
    is_open: bool = False
    has_ended: bool = False
    calls: dict[Call, int] = field(default_factory=dict)  # in progress, with the tokens that each adds to the trunk
    context_tokens: int = 0  # prompt and output of the call that ended last
    trunk_tokens: int = 0  # shared by the calls in progress
    shared_tokens: int = -1  # shared with other programs; -1 until its first call starts
    growth_tokens: int = 0  # what the gate leaves free for its growth
    counted_tokens: tuple[int, int] = (0, 0)  # its `tokens` and growth as the gate's sums have them; 0 while it is shut
    idle_since_s: float = math.nan  # when its last call left; counts while it has no call in progress
    keep_until_s: float = math.inf  # when its place may be given away; counts while it is open without a call
    is_given_up: bool = False  # it has not called again while its place was kept
    shut_since_s: float = math.nan  # since when calls of it have been held back; nan while none is
    reused_part: float = 1.0  # the part of its context that its next call is expected to use, 0 to 1
    resuming: Call | None = None  # the first call after it had none, until that call starts
    standing: Rank = field(default=Rank(0, math.inf))  # that of its best call, or of the call that ended last

    @property
    def rank(self) -> Rank:
        """Its place in its queue. Of the open programs the worst standing comes first, of the others the best."""
        if not self.is_open:
            return self.standing
        level, order, tie = self.standing
        return Rank(-level, -order, -tie)

    @property
    def name(self) -> tuple[str | None, str]:
        """What the gate predicts it by."""
        return self.program.tenant, self.program.name

    @property
    def tokens(self) -> int:
        """The tokens of the KV cache that it needs for itself."""
        own = max(0, (self.trunk_tokens if self.calls else self.context_tokens) - max(0, self.shared_tokens))
        return own + sum(self.calls.values()) if self.calls else math.ceil(self.reused_part * own)


@dataclass(eq=False, slots=True)
class _Place:
    """The place of an open program without a call, in the order in which places may be given away."""

    resident: Resident
    rank: Rank


class AdmissionGate:
    """Counts the contexts of open programs against the KV cache.

    The counts change only when calls arrive, start, are preempted or leave. An engine and a simulator that skips steps
    therefore agree.

    Args:
        standing: The rank by which the program of some calls keeps its place.
        foresight: Whether to predict, by tenant and name, how much contexts grow and when programs call again. False: a
            fixed part of the cache is left for growth, and all programs keep their places for the same time.

    Attributes:
        kv_tokens: The tokens that the KV cache holds, with host memory, without what both have. Infinite until the
            policy is told.
        device_part: The part of them that the device holds, 0 to 1.
        used_tokens: The tokens that the open programs need.
        growth_tokens: The tokens that are left free for their growth.
    """

    def __init__(self, standing: Callable[[Collection[Call]], Rank], *, foresight: bool) -> None:
        self.kv_tokens = math.inf
        self.device_part = 1.0
        self.costs = StepCosts()
        self.used_tokens = 0
        self.growth_tokens = 0
        self._standing = standing
        self._foresight = foresight
        self._residents: dict[ProgramView, Resident] = {}
        self._open: RankQueue[Resident] = RankQueue()  # the worst standing first
        self._shut: RankQueue[Resident] = RankQueue()  # programs of which calls are held back, the best standing first
        self._open_in_turn: dict[Resident, None] = {}  # the one that has been open for longest first
        self._shut_in_turn: dict[Resident, None] = {}  # the one that has been held back for longest first
        self._idle: dict[Resident, _Place] = {}  # open programs without calls
        self._places: RankQueue[_Place] = RankQueue()  # theirs
        self._mean_output_tokens = 0.0
        self._mean_computed_tokens = 0.0  # of prompts
        self._reused = ReusedPart()
        self._returns = ReturnTimes()
        self._growth_of_all = Samples()
        self._growth = SamplesByName(self._growth_of_all)

    def __getitem__(self, program: ProgramView) -> Resident:
        return self._residents[program]

    # -- events

    def arrive(self, call: Call, now_s: float) -> Resident:
        """A call arrives. Returns its program, which may be new."""
        resident = self._residents.get(call.program)
        if resident is None:
            resident = self._residents[call.program] = Resident(call.program)
        resident.has_ended = False
        if not resident.calls:
            resident.resuming = call if resident.is_open and resident.shared_tokens >= 0 else None
            if not math.isnan(resident.idle_since_s):
                if resident.is_given_up:
                    resident.is_given_up = False
                    self._returns.came_back(resident.name)
                self._returns.observe(resident.name, max(0.0, now_s - resident.idle_since_s))
        trunk = min(call.prompt_tokens, resident.context_tokens)
        resident.trunk_tokens = max(trunk, resident.trunk_tokens if resident.calls else 0)
        resident.calls[call] = call.prompt_tokens - trunk + round(self._mean_output_tokens)
        self._recount(resident)
        self._take_place(resident)
        self._stand(resident)
        return resident

    def start(self, call: Call) -> None:
        """A call starts, so it is known how many tokens it has found in the prefix cache."""
        resident = self._residents.get(call.program)
        if resident is not None and resident.resuming is call:
            resident.resuming = None
            if (own := resident.context_tokens - resident.shared_tokens) > 0:
                part = (call.cached_tokens - resident.shared_tokens) / own
                self._reused.observe(resident.name, min(max(part, 0.0), 1.0))
        elif resident is not None and resident.shared_tokens < 0:
            resident.shared_tokens = call.cached_tokens
            resident.context_tokens = resident.trunk_tokens = max(resident.context_tokens, resident.shared_tokens)
            if call in resident.calls:
                resident.calls[call] -= resident.shared_tokens
            self._recount(resident)

    def leave(self, call: Call, now_s: float) -> Resident | None:
        """A call has ended or was aborted. Returns its program, if it is known."""
        resident = self._residents.get(call.program)
        if resident is None or call not in resident.calls:
            return resident
        del resident.calls[call]
        if resident.resuming is call:
            resident.resuming = None
        resident.reused_part = self._reused.part(resident.name)
        if call.output_tokens:
            tokens = call.prompt_tokens + call.output_tokens
            if not resident.calls and not math.isnan(resident.idle_since_s):  # neither parallel nor its first call
                grown = max(0, tokens - resident.context_tokens)
                self._growth_of_all.observe(grown)
                self._growth.observe(resident.name, grown)
            resident.context_tokens = tokens
            self._mean_output_tokens += _LATEST * (call.output_tokens - self._mean_output_tokens)
            computed = max(0, call.prompt_tokens - call.cached_tokens)
            self._mean_computed_tokens += _LATEST * (computed - self._mean_computed_tokens)
        resident.growth_tokens = self._expected_growth_tokens(resident)
        self._recount(resident)
        self._stand(resident, left=(call,))
        if not resident.calls:
            resident.idle_since_s = now_s
            if resident.has_ended:
                self._forget(resident)
            elif resident.is_open:
                self._keep_place(resident)
        return resident

    def rerank(self, calls: Iterable[Call]) -> None:
        """The ranks of these calls have changed. Update the standing of their programs."""
        for program in dict.fromkeys(call.program for call in calls):
            if program in self._residents:
                self._stand(self._residents[program])

    def _stand(self, resident: Resident, left: Collection[Call] = ()) -> None:
        """Update the standing of a program by its calls, or by the one that has left last."""
        if calls := resident.calls or left:
            before, resident.standing = resident.standing, self._standing(calls)
            if resident.standing != before:
                (self._open if resident.is_open else self._shut).update(resident)

    def _recount(self, resident: Resident) -> None:
        """What a program needs may have changed. Keep the sums right."""
        before_tokens, before_growth_tokens = resident.counted_tokens
        resident.counted_tokens = (resident.tokens, resident.growth_tokens) if resident.is_open else (0, 0)
        self.used_tokens += resident.counted_tokens[0] - before_tokens
        self.growth_tokens += resident.counted_tokens[1] - before_growth_tokens

    def hold(self, resident: Resident, now_s: float) -> None:
        """A call of a program that is shut out is held back."""
        if resident not in self._shut_in_turn:
            resident.shut_since_s = now_s
            self._shut.push(resident)
            self._shut_in_turn[resident] = None

    def unhold(self, resident: Resident) -> None:
        """No call of a program is held back any more."""
        resident.shut_since_s = math.nan
        self._shut.discard(resident)
        self._shut_in_turn.pop(resident, None)

    def end(self, program: ProgramView, *, is_known: bool = True) -> None:
        """A program has ended. It is forgotten once its last call has left.

        Args:
            is_known: Whether its end was reported. False: it has not called for a long time.
        """
        resident = self._residents.get(program)
        if resident is not None:
            resident.has_ended = True
            if not resident.calls:
                if not is_known and not resident.is_given_up:
                    self._returns.observe(resident.name, math.inf)
                self._forget(resident)

    def _forget(self, resident: Resident) -> None:
        self.close(resident)
        self.unhold(resident)
        del self._residents[resident.program]

    # -- what is expected of a program

    def _expected_growth_tokens(self, resident: Resident) -> int:
        if not self._foresight or len(self._growth_of_all) < _KNOWN_FROM:
            return 0
        prompt_s = self.costs.prefill_token_s * self._mean_computed_tokens
        output_s = self.costs.token_s * self._mean_output_tokens
        calls = CALLS_AHEAD * prompt_s / (prompt_s + output_s) * self.device_part
        return math.ceil(calls * (self._growth.get(resident.name) or self._growth_of_all).mean)

    @property
    def fill_s(self) -> float:
        """The seconds that it takes to compute as many tokens as the KV cache holds."""
        return self.kv_tokens * self.costs.prefill_token_s

    def _keep_place(self, resident: Resident) -> None:
        """An open program has no call any more. While it has none, its place may be given away after some time.

        Its context takes a part of the cache until its next call. If it is shut out, the engine computes the context
        again, which takes the same part of `fill_s`. So the time that the place is worth does not depend on its size.
        """
        wait_s = self.fill_s
        if self._foresight and wait_s < math.inf:
            wait_s = self._returns.best_wait_s(resident.name, wait_s)
        resident.keep_until_s = resident.idle_since_s + wait_s
        place = self._idle[resident] = _Place(resident, Rank(0, resident.keep_until_s))
        self._places.push(place)

    def _take_place(self, resident: Resident) -> None:
        place = self._idle.pop(resident, None)
        if place is not None:
            self._places.discard(place)

    # -- opening and closing

    def open(self, resident: Resident) -> None:
        """Let a program in."""
        self.unhold(resident)
        resident.is_open = True
        resident.growth_tokens = self._expected_growth_tokens(resident)
        self._open.push(resident)
        self._open_in_turn[resident] = None
        self._recount(resident)

    def close(self, resident: Resident) -> None:
        """Shut a program out."""
        if resident.is_open:
            self._open.discard(resident)
            del self._open_in_turn[resident]
            self._take_place(resident)
            resident.is_open = False
            self._recount(resident)

    def give_up(self, resident: Resident) -> None:
        """Shut out an idle program that has not called again while its place was kept.

        Until it does, it counts as gone for good. Where nobody tells that programs have ended, nothing else would.
        """
        resident.is_given_up = True
        self._returns.observe(resident.name, math.inf)
        self.close(resident)

    def fits(self, resident: Resident) -> bool:
        """Whether a closed program may open next to those that are open."""
        needed = self.used_tokens + resident.tokens
        grown = needed + self.growth_tokens + self._expected_growth_tokens(resident)
        return needed <= FILL * self.kv_tokens and grown <= self.kv_tokens

    def is_exceeded(self) -> bool:
        """Whether several programs are open and need more than the KV cache holds."""
        return self.used_tokens > self.kv_tokens and len(self._open) > 1

    def is_busy(self) -> bool:
        """Whether an open program has a call in progress."""
        return len(self._open) > len(self._idle)

    def first_place(self) -> Resident | None:
        """The open program without a call whose place may be given away first."""
        return self._places.peek().resident if self._idle else None

    def shut(self) -> Iterable[Resident]:
        """The programs of which calls are held back, the one that has been held back for longest first."""
        return self._shut_in_turn

    def first_shut(self) -> Resident:
        """Of the programs of which calls are held back, the one of best standing. There must be one."""
        return self._shut.peek()

    def longest_open(self) -> Resident:
        """The program that has been open for longest. There must be one."""
        return next(iter(self._open_in_turn))

    def last(self) -> Resident:
        """The open program with the worst standing. There must be one."""
        return self._open.peek()

    def __iter__(self) -> Iterator[Resident]:
        return iter(self._residents.values())

    def check_integrity(self) -> None:
        """Assert that the counts agree. For tests."""
        opened = [each for each in self if each.is_open]
        checks = {
            "the used tokens are wrong": self.used_tokens == sum(each.tokens for each in opened),
            "the growth is wrong": self.growth_tokens == sum(each.growth_tokens for each in opened),
            "a standing is out of date": all(
                each.standing == (self._standing(each.calls) if each.calls else each.standing) for each in self
            ),
            "the open programs are wrong": set(self._open) == set(self._open_in_turn) == set(opened),
            "the programs that are held back are wrong": set(self._shut) == set(self._shut_in_turn),
            "an open program is held back": not set(self._shut) & set(opened),
            "the idle programs are wrong": set(self._idle) == {each for each in opened if not each.calls},
            "the places are wrong": {each.resident for each in self._places} == set(self._idle),
            "a program counts less than nothing": all(count >= 0 for each in self for count in each.calls.values()),
        }
        for heap in (self._open, self._shut, self._places):
            heap.check_integrity()
        failed = [what for what, holds in checks.items() if not holds]
        if failed:
            raise AssertionError("; ".join(failed))
