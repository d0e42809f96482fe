"""Replays one sequence of accesses against KV policies, and against Bélády's rule, which no policy can beat.

In a replay, all blocks cost the same to compute again, and the blocks of running calls stay. Then it is optimal to
evict the block whose next use comes last (Bélády 1966). The end of a context is never used without its beginning, so
the rule evicts ends first and keeps prefixes whole. `weft sim --replay` shows the results.
"""

from __future__ import annotations

import enum
import math
from array import array
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from weft.core.errors import SimulationError
from weft.core.kv_cache.eviction_order import EvictionOrder, EvictionRank, Leaf
from weft.core.kv_cache.policies import KV_POLICIES, KvPolicy, KvPolicyConfig, Memory
from weft.core.kv_cache.prefix_tree import Block, PrefixTree
from weft.core.kv_cache.retention import ProgramGone, Retention, RunningCall
from weft.core.prediction import KnownTime
from weft.core.sim.settings import SimSettings
from weft.core.sim.simulator import simulate
from weft.core.trace.format import TraceCall, TraceProgram, in_order
from weft.core.trace.prefixes import BLOCK_TOKENS, block_hashes


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
    """Simulate programs, and return the events of the KV cache, which has to keep prefixes, in the order of time.

    A call that is preempted keeps its blocks from its first start to its end.
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


EPOCH_S: Final = 0.25  # time from one epoch of the KV policies to the next
BELADY: Final = "belady (oracle)"
_REPORT_EVERY: Final = 1000  # events between two reports of progress
NEVER_S: Final = 1e9  # an oracle's pause if no call follows


class ReplayResult(NamedTuple):
    """The result of one rule for a sequence of accesses. All counts are in tokens."""

    rule: str
    prompt_tokens: int  # of all calls
    hit_tokens: int  # found in the cache when the call began
    recomputed_tokens: int  # computed again, because they had been evicted

    @property
    def computed_tokens(self) -> int:
        return self.prompt_tokens - self.hit_tokens

    def ratio(self, best: ReplayResult) -> float:
        """The computed tokens as a multiple of those of the best rule."""
        return self.computed_tokens / best.computed_tokens if best.computed_tokens else 1.0


class _Belady(EvictionOrder):
    """An oracle: evicts the block whose next use comes last."""

    def __init__(self, policy: KvPolicy, tree: PrefixTree, memory: Memory) -> None:
        super().__init__(policy, tree, memory)
        self.uses: dict[tuple[int, object], list[int]] = {}  # by replica and block: positions of events that use it
        self.replica = 0
        self.position = 0  # of the present event; positions are exact where several events have one time

    def rank_of(self, block: Block, now_s: float, leaf: Leaf | None = None) -> EvictionRank:
        uses = self.uses.get((self.replica, block.key), [])
        later = bisect_right(uses, self.position)
        return EvictionRank(0, -uses[later] if later < len(uses) else -math.inf, -block.depth)


def replay(
    events: Sequence[Access],
    settings: SimSettings,
    policy: KvPolicyConfig,
    *,
    knows_times: bool = False,
    check: Callable[[Retention], object] | None = None,
    advance: Callable[[int], object] | None = None,
) -> ReplayResult:
    """Play a sequence against a KV policy.

    Args:
        settings: The engines. Only the KV cache's capacity, the step times and the replicas count.
        knows_times: Whether the policy is an oracle that knows when each context is used next.
        advance: Called from time to time with the number of events since the last time.
    """
    name = f"{policy.name} (oracle)" if knows_times else policy.name
    return _Replay(
        events, settings, lambda: _retention(policy.make(), settings), knows_times, check, advance=advance
    ).play(name)


def replay_belady(
    events: Sequence[Access], settings: SimSettings, *, advance: Callable[[int], object] | None = None
) -> ReplayResult:
    """Play a sequence against Bélády's rule, an oracle that knows the sequence. No rule computes less."""
    uses: dict[tuple[int, object], list[int]] = defaultdict(list)
    for position, event in enumerate(events):
        if event.kind is Kind.BEGIN:
            for block in event.call.prompt:
                uses[event.call.replica, block].append(position)

    def make() -> Retention:
        retention = _retention(KvPolicyConfig("lru").make(), settings, _Belady)
        assert isinstance(retention.order, _Belady)  # noqa: S101  for mypy
        retention.order.uses = uses
        return retention

    return _Replay(events, settings, make, advance=advance).play(BELADY)


