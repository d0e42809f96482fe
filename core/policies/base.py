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
    order: int  # place inside the queue


@dataclass(eq=False, slots=True)
class Call:
    """A call as a policy sees it (`c` in Algorithm 1). Compared by identity."""

    key: str  # the driver's name for it
    program: Attained  # pt[c.pid], shared by the program's calls on this engine
    service_s: float = 0.0  # c.service: what the policy took as attained service on arrival (line 11)
    model_time_s: float = 0.0  # c.model_time: run since arrival or since the last promotion (line 29)
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
    def charge(self, call: Call, model_time_s: float, now_s: float) -> None:
        """Charge a call for one step it was part of; it may go down a queue (lines 20-23)."""

    @abstractmethod
    def promote(self, now_s: float) -> list[Call]:
        """Move the calls that have starved to Q_1 (lines 24-30) and return them."""

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

    def victims(
        self, running: Sequence[Call], free_slots: int, ready: Callable[[Call], bool] = lambda _call: True
    ) -> list[Call]:
        """The running calls to preempt so that the batch becomes the first calls of Q_1 ... Q_K that fit (lines 32-39).

        Args:
            running: the calls in the batch.
            free_slots: how many more calls the batch could take.
            ready: whether a waiting call could start now; others are passed over.

        Returns:
            The calls to preempt, the one furthest down first. Each has a waiting call before it in rank.
        """
        by_rank = sorted(running, key=lambda call: call.rank)
        victims: list[Call] = []
        for candidate in self.waiting:
            if not ready(candidate):
                continue
            if free_slots > 0:
                free_slots -= 1
            elif by_rank and candidate.rank < by_rank[-1].rank:
                victims.append(by_rank.pop())
            else:
                break
        return victims
