"""The contexts that programs leave in a simulated KV cache, and the order in which its segments are evicted.

Predictions and decisions are the same as in engines (`weft.core.kv_cache.contexts`). Here contexts lie in segments, and
the trace says which context a call continues.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping
from typing import TYPE_CHECKING, Final

from weft.core.kv_cache.contexts import Contexts
from weft.core.kv_cache.eviction_order import EvictionRank, Rotation, rank_of
from weft.core.kv_cache.policies import Action, Context, KvPolicy, Memory
from weft.core.prediction import KnownPause
from weft.core.sim.kv_cache.blocks import BlockNode
from weft.core.sim.kv_cache.cache import Segment
from weft.core.sim.sim_programs import SimCall, SimProgram
from weft.core.trace.prefixes import BLOCK_TOKENS

if TYPE_CHECKING:
    from weft.core.sim.kv_cache.policy_cache import PolicyKvCache

EPOCH_S: Final = 1.0


class SegmentContexts(Contexts):
    def __init__(self, policy: KvPolicy, memory: Memory, cache: PolicyKvCache, *, knows_pauses: bool = False) -> None:
        super().__init__(policy, memory)
        self._knows_pauses = knows_pauses
        self.call_of: dict[Context, SimCall] = {}  # the call that left each context
        self.left_tokens: dict[Context, int] = {}  # the tokens that it left
        self.all_left_tokens = 0
        self._cache = cache
        self._contexts: dict[Hashable, dict[int, Context]] = {}  # by program, then by the call that left them
        self._where: dict[Context, Segment] = {}
        self._inside: dict[Segment, dict[Context, None]] = {}  # the contexts that end in a segment
        self._used_s: dict[Segment, float] = {}  # when segments were last used
        self._to_decide = Rotation[Context](lambda: self._where, EPOCH_S)
        self._among = memory  # with what was compared of all contexts
        self._needed: dict[SimCall, Context] = {}  # by waiting call what it needs, until a context is left or dropped

    def refresh(self) -> Memory:
        """Read the present memory, and return it."""
        self.observe_memory(self._cache.memory())
        return self.memory

    def compare(self) -> None:
        """Read the present memory, and compare all contexts as they are now, if the policy asks for that."""
        self._among = self.refresh()
        if self.policy.compares_with_all:
            self._among = self._among.among(self._where)

    def tick(self, now_s: float) -> None:
        """Decide again on all contexts, once in each epoch."""
        for context in self._to_decide.due(now_s) if self.policy.decides else ():
            if context in self._where:
                context.decision = self.policy.decide(context, self.refresh(), now_s)
                is_kept = context.decision.action is Action.KEEP
                self._count_held(context, (self._own_tokens(context) or 0) if is_kept else 0)
                self._cache.decided(context)

    # -- calls and programs

    def needed_by(self, call: SimCall) -> Context | None:
        """The context that a call continues: its own if it was preempted, otherwise that of its first parent. None if
        what is left of that is longer than the prefix that they share, as after a compaction."""
        owner, spec = call.owner, call.spec
        mine = self._contexts.get(owner.number)
        if not mine:
            return None
        context = mine.get(call.index)
        if context is not None or not spec.parents:
            return context
        context = mine.get(owner.index_of[spec.parents[0]])
        if context is not None:
            most = spec.shared_prefix_tokens + self._block_tokens(owner)
            if context.cached_tokens >= most:
                return None
            if self.call_of[context].context_tokens < most:  # nor will it have as many tokens
                self._needed[call] = context
        return context

    def _block_tokens(self, program: SimProgram) -> int:
        """Contexts that differ by fewer tokens are the same to an engine."""
        return max(program.block_tokens, BLOCK_TOKENS)

    def call_arrived(self, call: SimCall, now_s: float) -> None:
        """A call has arrived, and needs the context of its first parent."""
        context = self.needed_by(call)
        if context is not None and context.called_s is None:
            self._next_call_arrived(context, call.spec.prompt_tokens - call.spec.shared_prefix_tokens, now_s)

    def call_moved(self, call: SimCall) -> None:
        """A call that has not begun goes to another replica, so nobody needs its parent's context here."""
        parents = call.spec.parents
        if parents:
            mine = self._contexts.get(call.owner.number, {})
            self._drop(mine.pop(call.owner.index_of[parents[0]], None))

    def call_began(self, call: SimCall, waited_s: float, now_s: float) -> None:
        """A call starts to run for the first time."""
        mine = {} if self._knows_pauses else self._contexts.get(call.owner.number, {})
        self._call_started(mine.values(), call.owner.view.name, call.rank.level, waited_s, now_s)

    def queue_changed(self, calls: Iterable[SimCall], now_s: float) -> None:
        """These calls wait; the call that starts next comes first."""
        known, find = self._needed.get, self.needed_by
        self._set_turns(((known(call) or find(call), call.rank.level) for call in calls), now_s)

    def call_left(self, call: SimCall, segment: Segment, called_s: float | None, now_s: float) -> None:
        """A call has ended or was preempted. The context that it leaves replaces those of its program that end in its
        prefix.

        Args:
            called_s: Since when the call waits again, if it was preempted. None: it has ended.
        """
        owner, spec = call.owner, call.spec
        self._needed.clear()
        mine = self._contexts.setdefault(owner.number, {})
        for index in self._in_prefix(mine, call, segment):
            self._drop(mine.pop(index))
        after = [owner.spec.calls[child] for child in owner.children[call.index]]
        context = self._make_context(
            owner.number,
            owner.view.name,
            now_s,
            tool=after[0].tool if after else None,
            level=call.rank.level,
            pause=KnownPause(min((each.gap_s for each in after), default=0.0)) if self._knows_pauses else None,
        )
        if self._knows_pauses:
            continues = any(each.parents[0] == spec.call_id for each in after)
            context.chance = 1.0 if continues or called_s is not None else 0.0
        context.called_s, context.tokens = called_s, call.context_tokens
        mine[call.index] = context
        self.call_of[context] = call
        self.put(context, segment)
        self.left_tokens[context] = context.tokens
        self.all_left_tokens += context.tokens
        self._decide(context, now_s)

    def _in_prefix(self, mine: Mapping[int, Context], call: SimCall, segment: Segment) -> list[int]:
        """The contexts of a call's program, by call, of which nothing is left but a part of the call's own context."""
        prefix: set[Segment | None] = {None}
        below: Segment | None = segment
        while below is not None:
            prefix.add(below)
            below = below.parent
        parent = call.owner.index_of[call.spec.parents[0]] if call.spec.parents else None
        most = self._block_tokens(call.owner)
        found = []
        for index, context in mine.items():
            end = self._where.get(context)
            if index == parent and (context.called_s is not None or end is None):
                is_part = context.called_s is not None or context.host_tokens < call.spec.shared_prefix_tokens + most
            elif end is None or context.host_tokens > context.tokens:  # of another branch
                is_part = False
            else:
                is_part = end in prefix or (end.parent in prefix and end.tokens < most)
            if is_part or index == call.index:
                found.append(index)
        return found

    def end_program(self, program: SimProgram) -> None:
        """No call of a program will come."""
        for context in self._contexts.pop(program.number, {}).values():
            self._give_up(context)
            self._cache.left_behind(context)
            self._drop(context)

    def _drop(self, context: Context | None) -> None:
        if context is not None:
            self._needed.clear()
            self._cache.given_up(context)
            self._count_held(context, 0)
            self.call_of.pop(context, None)
            self.all_left_tokens -= self.left_tokens.pop(context, 0)
            self._leave_segment(context)

    # -- segments

    def put(self, context: Context, segment: Segment) -> None:
        """Let a context end in this segment, and no longer where it ended before."""
        self._leave_segment(context)
        self._where[context] = segment
        self._inside.setdefault(segment, {})[context] = None
        context.tokens = segment.end

    def used(self, segment: Segment, now_s: float) -> None:
        self._used_s[segment] = now_s

    def segment_dropped(self, segment: Segment) -> None:
        """A segment was evicted. Contexts that ended in it now end in its parent."""
        parent = segment.parent
        for context in self._inside.pop(segment, {}):
            del self._where[context]
            context.tokens = 0
            if parent is not None:
                self.put(context, parent)
            else:
                self._count_held(context, 0)
        used_s = self._used_s.pop(segment, 0.0)
        if parent is not None:
            self._used_s[parent] = max(self._used_s.get(parent, 0.0), used_s)

    def rank(self, leaf: Segment, now_s: float) -> EvictionRank:
        return rank_of(
            self.policy,
            self._among,
            self._inside.get(leaf, ()),
            now_s,
            used_s=self._used_s.get(leaf, 0.0),
            is_common=_is_common(leaf),
            depth=leaf.end,
        )

    def changes_rank(self, leaf: Segment) -> bool:
        """Whether the rank of a leaf follows the time. That of KV of ended programs does not."""
        return leaf in self._inside or not self.policy.evicts_ended_first or _is_common(leaf)

    def _leave_segment(self, context: Context) -> None:
        segment = self._where.pop(context, None)
        if segment is not None:
            del self._inside[segment][context]
            if not self._inside[segment]:
                del self._inside[segment]

    def end_of(self, context: Context) -> Segment | None:
        """The segment in which a context ends; None if nothing of it is cached."""
        return self._where.get(context)

    def held_until_s(self, segment: Segment, now_s: float) -> float:
        """When the first hold of a context that ends in a segment expires."""
        untils_s = (context.decision.until_s for context in self._inside.get(segment, ()))
        return min((until_s for until_s in untils_s if until_s > now_s), default=math.inf)

    def ending_in(self, segment: Segment) -> list[Context]:
        return list(self._inside.get(segment, ()))

    def need_more_than(self, tokens: float) -> bool:
        """Whether the contexts have more than `tokens` tokens in the KV cache. At most O(n) for their n segments."""
        if self.all_left_tokens <= tokens or sum(context.tokens for context in self._where) <= tokens:
            return False
        seen: set[Segment] = set()
        for end in self._inside:
            segment: Segment | None = end
            while segment is not None and segment not in seen:
                seen.add(segment)
                tokens -= segment.tokens
                segment = segment.parent
            if tokens < 0:
                break
        return tokens < 0

    def _own_tokens(self, context: Context) -> int | None:
        segment = self._where.get(context)
        if segment is None:
            return None
        tokens = 0
        while segment is not None and not _is_common(segment):
            tokens += segment.tokens
            segment = segment.parent
        return tokens

    def _decide(self, context: Context, now_s: float) -> None:
        self.refresh()
        super()._decide(context, now_s)

    def _after_decision(self, context: Context, now_s: float) -> None:
        self._cache.changed(context)
        self._cache.decided(context)


def _is_common(segment: Segment) -> bool:
    """Whether programs share a segment: those of one name, such as their system prompt, or those with its hash ids."""
    key = segment.key
    return key.is_common if isinstance(key, BlockNode) else isinstance(key, tuple) and key[0] == "name"
