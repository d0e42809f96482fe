"""Which programs are open: those whose contexts the KV cache holds together.

A program that is shut out costs nothing. A program that is let in and then loses its KV cache to others computes its
context again with each call, and so do the others: where contexts just exceed the cache, that is most of the work.
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
_LATEST: Final = 0.05  # weight of a call in the mean output


@dataclass(eq=False, slots=True)
class Resident:
    """A program as the gate sees it.

    Its context is a trunk that its calls share, and what each call adds to it. What the first call finds in the prefix
    cache belongs to other programs as well, and is not counted. Between two calls, only what the next one is expected
    to use is counted.
    """

    program: ProgramView
    is_open: bool = False
    has_ended: bool = False
    calls: dict[Call, int] = field(default_factory=dict)  # in progress, with the tokens that each adds to the trunk
    context: int = 0  # of the call that ended last
    trunk: int = 0  # that the calls in progress share
    shared: int = -1  # tokens that it shares with other programs; -1 until its first call starts
    idle_since_s: float = math.nan  # without a call in progress
    reused: float = 1.0  # the part of its context that its next call is expected to use
    resuming: Call | None = None  # the call that came after it had none, and has not started
    standing: Rank = field(default=Rank(0, math.inf))  # the best of its calls; without any, of the call that ended last

    @property
    def rank(self) -> Rank:
        """Its place among the programs that may have to make way: the last in standing comes first."""
        level, order, tie = self.standing
        return Rank(-level, -order, -tie)

    @property
    def tokens(self) -> int:
        """The tokens of the KV cache that it needs for itself."""
        own = max(0, (self.trunk if self.calls else self.context) - max(0, self.shared))
        return own + sum(self.calls.values()) if self.calls else math.ceil(self.reused * own)


class AdmissionGate:
    """Counts the contexts of open programs against the KV cache.

    All counts change only when calls arrive, start, are preempted and leave, so a simulator that skips steps and an
    engine agree.
    """

    def __init__(self, standing: Callable[[Call], Rank] = lambda call: call.rank) -> None:
        self.kv_tokens = math.inf
        self._standing = standing
        self.used_tokens = 0  # by the open programs
        self._residents: dict[ProgramView, Resident] = {}
        self._open: RankHeap[Resident] = RankHeap()  # the last in standing first
        self._idle: dict[Resident, None] = {}  # open programs without calls, the longest idle first
        self._mean_output = 0.0
        self._reused = ReusedPart()

    def __getitem__(self, program: ProgramView) -> Resident:
        return self._residents[program]

    # -- events

    def arrive(self, call: Call) -> Resident:
        """A call arrives, and its program with it if that is new."""
        found = self._residents.get(call.program)
        if found is None:
            found = self._residents[call.program] = Resident(call.program)
        found.has_ended = False
        if not found.calls:
            found.resuming = call if found.is_open and found.shared >= 0 else None
        with _Recount(self, found):
            trunk = min(call.prompt_tokens, found.context)
            found.trunk = max(trunk, found.trunk if found.calls else 0)
            found.calls[call] = call.prompt_tokens - trunk + round(self._mean_output)
        self._idle.pop(found, None)
        self._stand(found)
        return found

    def start(self, call: Call) -> None:
        """A call starts, so it is known what it found in the prefix cache."""
        found = self._residents.get(call.program)
        if found is not None and found.resuming is call:
            found.resuming = None
            if (own := found.context - found.shared) > 0:
                part = (call.cached_tokens - found.shared) / own
                self._reused.observe((call.program.tenant, call.program.name), min(max(part, 0.0), 1.0))
        elif found is not None and found.shared < 0:
            with _Recount(self, found):
                found.shared = call.cached_tokens
                found.context = found.trunk = max(found.context, found.shared)
                if call in found.calls:
                    found.calls[call] -= found.shared

    def leave(self, call: Call, now_s: float) -> None:
        """A call has ended or was aborted."""
        found = self._residents.get(call.program)
        if found is None or call not in found.calls:
            return
        with _Recount(self, found):
            del found.calls[call]
            if found.resuming is call:
                found.resuming = None
            found.standing = self._standing(call)
            found.reused = self._reused.part((call.program.tenant, call.program.name))
            if call.output_tokens:
                found.context = call.prompt_tokens + call.output_tokens
                self._mean_output += _LATEST * (call.output_tokens - self._mean_output)
        self._stand(found)
        if not found.calls:
            found.idle_since_s = now_s
            if found.has_ended:
                self._forget(found)
            elif found.is_open:
                self._idle[found] = None

    def rerank(self, calls: Iterable[Call]) -> None:
        """The ranks of calls have changed, and with them the standing of their programs."""
        for program in dict.fromkeys(call.program for call in calls):
            if program in self._residents:
                self._stand(self._residents[program])

    def _stand(self, found: Resident) -> None:
        found.standing = min(map(self._standing, found.calls), default=found.standing)
        self._open.update(found)

    def end(self, program: ProgramView) -> None:
        """A program has ended: what it held is free, once its last call has left."""
        found = self._residents.get(program)
        if found is not None:
            found.has_ended = True
            if not found.calls:
                self._forget(found)

    def _forget(self, found: Resident) -> None:
        self.close(found)
        del self._residents[found.program]

    # -- opening and closing

    def open(self, found: Resident) -> None:
        """Let a program in."""
        found.is_open = True
        self._open.push(found)
        self.used_tokens += found.tokens

    def close(self, found: Resident) -> None:
        """Shut a program out."""
        if found.is_open:
            self.used_tokens -= found.tokens
            found.is_open = False
            self._open.discard(found)
            self._idle.pop(found, None)

    @property
    def fill_tokens(self) -> float:
        """The tokens that programs may take when they open."""
        return FILL * self.kv_tokens

    def fits(self, found: Resident) -> bool:
        """Whether a closed program may open next to those that are open."""
        return self.used_tokens + found.tokens <= self.fill_tokens

    def is_exceeded(self) -> bool:
        """Whether the contexts of several open programs have outgrown the KV cache."""
        return self.used_tokens > self.kv_tokens and len(self._open) > 1

    def is_busy(self) -> bool:
        """Whether an open program has a call in progress."""
        return len(self._open) > len(self._idle)

    def longest_idle(self) -> Resident | None:
        """The open program that has been without a call for longest."""
        return next(iter(self._idle), None)

    def last(self) -> Resident:
        """The open program that is the last in standing.

        Raises:
            IndexError: No program is open.
        """
        return self._open.peek()

    def last_first(self) -> Iterator[Resident]:
        """The open programs, the last in standing first. None may open or close meanwhile."""
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
    """Keeps the sum right while the tokens of a program change."""

    def __init__(self, gate: AdmissionGate, found: Resident) -> None:
        self._gate = gate
        self._found = found

    def __enter__(self) -> None:
        if self._found.is_open:
            self._gate.used_tokens -= self._found.tokens

    def __exit__(self, *_: object) -> None:
        if self._found.is_open:
            self._gate.used_tokens += self._found.tokens
