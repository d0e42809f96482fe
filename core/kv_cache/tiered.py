"""Retention with host memory: contexts live on the device, in host memory, or in both."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from weft.core.kv_cache.host_tier import HostTier
from weft.core.kv_cache.policies import LEAVE, Action, Context, KvPolicy, Memory
from weft.core.kv_cache.prefix_tree import Block
from weft.core.kv_cache.retention import Retention, RunningCall
from weft.core.kv_cache.spill_ahead import MOST_LEFT
from weft.core.prediction import TimeEstimate


class TieredRetention(Retention):
    """Retention that still knows contexts which the device has evicted, as long as host memory has a part of them.

    Args:
        host: Host memory, with the same policy.

    Attributes:
        host: The host memory.
        spills: Contexts to copy to host memory. The caller takes them out.
        left: What ended programs have left, with the keys of its blocks, to be copied when nothing else is. The caller
            takes it out.
        keeps_ended: Whether ended programs leave something, as where copies delay no step.
    """

    def __init__(self, policy: KvPolicy, block_tokens: int, memory: Memory, host: HostTier) -> None:
        super().__init__(policy, block_tokens, memory)
        self.host = host
        self.spills: dict[Context, None] = {}
        self.left: dict[Context, list[Hashable]] = {}
        self.keeps_ended = False

    def call_ended(
        self, call: RunningCall, now_s: float, *, tool: str | None = None, pause: TimeEstimate | None = None
    ) -> Context | None:
        context = super().call_ended(call, now_s, tool=tool, pause=pause)
        if context is not None:
            self.host.claim(context, self.chain_of(context), now_s)
            if context.on_host:
                self.spills.pop(context, None)
                self._after_decision(context, now_s)
        return context

    def program_ended(self, program: Hashable, now_s: float) -> None:
        chains = {context: self.chain_of(context) for context in self.contexts_of(program)}
        super().program_ended(program, now_s)
        for context, chain in chains.items():
            self.spills.pop(context, None)
            if not self.keeps_ended:
                self.host.drop(context)
                continue
            if context.decision.action is Action.SPILL and chain and not context.on_host:
                self.left[context] = chain
            context.is_needed, context.tokens, context.chance, context.decision = False, 0, 0.0, LEAVE
        self.host.rank_again(chains)
        while len(self.left) > MOST_LEFT:
            del self.left[next(iter(self.left))]

    def epoch(self, memory: Memory, now_s: float) -> list[Context]:
        to_spill = super().epoch(memory, now_s)
        for context in to_spill:
            self._note_spill(context)
        if self.policy.decides or self.policy.changes_with_time:
            self.host.order.mark_all()
        return to_spill

    def to_revisit(self) -> list[Context | Block]:
        found = super().to_revisit()
        if self.policy.decides or self.policy.changes_with_time:
            found += self.host.order.leaves()
        return found

    def revisit(self, each: Context | Block, now_s: float) -> None:
        if not isinstance(each, Block):
            super().revisit(each, now_s)
            self._note_spill(each)
        elif self.host.tree.get(each.key) is each:
            self.host.order.mark(each)
        else:
            super().revisit(each, now_s)

    def observe_memory(self, memory: Memory) -> None:
        super().observe_memory(memory)
        self.host.order.memory = self.memory

    def contexts_of(self, program: Hashable) -> list[Context]:
        found = super().contexts_of(program)
        away = [each for each in self.host.tree.contexts_of(program) if each not in found]
        return sorted(found + away, key=lambda context: context.used_s) if away else found

    def contexts_anywhere(self) -> list[Context]:
        """The contexts of open programs, on the device or in host memory."""
        away = self.host.tree.contexts_beyond(self.tree)
        return self.tree.contexts() + [each for each in away if each.program in self._programs]

    def fetched(self, context: Context, chain: Sequence[Hashable], now_s: float) -> None:
        """The blocks of a context up to the end of `chain` were copied back to the device."""
        block = self.tree.extend(context.program, chain, context.used_s)
        before = self.tree.end_of(context)
        if block is None or (before is not None and before.depth >= block.depth):
            return
        if not context.is_needed:  # its program has ended meanwhile
            self._mark(block)
            return
        self.tree.drop_context(context)
        for each in self.tree.contexts_on(context.program, block):
            self._count_held(each, 0)
        context.is_fetched = True
        self.tree.end_context(context, block)
        self._decide(context, now_s)

    def host_changed(self) -> bool:
        """Rank the contexts again of which host memory has lost blocks. Returns whether there are any."""
        shortened = list(self.host.shortened)
        self.host.shortened.clear()
        for context in shortened:
            block = self.tree.end_of(context)
            if block is not None:
                self._mark(block)
        return bool(shortened)

    def _find(self, program: Hashable, chain: Sequence[Hashable]) -> tuple[int, list[Context]]:
        hit, found = super()._find(program, chain)
        if not found:
            tree = self.host.tree
            hit = max(hit, tree.hit_blocks(chain))
            found = tree.contexts_on(program, tree.get(chain[hit - 1]) if hit else None)
        return hit, [each for each in found if self._is_continued(each, chain)]

    def _is_continued(self, context: Context, chain: Sequence[Hashable]) -> bool:
        """Whether a chain has all of a context, and not only what the device or host memory alone has of it."""
        ends = (self.tree.end_of(context), self.host.tree.end_of(context))
        return all(end is None or (end.depth < len(chain) and chain[end.depth] == end.key) for end in ends)

    def _after_decision(self, context: Context, now_s: float) -> None:
        super()._after_decision(context, now_s)
        self._note_spill(context)
        self.host.rank_again([context])

    def _note_spill(self, context: Context) -> None:
        if context.decision.action is Action.SPILL and context.tokens and not context.on_host:
            self.spills[context] = None

    def check_integrity(self) -> None:
        super().check_integrity()
        self.host.check_integrity()
