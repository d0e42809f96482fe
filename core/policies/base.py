"""What a scheduling policy is: an order of calls that changes as they wait and run.

Algorithm 1 of Autellix, in parts that a simulator and a vLLM scheduler both drive. The driver tells a policy when calls
arrive, start, are preempted, are charged and leave; the policy says in which order they should run. All times are
seconds of the driver's clock.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

from weft.core.policies.waiting import WaitingCalls
from weft.core.process_table import Attained


class Rank(NamedTuple):
    """A call's place: sorting by it reads the queues Q_1 to Q_K one after another, each first come, first served."""

    level: int  # index of the queue, 0 is Q_1
    order: float  # place inside the queue


@dataclass(eq=False, slots=True)
class Call:
    """A call as a policy sees it (`c` in Algorithm 1). Compared by identity."""

    key: str  # the driver's name for it
    program: Attained  # pt[c.pid], shared by the program's calls on this engine
    service_s: float = 0.0  # c.service: what the policy took as attained service on arrival (line 11)
    model_time_s: float = 0.0  # c.model_time: run since arrival or since the last promotion (line 29)
    served_s: float = 0.0  # run since arrival
    wait_s: float = 0.0  # c.wait: waited since arrival or since the last promotion, without the current wait
    waiting_since_s: float = math.nan  # start of the current wait, nan while running
    quantum_s: float = math.inf  # c.quanta: run time left in this queue
    rank: Rank = field(default=Rank(0, 0))


class Policy(ABC):
    """The contract. A driver calls, for each call: `arrive`, then any number of `start`, `charge` and `preempt`, then
    `leave`; and before it forms a batch, `promote`, then `victims`."""

    name: ClassVar[str]

    def __init__(self) -> None:
        self.waiting = WaitingCalls()

    @abstractmethod
    def arrive(self, call: Call, now_s: float) -> None:
        """Put an arriving call into its queue, waiting (lines 9-14)."""

    @abstractmethod
    def charge(self, call: Call, model_time_s: float, now_s: float, *, recomputed: bool = False) -> None:
        """Charge a call for one step it was part of; it may go down a queue (lines 20-23).

        Args:
            recomputed: the step only rebuilt what a preemption had dropped. That is service, but no use of the quantum;
                else a call whose recomputation takes a quantum would be preempted again before it got anywhere.
        """

    @abstractmethod
    def promote(self, now_s: float) -> list[Call]:
        """Move the calls that have starved to Q_1 (lines 24-30) and return them."""

    def next_promotion_s(self) -> float:
        """Before this instant `promote` finds nobody; infinity if nobody is on the way to starving."""
        return math.inf

    def start(self, call: Call, now_s: float) -> None:
        """A waiting call enters the batch."""
        call.wait_s += now_s - call.waiting_since_s
        call.waiting_since_s = math.nan
        self.waiting.discard(call)

    def preempt(self, call: Call, now_s: float) -> None:
        """A running call leaves the batch unfinished and waits again, at its old place."""
        call.waiting_since_s = now_s
        self.waiting.push(call)

    def leave(self, call: Call) -> None:
        """A call finished or was aborted (line 18)."""
        self.waiting.discard(call)

    def program_changed(self, program: Attained) -> None:
        """What a program has attained has changed: another of its calls left, or came with newer numbers."""
        del program

    def has_level(self, level: int) -> bool:
        """Whether there is such a queue."""
        return level == 0

    def victims(
        self,
        running: Sequence[Call],
        free_slots: int,
        *,
        ready: Callable[[Call], bool] = lambda _call: True,
        free_blocks: float = math.inf,
        blocks: Callable[[Call], int] = lambda _call: 0,
    ) -> list[Call]:
        """The running calls to preempt so that the batch becomes the first calls of Q_1 ... Q_K that fit (lines 32-39).

        Args:
            running: the calls in the batch.
            free_slots: how many more calls the batch could take.
            ready: whether a waiting call could start now; others are passed over.
            free_blocks: KV blocks that are free.
            blocks: KV blocks that a waiting call needs to start, and that a running call would give back.

        Returns:
            The calls to preempt, the one furthest down first. Each has a waiting call before it in rank that then fits.
        """
        by_rank = sorted(running, key=lambda call: call.rank)
        victims: list[Call] = []
        for candidate in self.waiting:
            if not ready(candidate):
                continue
            needed = blocks(candidate)
            chosen = len(victims)
            while free_slots < 1 or free_blocks < needed:
                if not by_rank or candidate.rank > by_rank[-1].rank:
                    return victims[:chosen]  # it does not fit, so nobody makes way for it
                victims.append(by_rank.pop())
                free_slots += 1
                free_blocks += blocks(victims[-1])
            free_slots -= 1
            free_blocks -= needed
        return victims