def replay_all(
    programs: Sequence[TraceProgram], settings: SimSettings, *, progress: Callable[[float], object] | None = None
) -> list[ReplayResult]:
    """Play the programs' accesses against Bélády's rule, every KV policy, and next-use with known times, in this order.

    Args:
        settings: The engines. The scheduling policy decides when each access happens.
        progress: Called from time to time with the share of all events that have been played.

    Raises:
        SimulationError: The settings have no KV cache of a bounded size that keeps prefixes.
    """
    if math.isinf(settings.kv_capacity):
        raise SimulationError("a replay needs a bounded KV cache; give a number of tokens, and leave out unit steps.")
    events = accesses(programs, settings)
    total, played = len(events) * (len(KV_POLICIES) + 2), 0

    def advance(count: int) -> None:
        nonlocal played
        played += count
        if progress is not None:
            progress(played / total)

    results = [replay_belady(events, settings, advance=advance)]
    results += (replay(events, settings, KvPolicyConfig(name), advance=advance) for name in KV_POLICIES)
    return [*results, replay(events, settings, KvPolicyConfig("next-use"), knows_times=True, advance=advance)]


def _retention(
    policy: KvPolicy,
    settings: SimSettings,
    order: Callable[[KvPolicy, PrefixTree, Memory], EvictionOrder] = EvictionOrder,
) -> Retention:
    return Retention(policy, BLOCK_TOKENS, Memory(0.0, 0, settings.timing.prefill_token_s), order)


class _Replay:
    def __init__(
        self,
        events: Sequence[Access],
        settings: SimSettings,
        make: Callable[[], Retention],
        knows_times: bool = False,
        check: Callable[[Retention], object] | None = None,
        *,
        advance: Callable[[int], object] | None = None,
    ) -> None:
        self._events = events
        self._advance = advance or (lambda _count: None)
        self._capacity = settings.kv_tokens // BLOCK_TOKENS
        self._prefill_token_s = settings.timing.prefill_token_s
        self._knows_times = knows_times
        self._check = check
        self._retentions = [make() for _ in range(settings.replicas)]
        for number, retention in enumerate(self._retentions):
            if isinstance(retention.order, _Belady):
                retention.order.replica = number
        self._running: dict[PlayedCall, RunningCall] = {}
        self._computed: set[tuple[int, int]] = set()  # blocks that a replica has computed
        self._hit = self._again = self._prompt = 0

    def play(self, rule: str) -> ReplayResult:
        epoch_s = -math.inf
        for position, event in enumerate(self._events):
            now_s, call = event.time_s, event.call
            retention = self._retentions[call.replica]
            if isinstance(retention.order, _Belady):
                retention.order.position = position
            if now_s >= epoch_s + EPOCH_S:
                epoch_s = now_s
                for each in self._retentions:
                    each.epoch(self._memory(each), now_s)
            retention.observe_memory(self._memory(retention))
            if event.kind is Kind.ARRIVE:
                retention.call_arrived(call.program, call.prompt, now_s)
            elif event.kind is Kind.BEGIN:
                self._begin(retention, call, now_s)
            elif event.kind is Kind.END:
                self._end(retention, call, now_s)
            else:
                for each in self._retentions:
                    each.happened(call.program, ProgramGone(), now_s)
            if self._check is not None:
                self._check(retention)
            if (position + 1) % _REPORT_EVERY == 0:
                self._advance(_REPORT_EVERY)
        self._advance(len(self._events) % _REPORT_EVERY)
        return ReplayResult(rule, self._prompt, self._hit * BLOCK_TOKENS, self._again * BLOCK_TOKENS)

    def _begin(self, retention: Retention, call: PlayedCall, now_s: float) -> None:
        prompt = call.prompt
        hit = retention.tree.hit_blocks(prompt)
        self._prompt += call.prompt_tokens
        self._hit += hit
        self._again += sum((call.replica, block) in self._computed for block in prompt[hit:])
        self._running[call] = retention.call_began(
            call.program, call.name, prompt, now_s, waited_s=now_s - call.arrived_s
        )
        self._fit(retention, now_s)

    def _end(self, retention: Retention, call: PlayedCall, now_s: float) -> None:
        running = self._running.pop(call)
        retention.call_grew(running, call.chain, now_s)
        self._computed.update((call.replica, block) for block in call.chain)
        pause = KnownTime(min(call.next_s - now_s, NEVER_S)) if self._knows_times else None
        retention.call_ended(running, now_s, tool=call.tool, pause=pause)
        self._fit(retention, now_s)

    def _fit(self, retention: Retention, now_s: float) -> None:
        while len(retention.tree) > self._capacity and retention.order.evict(now_s) is not None:
            pass

    def _memory(self, retention: Retention) -> Memory:
        running_tokens = retention.tree.pinned * BLOCK_TOKENS
        used_share = (running_tokens + retention.held_tokens) / (self._capacity * BLOCK_TOKENS)
        return Memory(min(1.0, used_share), running_tokens, self._prefill_token_s)
