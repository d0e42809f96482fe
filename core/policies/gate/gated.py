"""The gate: any policy, with no more programs open than the KV cache holds (docs/reference/policies.md#the-gate)."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import Final

from weft.core.class_rows import ClassRow
from weft.core.policies.gate.admission_gate import AdmissionGate, Resident
from weft.core.policies.policy import Policy, PolicyAround, PolicyEvent
from weft.core.policies.steps import StepCosts
from weft.core.policies.view import Call, KvSize, ProgramEnded

# A program is held back no longer than so many times the seconds that it takes to fill the KV cache. Then it gets the
# place of another one, whose context is computed again, so this takes the engine a thousandth of its time at most.
_PATIENCE: Final = 100.0
_LEAST_PATIENCE_S: Final = 60.0  # also where steps are so alike that prompts seem to take no time


class Gated(PolicyAround):
    """Holds back the calls of programs that are not open.

    - Calls of open programs always pass.
    - Other programs open in the order of their standing, and none overtakes another. Otherwise a large program would
      wait for ever.
    - A program opens when the cache has room for its context, and for what open contexts are expected to grow.
    - When contexts outgrow the KV cache, the open program of worst standing closes.
    - While another program is held back, an idle one closes when it has been idle for longer than its place is worth.
    - While no open program has a call, the first program that is held back opens, whatever its size.
    - A program that has been held back for very long takes the place of the one that has been open for longest. So none
      waits for ever, even if open programs never end.

    Behind a policy that learns, the gate learns as well: how much contexts grow, and when programs call again. Behind
    the others it is a plain gate, with a fixed reserve and a fixed time.
    """

    def __init__(self, inner: Policy) -> None:
        super().__init__(inner)
        self.name = inner.name  # type: ignore[misc]  # users know it by the name of the inner policy
        self.evicts_ended_first = True
        self.gate = AdmissionGate(inner.standing, foresight=inner.learns)
        self._now_s = -math.inf
        self._patience_from_s = -math.inf  # when a program that was held back for very long was let in last
        self._has_changed = False  # contexts or ranks have changed since the last decision

    # -- what happens

    def arrive(self, call: Call, now_s: float) -> None:
        self._now_s = now_s
        self.inner.arrive(call, now_s)
        self._hold(call, self.gate.arrive(call, now_s))
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
        resident = self.gate.leave(call, self._now_s)
        if resident is not None and not resident.is_open and not any(map(self.held.__contains__, resident.calls)):
            self.gate.unhold(resident)  # the call was the only one of its program that was held back
        self._has_changed = True
        if self.held and not self.gate.is_busy():  # do not wait for a decision, which may be steps away
            self._open(self._now_s)

    def on_event(self, event: PolicyEvent) -> None:
        self.inner.on_event(event)
        match event:
            case ProgramEnded(program, is_known):
                self.gate.end(program, is_known=is_known)
                self._has_changed = True
            case KvSize(tokens, host_tokens):
                self.gate.kv_tokens = math.hypot(tokens, host_tokens)  # less than both: host memory has some twice
                self.gate.device_part = tokens / (tokens + host_tokens) if tokens < math.inf else 1.0
            case StepCosts():
                self.gate.costs = event

    # -- what goes next

    def decide(self, now_s: float) -> list[Call]:
        self._now_s = now_s
        changed = self.inner.decide(now_s)
        if changed:
            for call in changed if self.held else ():
                self.held.update(call)
            self.gate.rerank(changed)
        if changed or self._has_changed or now_s >= self._gate_changes_s():
            self._has_changed = False
            while self.gate.is_exceeded():
                self._close(self.gate.last())
            self._open(now_s)
            self._end_patience(now_s)
        return changed

    def next_change_s(self) -> float:
        if self._has_changed and (self.held or self.gate.is_exceeded()):
            return -math.inf
        return min(self.inner.next_change_s(), self._gate_changes_s())

    def classes(self) -> list[ClassRow]:
        held = Counter((program.tenant, program.name) for program in {call.program for call in self.held})
        return [replace(row, held=held[row.tenant, row.name]) for row in self.inner.classes()]

    # -- the gate

    def _gate_changes_s(self) -> float:
        """The time at which a place may be given to a program that is held back; inf if none is."""
        if not self.held:
            return math.inf
        idle = self.gate.first_place()
        return min(math.inf if idle is None else idle.keep_until_s, self._patience_ends_s())

    def _patience_ends_s(self) -> float:
        longest = next(iter(self.gate.shut()))
        patience_s = max(_LEAST_PATIENCE_S, _PATIENCE * self.gate.fill_s)
        return max(longest.shut_since_s, self._patience_from_s) + patience_s

    def _hold(self, call: Call, resident: Resident) -> None:
        """Keep a waiting call back if its program is closed."""
        if not resident.is_open:
            self.waiting.discard(call)
            self.held.push(call)
            self.gate.hold(resident, self._now_s)

    def _open(self, now_s: float) -> None:
        """Open programs in the order of their standing, until the first does not fit."""
        while self.held:
            resident = self.gate.first_shut()
            if not (self.gate.fits(resident) or self._makes_room(resident, now_s)):
                return
            self._let_in(resident)

    def _let_in(self, resident: Resident) -> None:
        self.gate.open(resident)
        for call in resident.calls:
            if call in self.held:
                self.held.discard(call)
                self.waiting.push(call)

    def _makes_room(self, resident: Resident, now_s: float) -> bool:
        """Close idle programs whose places may be given away. Returns whether the program can open now."""
        while (idle := self.gate.first_place()) is not None and (now_s >= idle.keep_until_s or not self.gate.is_busy()):
            if now_s >= idle.keep_until_s:
                self.gate.give_up(idle)
            else:
                self.gate.close(idle)
            if self.gate.fits(resident):
                return True
        return not self.gate.is_busy()

    def _end_patience(self, now_s: float) -> None:
        """Let in the program that has been held back for longest, if that was very long, for the one open longest."""
        if self.held and now_s >= self._patience_ends_s():
            self._patience_from_s = now_s
            resident = next(iter(self.gate.shut()))
            self._close(self.gate.longest_open())
            self._let_in(resident)

    def _close(self, resident: Resident) -> None:
        """Shut a program out. Its running calls go on until their place is needed; its waiting calls are held back."""
        self.gate.close(resident)
        for call in resident.calls:
            if call in self.waiting:
                self._hold(call, resident)

    def check_integrity(self) -> None:
        """Assert that exactly the waiting calls of closed programs are held back. For tests."""
        self.gate.check_integrity()
        self.waiting.check_integrity()
        self.held.check_integrity()
        held = {call for call in self.held if self.gate[call.program].is_open}
        passed = {call for call in self.waiting if not self.gate[call.program].is_open}
        if held or passed:
            raise AssertionError(f"held back although open: {held}; waiting although closed: {passed}")
        if {call.program for call in self.held} != {each.program for each in self.gate.shut()}:
            raise AssertionError("the programs that are held back are not those of the calls that are held back")
        if self.held and not self.gate.is_busy():
            raise AssertionError("calls are held back, and no open program has a call")
