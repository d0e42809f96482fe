"""The gate: any policy, with no more programs open than the KV cache holds (docs/reference/policies.md#the-gate)."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

from weft.core.class_rows import ClassRow
from weft.core.policies.admission_gate import AdmissionGate, Resident
from weft.core.policies.around import PolicyAround
from weft.core.policies.base import Policy
from weft.core.policies.learned import LOST_WORK_FACTOR
from weft.core.policies.steps.costs import StepCosts
from weft.core.policies.view import Call, ProgramView


class Gated(PolicyAround):
    """Holds back the calls of programs that are not open.

    - Calls of open programs always pass.
    - Other programs open in rank order, and none overtakes another. Otherwise a large program would wait for ever.
    - When contexts outgrow the KV cache, the open program of worst standing closes. An idle program closes when another
      one could have filled the cache in the meantime.
    - The first program that is shut out takes the room of open programs of worse standing, if the policy says that it
      pays.
    - While no open program has a call, the first program that is held back opens, whatever its size. So none waits for
      ever.

    Args:
        inner: The policy, without calls.
    """

    def __init__(self, inner: Policy) -> None:
        super().__init__(inner)
        self.name = inner.name  # type: ignore[misc]  # users know it by the name of the inner policy
        self.evicts_ended_first = True
        self.gate = AdmissionGate(inner.standing)
        self._prefill_token_s = StepCosts().prefill_token_s
        self._now_s = -math.inf
        self._has_changed = False  # contexts or ranks have changed since the last decision

    # -- what the driver reports

    def use_kv(self, tokens: float) -> None:
        self.gate.kv_tokens = tokens

    def use_costs(self, costs: StepCosts) -> None:
        self._prefill_token_s = costs.prefill_token_s
        self.inner.use_costs(costs)

    def arrive(self, call: Call, now_s: float) -> None:
        self._now_s = now_s
        self.inner.arrive(call, now_s)
        self._hold(call, self.gate.arrive(call))
        self._has_changed = True
        self._open(now_s)

    def start(self, call: Call, now_s: float) -> None:
        self._now_s = now_s
        self.inner.start(call, now_s)
        self.gate.start(call)
        self._has_changed = True

    def charge(self, call: Call, model_time_s: float, now_s: float, *, recomputed: bool = False) -> None:
        self._now_s = now_s
        before = call.rank
        self.inner.charge(call, model_time_s, now_s, recomputed=recomputed)
        if call.rank != before:
            self.held.update(call)
            self.gate.rerank([call])
            self._has_changed = True

    def preempt(self, call: Call, now_s: float) -> None:
        self._now_s = now_s
        self.inner.preempt(call, now_s)
        self._hold(call, self.gate[call.program])

    def leave(self, call: Call) -> None:
        self.inner.leave(call)
        self.held.discard(call)
        self.gate.leave(call, self._now_s)
        self._has_changed = True
        if self.held and not self.gate.is_busy():  # do not wait for a decision, which may be steps away
            self._open(self._now_s)

    def program_ended(self, program: ProgramView) -> None:
        self.inner.program_ended(program)
        self._end(program)

    def program_forgotten(self, program: ProgramView) -> None:
        self.inner.program_forgotten(program)
        self._end(program)

    # -- what the driver asks

    def decide(self, now_s: float) -> list[Call]:
        self._now_s = now_s
        changed = self.inner.decide(now_s)
        for call in changed:
            self.held.update(call)
        self.gate.rerank(changed)
        if changed or self._has_changed or now_s >= self._idle_until_s():
            self._has_changed = False
            while self.gate.is_exceeded():
                self._close(self.gate.last())
            self._open(now_s)
        return changed

    def next_change_s(self) -> float:
        if self._has_changed and (self.held or self.gate.is_exceeded()):
            return -math.inf
        return min(self.inner.next_change_s(), self._idle_until_s())

    def classes(self) -> list[ClassRow]:
        held = Counter((program.tenant, program.name) for program in {call.program for call in self.held})
        return [replace(row, held=held[row.tenant, row.name]) for row in self.inner.classes()]

    # -- the gate

    def _idle_until_s(self) -> float:
        """The time at which the longest idle program closes for one that is held back; inf if nothing is held back."""
        idle = self.gate.longest_idle() if self.held else None
        return math.inf if idle is None else idle.idle_since_s + self._idle_limit_s

    @property
    def _idle_limit_s(self) -> float:
        """The seconds that it takes to compute as many tokens as the KV cache holds."""
        return self.gate.kv_tokens * self._prefill_token_s

    def _end(self, program: ProgramView) -> None:
        self.gate.end(program)
        self._has_changed = True

    def _hold(self, call: Call, resident: Resident) -> None:
        """Keep a waiting call back if its program is closed."""
        if not resident.is_open:
            self.waiting.discard(call)
            self.held.push(call)

    def _open(self, now_s: float) -> None:
        """Open programs in rank order, until the first does not fit."""
        while self.held:
            call = self.held.peek()
            resident = self.gate[call.program]
            if not (self.gate.fits(resident) or self._makes_room(call, resident, now_s)):
                return
            self.gate.open(resident)
            for each in resident.calls:
                if each in self.held:
                    self.held.discard(each)
                    self.waiting.push(each)

    def _makes_room(self, call: Call, resident: Resident, now_s: float) -> bool:
        """Close idle programs, or programs that the call displaces. Returns whether its program can open now."""
        while (idle := self.gate.longest_idle()) is not None:
            if self.gate.is_busy() and now_s < idle.idle_since_s + self._idle_limit_s:
                break
            self._close(idle)
            if self.gate.fits(resident):
                return True
        if not self.gate.is_busy():
            return True
        victims = self._displaced(call, resident)
        for victim in victims:
            self._close(victim)
        return bool(victims)

    def _displaced(self, call: Call, resident: Resident) -> list[Resident]:
        """The open programs to close for a call that is held back, the worst standing first. Empty: it does not pay."""
        # The newcomer does not have to make up for what others take beyond the fill.
        missing = min(resident.tokens, self.gate.used_tokens + resident.tokens - self.gate.fill_tokens)
        standing, free, chosen = self.inner.standing(call), 0, []
        for victim in self.gate.last_first():
            free += victim.tokens
            lost = min(free, missing)  # a context is evicted only as far as its place is needed
            # The standing must be worse as well, so that a program is never displaced by one that it has displaced.
            if standing >= victim.standing or not self.inner.displaces(
                call, victim.standing, LOST_WORK_FACTOR * lost * self._prefill_token_s
            ):
                return []
            chosen.append(victim)
            if free >= missing:
                return chosen
        return []

    def _close(self, resident: Resident) -> None:
        """Shut a program out. Its running calls go on until their place is needed; its waiting calls are held back."""
        self.gate.close(resident)
        for call in resident.calls:
            if call in self.waiting:
                self.waiting.discard(call)
                self.held.push(call)

    def check_integrity(self) -> None:
        """Assert that exactly the waiting calls of closed programs are held back. For tests.

        Raises:
            AssertionError: They are not; the message says which rule is broken.
        """
        self.gate.check_integrity()
        self.waiting.check_integrity()
        self.held.check_integrity()
        held = {call for call in self.held if self.gate[call.program].is_open}
        passed = {call for call in self.waiting if not self.gate[call.program].is_open}
        if held or passed:
            raise AssertionError(f"held back although open: {held}; waiting although closed: {passed}")
        if self.held and not self.gate.is_busy():
            raise AssertionError("calls are held back, and no open program has a call")
