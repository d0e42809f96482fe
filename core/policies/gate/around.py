"""The base of policies that change a part of another policy: the gate and fair shares."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from weft.core.class_rows import ClassRow
from weft.core.policies.history import ModelHistory, ProgramEnd
from weft.core.policies.policy import Policy
from weft.core.policies.steps import Room, StepCosts
from weft.core.policies.view import Call, ProgramView, Rank


class PolicyAround(Policy):
    """Hands every report and question on to an inner policy. A subclass overrides the methods that it changes.

    Args:
        inner: The inner policy, without calls.
    """

    def __init__(self, inner: Policy) -> None:
        super().__init__()
        self.inner = inner
        self.waiting = inner.waiting
        self.learns = inner.learns
        self.evicts_ended_first = inner.evicts_ended_first
        self.ranks_follow_steps = inner.ranks_follow_steps
        self.ranks_follow_prompts = inner.ranks_follow_prompts
        self.ranks_follow_time = inner.ranks_follow_time
        self.order_follows_clock = inner.order_follows_clock

    @property
    def preempts(self) -> bool:  # type: ignore[override]
        return self.inner.preempts

    # -- what the driver reports

    def arrive(self, call: Call, now_s: float) -> None:
        self.inner.arrive(call, now_s)

    def start(self, call: Call, now_s: float) -> None:
        self.inner.start(call, now_s)

    def charge(self, call: Call, model_time_s: float, now_s: float, *, recomputed: bool = False) -> None:
        self.inner.charge(call, model_time_s, now_s, recomputed=recomputed)

    def preempt(self, call: Call, now_s: float) -> None:
        self.inner.preempt(call, now_s)

    def stall(self, call: Call, now_s: float) -> None:
        self.inner.stall(call, now_s)

    def go_on(self, call: Call, now_s: float) -> None:
        self.inner.go_on(call, now_s)

    def leave(self, call: Call) -> None:
        self.inner.leave(call)

    def program_changed(self, program: ProgramView) -> None:
        self.inner.program_changed(program)

    def program_ended(self, program: ProgramView) -> None:
        self.inner.program_ended(program)

    def program_forgotten(self, program: ProgramView) -> None:
        self.inner.program_forgotten(program)

    def learn(self, past: ModelHistory) -> None:
        self.inner.learn(past)

    def use_costs(self, costs: StepCosts) -> None:
        self.inner.use_costs(costs)

    def use_kv(self, tokens: float) -> None:
        self.inner.use_kv(tokens)

    # -- what the driver asks

    def decide(self, now_s: float) -> list[Call]:
        return self.inner.decide(now_s)

    @property
    def promotions(self) -> int:
        return self.inner.promotions

    def next_change_s(self) -> float:
        return self.inner.next_change_s()

    def classes(self) -> list[ClassRow]:
        return self.inner.classes()

    def take_ends(self) -> list[ProgramEnd]:
        return self.inner.take_ends()

    def has_level(self, level: int) -> bool:
        return self.inner.has_level(level)

    def standing(self, call: Call) -> Rank:
        return self.inner.standing(call)

    def is_settled(self, worst: Rank) -> bool:
        return self.inner.is_settled(worst)

    def outranks(self, call: Call, running: Call) -> bool:
        return self.inner.outranks(call, running)

    def victims(
        self,
        running: Sequence[Call],
        free_slots: int,
        *,
        ready: Callable[[Call], bool] = lambda _call: True,
        room: Room | None = None,
    ) -> list[Call]:
        return self.inner.victims(running, free_slots, ready=ready, room=room)
