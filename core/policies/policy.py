"""The contract of a scheduling policy: an order of calls that changes while they wait and run.

The contract divides Algorithm 1 of Autellix into parts that a simulator and vLLM's scheduler both drive. A policy must
say only how it ranks a call that arrives (`rank`). It may also follow calls, hear of programs and of the engine, change
ranks later, choose what is preempted, and learn; the class has a section for each. All times are seconds of the
driver's clock. Line numbers are those of Algorithm 1.
"""

from __future__ import annotations

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Final

from weft.core.class_rows import ClassRow
from weft.core.errors import PolicyError
from weft.core.policies.history import ModelHistory, ProgramEnd
from weft.core.policies.queues import WaitingCalls
from weft.core.policies.steps import Room, StepCosts, UnlimitedRoom
from weft.core.policies.view import Call, KvSize, ProgramChanged, ProgramEnded, Rank
from weft.core.registries import Registered, Registry

# What a policy hears of programs and of its engine; nothing of it comes in a step that changes nothing. `StepCosts` is
# what steps cost, which a driver that measures it tells from time to time. `ModelHistory` is the work that programs of
# earlier runs needed, told once.
PolicyEvent = ProgramChanged | ProgramEnded | KvSize | StepCosts | ModelHistory


class Policy(Registered, ABC):
    """Ranks calls, and says which running calls are preempted for waiting ones.

    For each call the driver calls `arrive`, then any number of `start`, `charge`, `stall`, `go_on` and `preempt`, then
    `leave`. Before the driver forms a batch, it calls `decide` and then `victims`.
    """

    # Whether a rank depends on the progress of each single step. The simulator then skips no steps.
    ranks_follow_steps: bool = False
    # Whether a rank depends on how much of a prompt is computed. If not, the simulator skips steps of long prompts.
    ranks_follow_prompts: bool = True
    # Whether a rank depends on the time that calls have run. If not, an engine charges prompts, and outputs from
    # `charge_at_tokens` on.
    ranks_follow_time: bool = True
    # Whether the order of waiting calls changes with the times that the driver reports, without any other event.
    order_follows_clock: bool = False
    # Whether a waiting call of better rank displaces running calls: from the batch, or from a step's tokens.
    preempts: bool = True
    # Whether the policy learns from programs that end. It can then begin with a history (`ModelHistory`).
    learns: bool = False
    # Whether the policy divides engines among tenants, so that several engines `exchange` what tenants had.
    has_shares: bool = False
    # Whether the KV cache of programs that have ended is evicted before that of others.
    evicts_ended_first: bool = False
    # The number of its queues; inf: its ranks have any level.
    levels: float = 1

    def __init__(self) -> None:
        self.waiting = WaitingCalls()  # the calls that may start
        self.held = WaitingCalls()  # waiting calls that may not start yet (`weft.core.policies.gate.gated`)
        self._promotions = 0

    @classmethod
    def is_gated(cls, parameters: Any) -> bool:
        """Whether the policy runs behind the gate (`weft.core.policies.gate.gated`) unless the user says otherwise."""
        return False

    # -- what it must answer

    @abstractmethod
    def rank(self, call: Call, now_s: float) -> Rank:
        """The rank of a call that arrives (lines 9-14). Calls of smaller rank go first."""

    # -- what it may follow: the life of a call

    def arrive(self, call: Call, now_s: float) -> None:
        """A call arrives, and waits."""
        call.rank = self.rank(call, now_s)
        self.wait(call, now_s)

    def wait(self, call: Call, now_s: float) -> None:
        """A call waits from now on, with the rank that it has."""
        call.waiting_since_s = now_s
        self.waiting.push(call)

    def charge(self, call: Call, model_time_s: float, now_s: float, *, recomputed: bool = False) -> None:
        """Charge a call for one step that it was part of. The call may be demoted (lines 20-23).

        Args:
            recomputed: The step only rebuilt what a preemption had dropped. It counts as service but does not use up
                the quantum. Otherwise a call whose recomputation takes a quantum would be preempted again before it
                made progress.
        """

    def start(self, call: Call, now_s: float) -> None:
        """A waiting call enters the batch."""
        call.wait_s += now_s - call.waiting_since_s
        call.waiting_since_s = math.nan
        self.waiting.discard(call)

    def preempt(self, call: Call, now_s: float) -> None:
        """A running call leaves the batch unfinished and waits again with its old rank."""
        self.wait(call, now_s)

    def stall(self, call: Call, now_s: float) -> None:
        """A running call gets no tokens in the coming step, because calls of better rank use them up.

        The call stays in the batch, and the time counts as wait.
        """
        call.waiting_since_s = now_s

    def go_on(self, call: Call, now_s: float) -> None:
        """A call that has stalled gets tokens again, or is about to be preempted."""
        call.wait_s += now_s - call.waiting_since_s
        call.waiting_since_s = math.nan

    def leave(self, call: Call) -> None:
        """A call finished or was aborted (line 18)."""
        self.waiting.discard(call)

    # -- what it may hear: programs and the engine

    def on_event(self, event: PolicyEvent) -> None:
        """Something has happened to a program or to the engine."""

    # -- what it may change: ranks

    def decide(self, now_s: float) -> list[Call]:
        """Bring all ranks up to date before a batch is formed.

        Returns:
            The calls whose rank has changed, promoted ones first.
        """
        changed = self.promote(now_s)
        self._promotions += len(changed)
        for call, rank in self.rerank(now_s):
            call.rank = rank
            self.waiting.update(call)
            changed.append(call)
        return changed

    def promote(self, now_s: float) -> list[Call]:
        """Move the calls that have starved to Q_1 and return them (lines 24-30)."""
        return []

    @property
    def promotions(self) -> int:
        """The number of promotions so far."""
        return self._promotions

    def rerank(self, now_s: float) -> Iterable[tuple[Call, Rank]]:
        """Yield the calls whose rank has changed since the last decision, waiting or running, with their new ranks.

        Override it for ranks that change while a call waits: response ratios, fair shares, learned ranks. `decide`
        applies each change in O(log n), so a policy yields the changed calls only. A policy must not change the rank
        of a waiting call in any other way.
        """
        return ()

    def next_change_s(self) -> float:
        """The time before which `decide` changes no rank, unless the driver reports something. inf: it never does."""
        return math.inf

    # -- what it may displace

    def is_settled(self, worst: Rank) -> bool:
        """A quick check: whether certainly no waiting call displaces a running one. If not, `victims` has to look.

        Args:
            worst: The worst rank of a running call. There must be waiting calls, too.
        """
        return not self.preempts or self.waiting.peek().rank >= worst

    def outranks(self, call: Call, running: Call) -> bool:
        """Whether a waiting call may preempt a running one if there is no room for both."""
        return call.rank < running.rank

    def victims(
        self,
        running: Sequence[Call],
        free_slots: int,
        *,
        ready: Callable[[Call], bool] = lambda _call: True,
        room: Room | None = None,
    ) -> list[Call]:
        """The running calls to preempt so that the batch holds the first calls of Q_1 ... Q_K that fit (lines 32-39).

        Args:
            running: The calls in the batch.
            free_slots: How many more calls the batch could take.
            ready: Whether a waiting call could start now. A call that could not is passed over.
            room: The KV cache and the step's tokens; None if they have no bound. `victims` changes it.

        Returns:
            The calls to preempt, the worst rank first. For each of them there is a waiting call of better rank that
            then fits.
        """
        if not self.preempts:
            return []
        room = room or UnlimitedRoom()
        left = dict.fromkeys(sorted(running, key=lambda call: call.rank))
        victims: list[Call] = []
        for candidate in self.waiting:
            if not ready(candidate):
                continue
            if not room.offer(candidate):
                return victims
            chosen = len(victims)
            while free_slots < 1 or not room.fits():
                victim = self.victim_of(candidate, left)
                if victim is None:
                    for call in reversed(victims[chosen:]):  # the candidate does not fit, so they stay
                        room.keep(call)
                    return victims[:chosen]
                del left[victim]
                victims.append(victim)
                free_slots += 1
                room.preempt(victim)
            free_slots -= 1
            room.start()
        return victims

    def victim_of(self, candidate: Call, left: dict[Call, None]) -> Call | None:
        """The running call that `victims` preempts next for a waiting one; None if there is no such call.

        Args:
            candidate: The waiting call.
            left: The running calls that have not been chosen yet, the worst rank last.
        """
        worst = next(reversed(left), None)
        return worst if worst is not None and self.outranks(candidate, worst) else None

    # -- what it may learn

    def classes(self) -> list[ClassRow]:
        """What is known of each class of programs. Empty: the policy keeps no classes."""
        return []

    def take_ends(self) -> list[ProgramEnd]:
        """Return the programs that have ended since the previous call. The oldest of very many are left out."""
        return []

    def exchange(self, elsewhere: Mapping[str, float]) -> Mapping[str, float]:
        """Hear what tenants had on other engines since the last exchange, and return what they had here, in tokens."""
        return {}

    def standing(self, calls: Collection[Call]) -> Rank:
        """The rank by which the program of these calls, in order of arrival, keeps its place at the gate."""
        return min(call.rank for call in calls)


class PolicyAround(Policy):
    """Has the flags and the methods of an inner policy, except those that a subclass defines."""

    def __init__(self, inner: Policy) -> None:
        super().__init__()
        self.inner = inner
        self.waiting = inner.waiting
        kinds = type(self).__mro__
        defined = {name for kind in kinds[: kinds.index(Policy)] for name in vars(kind)}
        for name, member in vars(Policy).items():
            is_public = not name.startswith("_") and (isinstance(member, int | float) or inspect.isfunction(member))
            if is_public and name not in defined:
                setattr(self, name, getattr(inner, name))

    def rank(self, call: Call, now_s: float) -> Rank:
        return self.inner.rank(call, now_s)

    @property
    def preempts(self) -> bool:  # type: ignore[override]
        return self.inner.preempts

    @property
    def promotions(self) -> int:
        return self.inner.promotions


# A policy's module must be imported in `weft.core.policies`. Nothing else names the policy: the CLI's choices, the
# simulator, `weft bench`, the docs' table and the validation of `PolicyConfig` read the registry.
REGISTRY: Final = Registry[Policy]("policy", PolicyError)

register = REGISTRY.register
registration = REGISTRY.registration
registrations = REGISTRY.registrations
