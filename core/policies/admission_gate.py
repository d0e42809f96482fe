"""The gate's counts: which programs are open, and how much of the KV cache their contexts take.

`weft.core.policies.gated` opens and closes programs by these counts. A program that is shut out costs nothing. If the
contexts of open programs exceed the cache, they evict each other, and each call computes its program's context again.
If they exceed it only by a little, that is most of the engine's work.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

from weft.core.policies.queues.waiting import RankHeap
from weft.core.policies.view import Call, ProgramView, Rank
from weft.core.prediction import ReusedPart

FILL: Final = 0.92  # programs open until their contexts take this part of the KV cache; the rest is for their growth
_LATEST: Final = 0.05  # weight of the latest call in the mean output


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
    idle_since_s: float = math.nan  # when its last call left; counts while it has no call in progress
    reused_part: float = 1.0  # the part of its context that its next call is expected to use, 0 to 1
    resuming: Call | None = None  # the first call after it had none, until that call starts
    standing: Rank = field(default=Rank(0, math.inf))  # that of its best call, or of the call that ended last

    @property
    def rank(self) -> Rank:
        """Its rank among the programs that may have to close: the program with the worst standing comes first."""
        level, order, tie = self.standing
        return Rank(-level, -order, -tie)

    @property
    def tokens(self) -> int:
        """The tokens of the KV cache that it needs for itself."""
        own = max(0, (self.trunk_tokens if self.calls else self.context_tokens) - max(0, self.shared_tokens))
        return own + sum(self.calls.values()) if self.calls else math.ceil(self.reused_part * own)


class AdmissionGate:
    """Counts the contexts of open programs against the KV cache.

    The counts change only when calls arrive, start, are preempted or leave. An engine and a simulator that skips steps
    therefore agree.

    Args:
        standing: The rank by which a call's program keeps its place. Default: the call's rank.

    Attributes:
        kv_tokens: The tokens that the KV cache holds. Infinite until the policy is told.
        used_tokens: The tokens that the open programs need.
    """

    def __init__(self, standing: Callable[[Call], Rank] = lambda call: call.rank) -> None:
        self.kv_tokens = math.inf
        self._standing = standing
        self.used_tokens = 0
        self._residents: dict[ProgramView, Resident] = {}
        self._open: RankHeap[Resident] = RankHeap()  # the worst standing first
        self._idle: dict[Resident, None] = {}  # open programs without calls, the longest idle first
        self._mean_output_tokens = 0.0
        self._reused = ReusedPart()

    def __getitem__(self, program: ProgramView) -> Resident:
        return self._residents[program]

    # -- events

    def arrive(self, call: Call) -> Resident:
        """A call arrives. Returns its program, which may be new."""
        resident = self._residents.get(call.program)
        if resident is None:
            resident = self._residents[call.program] = Resident(call.program)
        resident.has_ended = False
        if not resident.calls:
            resident.resuming = call if resident.is_open and resident.shared_tokens >= 0 else None
        with _Recount(self, resident):
            trunk = min(call.prompt_tokens, resident.context_tokens)
            resident.trunk_tokens = max(trunk, resident.trunk_tokens if resident.calls else 0)
            resident.calls[call] = call.prompt_tokens - trunk + round(self._mean_output_tokens)
        self._idle.pop(resident, None)
        self._stand(resident)
        return resident

    def start(self, call: Call) -> None:
        """A call starts, so it is known how many tokens it has found in the prefix cache."""
        resident = self._residents.get(call.program)
        if resident is not None and resident.resuming is call:
            resident.resuming = None
            if (own := resident.context_tokens - resident.shared_tokens) > 0:
                part = (call.cached_tokens - resident.shared_tokens) / own
                self._reused.observe((call.program.tenant, call.program.name), min(max(part, 0.0), 1.0))
        elif resident is not None and resident.shared_tokens < 0:
            with _Recount(self, resident):
                resident.shared_tokens = call.cached_tokens
                resident.context_tokens = resident.trunk_tokens = max(resident.context_tokens, resident.shared_tokens)
                if call in resident.calls:
                    resident.calls[call] -= resident.shared_tokens

    def leave(self, call: Call, now_s: float) -> None:
        """A call has ended or was aborted."""
        resident = self._residents.get(call.program)
        if resident is None or call not in resident.calls:
            return
        with _Recount(self, resident):
            del resident.calls[call]
            if resident.resuming is call:
                resident.resuming = None
            resident.standing = self._standing(call)
            resident.reused_part = self._reused.part((call.program.tenant, call.program.name))
            if call.output_tokens:
                resident.context_tokens = call.prompt_tokens + call.output_tokens
                self._mean_output_tokens += _LATEST * (call.output_tokens - self._mean_output_tokens)
        self._stand(resident)
        if not resident.calls:
            resident.idle_since_s = now_s
            if resident.has_ended:
                self._forget(resident)
            elif resident.is_open:
                self._idle[resident] = None

    def rerank(self, calls: Iterable[Call]) -> None:
        """The ranks of these calls have changed. Update the standing of their programs."""
        for program in dict.fromkeys(call.program for call in calls):
            if program in self._residents:
                self._stand(self._residents[program])

    def _stand(self, resident: Resident) -> None:
        resident.standing = min(map(self._standing, resident.calls), default=resident.standing)
        self._open.update(resident)

    def end(self, program: ProgramView) -> None:
        """A program has ended. It is forgotten once its last call has left."""
        resident = self._residents.get(program)
        if resident is not None:
            resident.has_ended = True
            if not resident.calls:
                self._forget(resident)

    def _forget(self, resident: Resident) -> None:
        self.close(resident)
        del self._residents[resident.program]

    # -- opening and closing

    def open(self, resident: Resident) -> None:
        """Let a program in."""
        resident.is_open = True
        self._open.push(resident)
        self.used_tokens += resident.tokens

    def close(self, resident: Resident) -> None:
        """Shut a program out."""
        if resident.is_open:
            self.used_tokens -= resident.tokens
            resident.is_open = False
            self._open.discard(resident)
            self._idle.pop(resident, None)

    @property
    def fill_tokens(self) -> float:
        """The tokens up to which programs may open."""
        return FILL * self.kv_tokens

    def fits(self, resident: Resident) -> bool:
        """Whether a closed program may open next to those that are open."""
        return self.used_tokens + resident.tokens <= self.fill_tokens

    def is_exceeded(self) -> bool:
        """Whether several programs are open and need more than the KV cache holds."""
        return self.used_tokens > self.kv_tokens and len(self._open) > 1

    def is_busy(self) -> bool:
        """Whether an open program has a call in progress."""
        return len(self._open) > len(self._idle)

    def longest_idle(self) -> Resident | None:
        """The open program that has been without a call for longest."""
        return next(iter(self._idle), None)

    def last(self) -> Resident:
        """The open program with the worst standing.

        Raises:
            IndexError: No program is open.
        """
        return self._open.peek()

    def last_first(self) -> Iterator[Resident]:
        """The open programs, the worst standing first. No program may open or close during the iteration."""
        return iter(self._open)

    def __iter__(self) -> Iterator[Resident]:
        return iter(self._residents.values())

    def check_integrity(self) -> None:
        """Assert that the counts agree. For tests.

        Raises:
            AssertionError: They do not; the message says which.
        """
        checks = {
            "the used tokens are wrong": self.used_tokens == sum(each.tokens for each in self if each.is_open),
            "a standing is out of date": all(
                each.standing == min(map(self._standing, each.calls), default=each.standing) for each in self
            ),
            "the open programs are wrong": set(self._open) == {each for each in self if each.is_open},
            "the idle programs are wrong": set(self._idle) == {each for each in self._open if not each.calls},
            "a program counts less than nothing": all(count >= 0 for each in self for count in each.calls.values()),
        }
        self._open.check_integrity()
        failed = [what for what, holds in checks.items() if not holds]
        if failed:
            raise AssertionError("; ".join(failed))


class _Recount:
    """Keeps `used_tokens` right while the tokens of one program change."""

    def __init__(self, gate: AdmissionGate, resident: Resident) -> None:
        self._gate = gate
        self._resident = resident

    def __enter__(self) -> None:
        if self._resident.is_open:
            self._gate.used_tokens -= self._resident.tokens

    def __exit__(self, *_: object) -> None:
        if self._resident.is_open:
            self._gate.used_tokens += self._resident.tokens
