"""KV policies in the simulator: the contexts that programs leave in a simulated KV cache, and which of them is evicted.

The policies and predictors are those of engines. Contexts lie in segments here and in blocks there. There is no host
memory between calls, so nothing is spilled.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Hashable
from typing import Final

from weft.core.kv_cache.eviction_order import Group, group_of
from weft.core.kv_cache.policies import Action, Context, KvPolicy, Memory
from weft.core.prediction import Reuse, ToolTimes
from weft.core.sim.calls import SimCall, SimProgram
from weft.core.sim.kv import KvCache, Segment

_EPOCH_S: Final = 1.0
_WAIT_SHARE: Final = 0.05  # of the latest call in the average wait


class KeptKv(KvCache):
    """A KV cache in which a KV policy chooses what is evicted.

    Args:
        capacity: In tokens, bounded.
        policy: A policy of its own.
        prefill_token_s: Seconds to compute a prompt token.
    """

    def __init__(self, capacity: float, policy: KvPolicy, prefill_token_s: float) -> None:
        super().__init__(capacity)
        self._policy = policy
        self._prefill_token_s = prefill_token_s
        self._tool_times, self._reuse = ToolTimes(), Reuse()
        self._contexts: dict[Hashable, dict[int, Context]] = {}  # of each program, by the call that left it
        self._where: dict[Context, Segment] = {}
        self._inside: dict[Segment, dict[Context, None]] = {}  # the contexts that end in a segment
        self._used_s: dict[Segment, float] = {}  # of segments without contexts: when they were last used
        self._held: dict[Context, int] = {}
        self._wait_s = 0.0
        self._now_s = 0.0
        self._epoch_s = -math.inf
        self._entries = 0
        self._order: list[tuple[int, float, int, int, Segment]] | None = None  # the leaves, until something changes

    def tick(self, now_s: float) -> None:
        """The time is `now_s`. In each epoch all contexts are decided again."""
        if now_s > self._now_s:
            self._now_s, self._order = now_s, None
        if now_s >= self._epoch_s + _EPOCH_S and self._policy.decides:
            self._epoch_s = now_s
            for context in self._where:
                self._decide(context)

    def call_arrived(self, call: SimCall) -> None:
        """A call has arrived, and needs the context of its first parent."""
        parents = call.spec.parents
        mine = self._contexts.get(call.owner.number)
        context = mine.get(call.owner.index_of[parents[0]]) if mine and parents else None
        if context is None or context.called_s is not None:
            return
        context.called_s = self._now_s
        self._tool_times.observe(_pause_name(context.tool, context.name), self._now_s - context.used_s)
        self._reuse.observe(context.name, context.age, continued=True)
        self._decide(context)

    def call_began(self, call: SimCall, waited_s: float) -> None:
        """A call starts to run for the first time."""
        self._wait_s += _WAIT_SHARE * (waited_s - self._wait_s)
        for context in self._contexts.get(call.owner.number, {}).values():
            context.age += 1
            context.chance = self._reuse.chance(context.name, context.age)

    def call_ended(self, call: SimCall, segment: Segment, *, called_s: float | None = None) -> None:
        """A call has ended. What it leaves takes the place of its first parent's context."""
        owner, spec = call.owner, call.spec
        mine = self._contexts.setdefault(owner.number, {})
        if spec.parents:
            self._give_up(mine.pop(owner.index_of[spec.parents[0]], None))
        tool = next((owner.spec.calls[child].tool for child in owner.children[call.index]), None)
        name = owner.view.name
        context = Context(owner.number, name, self._now_s, self._tool_times.of(_pause_name(tool, name)), tool=tool)
        context.called_s = called_s
        context.tokens, context.chance = call.context_tokens, self._reuse.chance(name, 0)
        self._give_up(mine.get(call.index))
        mine[call.index] = context
        self._put(context, segment)
        self._decide(context)

    def call_preempted(self, call: SimCall, segment: Segment) -> None:
        """A running call waits again, and needs what it leaves."""
        self.call_ended(call, segment, called_s=self._now_s)

    def program_ended(self, program: SimProgram) -> None:
        """No call of a program will come."""
        for context in self._contexts.pop(program.number, {}).values():
            if context.called_s is None:
                self._reuse.observe(context.name, context.age, continued=False)
            self._give_up(context)

    def release(self, own: Segment) -> None:
        super().release(own)
        self._order = None
        segment: Segment | None = own
        while segment is not None and not segment.pins:
            self._used_s[segment] = self._now_s
            segment = segment.parent

    def _split(self, segment: Segment, at: int) -> Segment:
        head = super()._split(segment, at)
        self._used_s[head] = self._now_s
        return head

    def _next_leaf(self) -> Segment:
        if self._order is None:
            memory = self._memory()
            self._order = [self._entry(leaf, memory) for leaf in self._leaves]
            heapq.heapify(self._order)
        while self._order[0][-1] not in self._leaves:
            heapq.heappop(self._order)
        return self._order[0][-1]

    def _drop(self, leaf: Segment) -> None:
        parent = leaf.parent
        contexts = self._inside.pop(leaf, {})
        used_s = self._used_s.pop(leaf, 0.0)
        super()._drop(leaf)
        for context in contexts:
            del self._where[context]
            context.tokens = 0
            if parent is not None:
                self._put(context, parent)
            else:
                self._held.pop(context, None)
        if parent is not None:
            self._used_s[parent] = max(self._used_s.get(parent, 0.0), used_s)
            if self._order is not None and parent in self._leaves:
                heapq.heappush(self._order, self._entry(parent, self._memory()))

    def _entry(self, leaf: Segment, memory: Memory) -> tuple[int, float, int, int, Segment]:
        self._entries += 1
        contexts = self._inside.get(leaf)
        if not contexts:
            is_common = isinstance(leaf.key, tuple) and leaf.key[0] == "name"
            group = Group.LEFT if is_common or not self._policy.evicts_ended_first else Group.ENDED
            used_s = self._used_s.get(leaf, 0.0)
            return group, self._policy.worth_of_nobody(used_s, memory, self._now_s), -leaf.end, self._entries, leaf
        group = max(group_of(context, self._now_s) for context in contexts)
        best = (each for each in contexts if group_of(each, self._now_s) == group)
        worth = self._policy.worth_together(self._policy.worth(each, memory, self._now_s) for each in best)
        return group, worth, -leaf.end, self._entries, leaf

    def _memory(self) -> Memory:
        used = min(1.0, (self.pinned + sum(self._held.values())) / self.capacity)
        return Memory(used, self.pinned, self._prefill_token_s, wait_s=self._wait_s)

    def _decide(self, context: Context) -> None:
        self._order = None
        if not self._policy.decides:
            return
        context.decision = self._policy.decide(context, self._memory(), self._now_s)
        self._held.pop(context, None)
        if context.decision.action is Action.KEEP and context in self._where:
            self._held[context] = self._where[context].tokens

    def _put(self, context: Context, segment: Segment) -> None:
        self._where[context] = segment
        self._inside.setdefault(segment, {})[context] = None
        context.tokens = segment.end

    def _give_up(self, context: Context | None) -> None:
        if context is None:
            return
        self._order = None
        self._held.pop(context, None)
        segment = self._where.pop(context, None)
        if segment is not None:
            del self._inside[segment][context]
            if not self._inside[segment]:
                del self._inside[segment]


def _pause_name(tool: str | None, program_name: str) -> str:
    """What a pause is known by: its tool, or the program whose calls it lies between."""
    return tool or f"after {program_name}"
