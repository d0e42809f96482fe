"""The contexts that programs leave in a simulated KV cache, and the order in which its segments are evicted.

Predictions and decisions are the same as in engines (`weft.core.kv_cache.contexts`). Here contexts lie in segments, and
the trace says which context a call continues.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable
from typing import Final, Protocol

from weft.core.kv_cache.contexts import Contexts
from weft.core.kv_cache.eviction_order import Rank, rank_of
from weft.core.kv_cache.policies import Context, KvPolicy, Memory
from weft.core.prediction import KnownPause
from weft.core.sim.block_tree import BlockNode
from weft.core.sim.calls import SimCall, SimProgram
from weft.core.sim.kv import Segment

_EPOCH_S: Final = 1.0


class SegmentCache(Protocol):
    """The KV cache that has the segments."""

    def memory(self) -> Memory:
        """The present memory as policies see it."""

    def decided(self, context: Context) -> None:
        """A context was decided again."""

    def given_up(self, context: Context) -> None:
        """Nobody needs a context any more."""


class SegmentContexts(Contexts):
    """Contexts in segments.

    Args:
        policy: A KV policy object of its own.
        memory: The memory at the start.
        cache: The KV cache that has the segments.
        knows_pauses: As in `SimSettings`.
    """

    def __init__(self, policy: KvPolicy, memory: Memory, cache: SegmentCache, *, knows_pauses: bool = False) -> None:
        super().__init__(policy, memory)
        self._knows_pauses = knows_pauses
        self.call_of: dict[Context, SimCall] = {}  # the call that left each context
        self._cache = cache
        self._contexts: dict[Hashable, dict[int, Context]] = {}  # by program, then by the call that left them
        self._where: dict[Context, Segment] = {}
        self._inside: dict[Segment, dict[Context, None]] = {}  # the contexts that end in a segment
        self._used_s: dict[Segment, float] = {}  # when segments were last used
        self._epoch_s = -math.inf
        self._among = memory  # with what was compared of all contexts

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
        if now_s >= self._epoch_s + _EPOCH_S and self.policy.decides:
            self._epoch_s = now_s
            for context in self._where:
                self._decide(context, now_s)

    # -- calls and programs

    def needed_by(self, call: SimCall) -> Context | None:
        """The context that a call continues: its own if it was preempted, otherwise that of its first parent."""
        mine = self._contexts.get(call.owner.number)
        if mine is None or call.index in mine:
            return mine[call.index] if mine else None
        parents = call.spec.parents
        return mine.get(call.owner.index_of[parents[0]]) if parents else None

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
        self._set_turns(((self.needed_by(call), call.rank.level) for call in calls), now_s)

    def call_left(self, call: SimCall, segment: Segment, called_s: float | None, now_s: float) -> None:
        """A call has ended or was preempted. The context that it leaves replaces that of its first parent.

        Args:
            call: The call.
            segment: The call's own segment.
            called_s: Since when the call waits again, if it was preempted. None: it has ended.
            now_s: The time.
        """
        owner, spec = call.owner, call.spec
        mine = self._contexts.setdefault(owner.number, {})
        if spec.parents:
            self._drop(mine.pop(owner.index_of[spec.parents[0]], None))
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
        self._drop(mine.get(call.index))
        mine[call.index] = context
        self.call_of[context] = call
        self.put(context, segment)
        self._decide(context, now_s)

    def program_ended(self, program: SimProgram) -> None:
        """No call of a program will come."""
        for context in self._contexts.pop(program.number, {}).values():
            self._give_up(context)
            self._drop(context)

    def _drop(self, context: Context | None) -> None:
        if context is not None:
            self._cache.given_up(context)
            self._count_held(context, 0)
            self.call_of.pop(context, None)
            self._leave_segment(context)

    # -- segments

    def put(self, context: Context, segment: Segment) -> None:
        """Let a context end in this segment, and no longer where it ended before."""
        self._leave_segment(context)
        self._where[context] = segment
        self._inside.setdefault(segment, {})[context] = None
        context.tokens = segment.end

    def used(self, segment: Segment, now_s: float) -> None:
        """A call has used a segment."""
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

    def rank(self, leaf: Segment, now_s: float) -> Rank:
        """The rank of a segment in the order of eviction."""
        return rank_of(
            self.policy,
            self._among,
            self._inside.get(leaf, ()),
            now_s,
            used_s=self._used_s.get(leaf, 0.0),
            is_common=_is_common(leaf),
            depth=leaf.end,
        )

    def _leave_segment(self, context: Context) -> None:
        segment = self._where.pop(context, None)
        if segment is not None:
            del self._inside[segment][context]
            if not self._inside[segment]:
                del self._inside[segment]

    def is_cached(self, context: Context) -> bool:
        """Whether the KV cache has a part of a context."""
        return context in self._where

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
        del now_s
        self._cache.decided(context)


def _is_common(segment: Segment) -> bool:
    """Whether programs share a segment: those of one name, such as their system prompt, or those with its hash ids."""
    key = segment.key
    return key.is_common if isinstance(key, BlockNode) else isinstance(key, tuple) and key[0] == "name"
