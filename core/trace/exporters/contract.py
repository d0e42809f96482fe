"""What all exporters of traces do: block ids, sessions, and a list of what is lost."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from weft.core.errors import TraceError
from weft.core.trace.format import TraceCall, TraceProgram, ordered
from weft.core.trace.prefixes import block_hashes

MODEL: Final = "recorded"  # the formats need the name of a model, and traces have none
BLOCK_TOKENS: Final = 64  # of programs without block hashes, as in the corpora


@dataclass(slots=True)
class NotExported:
    """What the file does not have.

    Attributes:
        lost: what the format cannot say, and how often it was there.
        programs: the programs that the format cannot say at all, each with the reason.
    """

    lost: Counter[str] = field(default_factory=Counter)
    programs: list[str] = field(default_factory=list)
    _firsts: set[int] = field(default_factory=set)

    def note(self, program: TraceProgram) -> None:
        calls = program.calls
        found = {
            "names of programs": program.name is not None,
            "tenants": program.tenant is not None,
            "deadlines": program.deadline_s is not None,
            "unknown ends": not program.end_known,
            "texts of prompts": sum(call.prompt is not None for call in calls),
            "what engines measured": sum(call.measured is not None for call in calls),
        }
        firsts = {call.hash_ids[0] for call in calls if call.hash_ids and not call.parents}
        found["prefixes that programs share"] = bool(firsts & self._firsts) or any(
            call.shared_prefix_tokens and not call.parents for call in calls
        )
        self._firsts |= firsts
        self.lost += Counter({what: int(number) for what, number in found.items()})


def block_size(programs: Iterable[TraceProgram]) -> int:
    """The tokens of a block in all programs that have block hashes. Several sizes raise TraceError."""
    sizes = sorted({program.block_tokens for program in programs if program.block_tokens is not None})
    if len(sizes) > 1:
        raise TraceError(
            f"the programs have blocks of {' and '.join(map(str, sizes))} tokens, and the format has one size for all; "
            "export those of each size alone."
        )
    return sizes[0] if sizes else BLOCK_TOKENS


def block_ids(program: TraceProgram, block_tokens: int) -> dict[str, list[int]]:
    """Return the ids of the whole blocks of each call's prompt, numbered from 0. Equal ids mean equal prefixes.

    A program without block hashes gets them from the lengths of its prefixes, rounded down to blocks.
    """
    if program.block_tokens is not None:
        chains: dict[str, Sequence[int]] = dict(block_hashes(program))
    else:
        chains, fresh = {}, itertools.count()
        for call in ordered(program.calls, program.program):
            shared = call.shared_prefix_tokens // block_tokens if call.parents else 0
            before = chains[call.parents[0]][:shared] if call.parents else ()
            more = (call.prompt_tokens + call.output_tokens) // block_tokens - len(before)
            chains[call.call_id] = [*before, *itertools.islice(fresh, more)]
    numbers: dict[int, int] = {}
    return {
        call.call_id: [
            numbers.setdefault(each, len(numbers))
            for each in chains[call.call_id][: call.prompt_tokens // block_tokens]
        ]
        for call in program.calls
    }


def sessions_of(calls: Iterable[TraceCall]) -> list[list[TraceCall]]:
    """Return the sessions of a program: calls of one agent that follow one another. The first one has its first call.

    `calls` are its calls, each after its parents.
    """
    sessions: list[list[TraceCall]] = []
    last: dict[str, int] = {}  # the number of the session that a call is the last one of
    for call in calls:
        own = [last[parent] for parent in call.parents if parent in last]
        number = min((each for each in own if sessions[each][-1].agent == call.agent), default=len(sessions))
        if number == len(sessions):
            sessions.append([])
        else:
            del last[sessions[number][-1].call_id]
        sessions[number].append(call)
        last[call.call_id] = number
    return sessions


def begin_of(call: TraceCall) -> float | None:
    """When a call was made, in seconds from the program's arrival: as recorded, or as an engine measured."""
    if call.at_s is None and call.measured is not None:
        return call.measured.arrival_s
    return call.at_s
