"""The order in which the calls of a trace read and write the blocks of a KV cache, for replays.

The times are those of one simulation, whatever a replay evicts. So all KV policies play the same sequence, and so can
Bélády's rule, which has to know the future.
"""

from __future__ import annotations

import enum
import math
from array import array
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from weft.core.errors import SimulationError
from weft.core.sim.settings import SimSettings
from weft.core.sim.simulator import simulate
from weft.core.trace.block_hashes import block_hashes
from weft.core.trace.format import TraceCall, TraceProgram, in_order
from weft.core.trace.prefixes import BLOCK_TOKENS


class Kind(enum.IntEnum):
    """Kinds of events. Of events at one time, the kind that is listed first happens first."""

    END = 0
    PROGRAM_END = 1
    ARRIVE = 2
    BEGIN = 3


@dataclass(eq=False, slots=True)
class PlayedCall:
    """A call with the numbers of its blocks. A number stands for a block's tokens and all tokens before them."""

    program: int
    name: str
    replica: int
    chain: array[int]  # the full blocks of prompt and output
    prompt_blocks: int  # of these, the blocks of the prompt
    prompt_tokens: int
    arrived_s: float = 0.0
    began_s: float = math.inf
    ended_s: float = 0.0
    tool: str | None = None  # the tool that runs after it
    next_s: float = math.inf  # when the first call begins that continues it

    @property
    def prompt(self) -> array[int]:
        """The blocks of its prompt."""
        return self.chain[: self.prompt_blocks]


class Access(NamedTuple):
    """One event. Events are compared by the first three fields."""

    time_s: float
    kind: Kind
    sequence: int
    call: PlayedCall  # at the end of a program: its last call


def accesses(programs: Sequence[TraceProgram], settings: SimSettings) -> list[Access]:
    """Simulate programs, and return the events of the KV cache in the order of time.

    A call that is preempted keeps its blocks from its first start to its end.

    Raises:
        SimulationError: The settings have no KV cache that keeps prefixes.
    """
    if not settings.shares_prefixes:
        raise SimulationError("a replay needs a KV cache that keeps prefixes; leave out unit steps.")
    played: dict[tuple[str, str], PlayedCall] = {}
    systems: dict[Hashable, array[int]] = {}  # the blocks that programs of a name begin with
    known: dict[tuple[int, int], int] = {}  # the numbers of blocks with hash ids, by id and by position
    count = 0
    for number, program in enumerate(programs):
        hashes = block_hashes(program) if program.block_tokens is not None else {}
        for call in in_order(program.calls):
            if program.block_tokens is None:
                prefix, count = _prefix(program, call, played, systems, count)
            else:
                ids, block_tokens = hashes[call.call_id], program.block_tokens
                blocks = [
                    (ids[((block + 1) * BLOCK_TOKENS - 1) // block_tokens], block)
                    for block in range(len(ids) * block_tokens // BLOCK_TOKENS)
                ]
                prefix = array("q", (known.setdefault(block, -1 - len(known)) for block in blocks))
            total = (call.prompt_tokens + call.output_tokens) // BLOCK_TOKENS
            own = max(0, total - len(prefix))
            chain = prefix[:total] + array("q", range(count, count + own))
            count += own
            played[program.program, call.call_id] = PlayedCall(
                number, program.name or "", 0, chain, call.prompt_tokens // BLOCK_TOKENS, call.prompt_tokens
            )
    result = simulate(programs, settings, runs=True)
    for run in result.runs:
        played_call = played[run.program, run.call_id]
        if run.start_s < played_call.began_s:
            played_call.began_s, played_call.replica = run.start_s, run.replica
        played_call.ended_s = max(played_call.ended_s, run.end_s)
    return _in_time(programs, played, {name: row.arrival for name, row in result.programs.items()})


def _prefix(
    program: TraceProgram,
    call: TraceCall,
    played: dict[tuple[str, str], PlayedCall],
    systems: dict[Hashable, array[int]],
    count: int,
) -> tuple[array[int], int]:
    """The blocks that a call shares with what came before it, and how many blocks there are now."""
    shared = call.shared_prefix_tokens // BLOCK_TOKENS
    if call.parents:
        return played[program.program, call.parents[0]].chain[:shared], count
    system = systems.setdefault(program.name, array("q"))
    missing = max(0, shared - len(system))
    system.extend(range(count, count + missing))
    return system[:shared], count + missing


def _in_time(
    programs: Sequence[TraceProgram], played: dict[tuple[str, str], PlayedCall], arrivals_s: Mapping[str, float]
) -> list[Access]:
    events: list[Access] = []
    for program in programs:
        last: PlayedCall | None = None
        for call in in_order(program.calls):
            this = played[program.program, call.call_id]
            parents = [played[program.program, parent] for parent in call.parents]
            this.arrived_s = max((each.ended_s for each in parents), default=arrivals_s[program.program])
            this.arrived_s += call.gap_s
            if parents and this.began_s < parents[0].next_s:
                parents[0].next_s, parents[0].tool = this.began_s, call.tool
            events += (
                Access(min(this.arrived_s, this.began_s), Kind.ARRIVE, len(events), this),
                Access(this.began_s, Kind.BEGIN, len(events) + 1, this),
                Access(this.ended_s, Kind.END, len(events) + 2, this),
            )
            last = this if last is None or this.ended_s > last.ended_s else last
        if last is not None:
            events.append(Access(last.ended_s, Kind.PROGRAM_END, len(events), last))
    return sorted(events, key=lambda event: event[:3])
