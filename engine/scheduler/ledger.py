"""What the scheduler keeps of programs, calls and requests under way."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from weft.core.ids import CallId, ProgramId
from weft.core.policies.base import Call
from weft.core.process_table import Account, Attained
from weft.engine.wire import encode_account


@dataclass(slots=True)
class Program:
    """A program with calls on this engine, and what it has attained as far as is known here."""

    attained: Attained
    calls: int = 0


@dataclass(slots=True)
class Ledger:
    """What one call has cost. With n > 1 its sequences share it: a step is charged once; it waits while none runs."""

    call_id: CallId
    program_id: ProgramId
    inherited: Attained
    waiting_since_s: float
    sequences: int = 0
    running: int = 0
    service_s: float = 0.0
    wait_s: float = 0.0
    preemptions: int = 0
    swapped_tokens: int = 0
    recomputed_tokens: int = 0
    last_step: int = -1

    def start(self, now_s: float) -> None:
        if self.running == 0:
            self.wait_s += now_s - self.waiting_since_s
        self.running += 1

    def stop(self, now_s: float) -> None:
        self.running -= 1
        self.waiting_since_s = now_s

    def account(self) -> Account:
        return Account(
            self.service_s,
            self.wait_s,
            self.preemptions,
            swapped_tokens=self.swapped_tokens,
            recomputed_tokens=self.recomputed_tokens,
        )

    def encode(self) -> dict[str, Any]:
        return encode_account(
            self.service_s, self.wait_s, self.preemptions, self.swapped_tokens, self.recomputed_tokens
        )


class Step(NamedTuple):
    """A step under way."""

    scheduled_at_s: float
    new_tokens: dict[str, int] | None  # by request, those never computed before; only if service is counted in tokens


@dataclass(slots=True)
class Entry:
    """A request under way."""

    call: Call
    ledger: Ledger
    running: bool = False
    output_tokens: int = 0  # when it last started
    computed_tokens: int = 0  # the most it ever had in the KV cache
    lost_tokens: int = 0  # how many it had there when it was last preempted
