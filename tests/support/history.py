"""A history of what clients asked and got while replicas were killed, and an offline check of it.

It follows Jepsen (https://jepsen.io): clients and the fault injector record what they do and see, and the check runs
afterwards on the record alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from itertools import pairwise
from typing import Any, Final, NamedTuple

MAX_ATTEMPTS: Final = 3
OUTCOMES: Final = {
    "finished",
    "broken off",
    "CancelledError",
    "DeadlineError",
    "NoReplicaError",
    "OverloadedError",
    "ProgramEndedError",
}


class Event(NamedTuple):
    """One event.

    `kind` is one of:

    - `open`, `close`: a program begins; it ends.
    - `invoke`: a client makes a call of `program`, which has `value` tokens.
    - `attempt`: the call begins on the replica `value`.
    - `begin`: the replica `value` begins to run the call.
    - `taken`: the replica `value` has given the call back, because it had not begun.
    - `token`: the client gets the token `value`; a call's tokens are 0, 1, 2, …
    - `return`: the call ends for the client with `value`: "finished", "broken off", `Lost`, or the name of its error.
    - `row`: `value` is the service and the wait in the program's row, of the longest chain and in sum.
    - `kill`, `hang`, `remove`, `add`: of the replica `value`.
    - `left`: after the last call, `value` names something that is left and counts it.
    """

    kind: str
    program: str = ""
    call: str = ""
    value: Any = None


class Lost(NamedTuple):
    """How a call ended that lost its replica."""

    delivered_tokens: int


class History:
    """Records events in the order in which they happen."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def add(self, kind: str, program: str = "", call: str = "", value: Any = None) -> None:
        self.events.append(Event(kind, program, call, value))

    def __len__(self) -> int:
        return len(self.events)


def check(events: Iterable[Event]) -> list[str]:
    """Return what is wrong with a history, a sentence for each fault."""
    events = list(events)
    by_call: dict[str, list[Event]] = defaultdict(list)
    by_program: dict[str, list[Event]] = defaultdict(list)
    for event in events:
        if event.call:
            by_call[event.call].append(event)
        if event.program:
            by_program[event.program].append(event)
    problems = [problem for call, own in by_call.items() for problem in _check_call(call, own)]
    problems += [problem for program, own in by_program.items() for problem in _check_program(program, own)]
    problems += [f"{event.value[1]} {event.value[0]} are left" for event in events if event.kind == "left"]
    return problems


def _check_call(call: str, events: list[Event]) -> Iterable[str]:
    kinds = [event.kind for event in events]
    if kinds.count("invoke") != 1 or kinds[0] != "invoke":
        yield f"{call} was invoked {kinds.count('invoke')} times"
        return
    if kinds.count("return") != 1:
        yield f"{call} ended {kinds.count('return')} times"
        return
    if kinds.index("return") < max((n for n, kind in enumerate(kinds) if kind == "token"), default=0):
        yield f"{call} got a token after its end"
    tokens = [event.value for event in events if event.kind == "token"]
    if tokens != list(range(len(tokens))):
        yield f"{call} got the tokens {tokens}"
    wanted, outcome = events[0].value, events[kinds.index("return")].value
    if outcome == "finished" and len(tokens) != wanted:
        yield f"{call} finished with {len(tokens)} of {wanted} tokens"
    if not isinstance(outcome, Lost) and outcome not in OUTCOMES:
        yield f"{call} ended with {outcome}"
    if isinstance(outcome, Lost) and outcome.delivered_tokens != len(tokens):
        yield f"{call} was lost after {len(tokens)} tokens, its error says {outcome.delivered_tokens}"
    attempts = [n for n, kind in enumerate(kinds) if kind == "attempt"]
    if attempts and "token" in kinds[: attempts[-1]]:
        yield f"{call} began again after its client had got a token"
    if len(attempts) - kinds.count("taken") > MAX_ATTEMPTS:
        yield f"{call} was on {len(attempts)} replicas"
    fates = [(event.kind, event.value) for event in events if event.kind in ("attempt", "begin", "taken")]
    for (before, _), (after, replica) in pairwise(fates):
        if before != "attempt" and after != "attempt":
            yield f"{call} was {before} and then {after} on {replica}, without another attempt"


def _check_program(program: str, events: list[Event]) -> Iterable[str]:
    kinds = [event.kind for event in events]
    if kinds.count("close") != 1:
        yield f"{program} was closed {kinds.count('close')} times"
        return
    rows = [event.value for event in events if event.kind == "row"]
    for before, after in pairwise(rows):
        if any(old > new + 1e-9 for old, new in zip(before, after, strict=True)):
            yield f"the row of {program} went from {before} to {after}"
