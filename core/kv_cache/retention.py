"""Retention: turns the events of programs, calls and tools into decisions and an order of eviction.

A replica of an engine, or of a replay, has one object. It joins predictors, a KV policy and the order of eviction. It
copies nothing and reads no clock; times are seconds on the caller's clock. If an event is lost, memory is wasted for a
while, but no token is ever wrong.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from weft.core.kv_cache.contexts import Contexts
from weft.core.kv_cache.eviction_order import EvictionOrder
from weft.core.kv_cache.host_tier import HostTier
from weft.core.kv_cache.policies import LEAVE, MOST_HOLD_S, Action, Context, KvPolicy, Memory
from weft.core.kv_cache.prefix_tree import Block, PrefixTree
from weft.core.kv_cache.spill_ahead import MOST_LEFT
from weft.core.prediction import TimeEstimate

_MOST_TOOLS: Final = 64  # tools that run in a program at once
_MOST_PROGRAMS: Final = 100_000  # open programs; the one that was used longest ago then counts as ended


class ToolStarted(NamedTuple):
    """A program waits for a tool from now on. It has made a call before."""

    tool: str
    run: Hashable = None  # tells this run of a tool from others; one that is known already changes nothing


class ToolEnded(NamedTuple):
    """A tool has returned. Its time is learned, whether a call follows or not."""

    run: Hashable = None  # as in `ToolStarted`; an unknown one changes nothing
    took_s: float | None = None  # None: since it started


class CallAnnounced(NamedTuple):
    """The next call of a program comes soon. After 30 s it is not expected any more."""


class ProgramGone(NamedTuple):
    """No call of a program will come."""


KvEvent = ToolStarted | ToolEnded | CallAnnounced | ProgramGone  # of a program, between its calls or after the last one


class _Tool(NamedTuple):
    name: str
    since_s: float


@dataclass(eq=False, slots=True)
class OpenProgram:
    """A program that has made a call and has not ended."""

    name: str
    last: Context | None = None  # the context that it left last
    tools: dict[Hashable, _Tool] = field(default_factory=dict)  # running tools by run, the oldest first


@dataclass(eq=False, slots=True)
class RunningCall:
    """A call whose blocks are in use."""

    program: Hashable
    name: str
    block: Block | None  # the last of its chain
    level: int = 0  # the scheduling policy's queue in which it is, or in which its program's next call will wait


class Retention(Contexts):
    """Keeps, leaves or spills the contexts of programs, and says which blocks are evicted next.

    Args:
        order: Makes the order of eviction. An oracle has an order of its own.
    """

    def __init__(
        self,
        policy: KvPolicy,
        block_tokens: int,
        memory: Memory,
        order: Callable[[KvPolicy, PrefixTree, Memory], EvictionOrder] = EvictionOrder,
    ) -> None:
        super().__init__(policy, memory)
        self._programs: OrderedDict[Hashable, OpenProgram] = OrderedDict()
        self.tree = PrefixTree(block_tokens)
        self.order = order(policy, self.tree, memory)

    @property
    def programs_held(self) -> int:
        """The number of programs of which a context is held."""
        return len({context.program for context in self._held})

    def call_arrived(
        self, program: Hashable, chain: Sequence[Hashable], now_s: float, *, tool: str | None = None
    ) -> None:
        """A call has arrived, and waits. The context that it continues is needed soon.

        Args:
            chain: The keys of its prompt's full blocks, the first one first. A key stands for all tokens up to there.
            tool: The tool that has run since the program's last call, if `ToolStarted` has not named it.
        """
        row = self._programs.get(program)
        hit, found = self._find(program, chain)
        context = found[0] if found else row.last if row is not None else None
        is_known = context is not None and (context.tokens or context.host_tokens)
        if context is None or context.called_s is not None or (is_known and not found):
            return  # it is the first call, one of several parallel calls, or a branch of its own
        if context.since_s is None and tool is not None:
            context.tool = tool
        self._next_call_arrived(context, (len(chain) - hit) * self.tree.block_tokens, now_s)

    def call_cancelled(self, program: Hashable, chain: Sequence[Hashable], now_s: float) -> None:
        """A call that has arrived will not run. Its context waits for another call."""
        for context in self._find(program, chain)[1][:1]:
            context.called_s = context.turn_s = None
            self._decide(context, now_s)

    def call_began(
        self,
        program: Hashable,
        name: str,
        chain: Sequence[Hashable],
        now_s: float,
        *,
        waited_s: float = 0.0,
        level: int = 0,
    ) -> RunningCall:
        """A call starts to run. Its prompt's blocks are in the cache from now on, and in use.

        Args:
            chain: The keys of its prompt's full blocks.
            waited_s: How long it has waited in the queue.
            level: The level of that queue; 0 is served first.
        """
        row = self._programs.setdefault(program, OpenProgram(name))
        self._programs.move_to_end(program)
        if len(self._programs) > _MOST_PROGRAMS:
            self._program_gone(next(iter(self._programs)))
        row.name = name
        block = self.tree.extend(program, chain, now_s)
        self.tree.pin(block)
        self._call_started(self.contexts_of(program), name, level, waited_s, now_s)
        return RunningCall(program, name, block, level)

    def call_grew(self, call: RunningCall, chain: Sequence[Hashable], now_s: float) -> None:
        """A running call has more full blocks than before. `chain` has all of its blocks."""
        before, call.block = call.block, self.tree.extend(call.program, chain, now_s)
        self.tree.pin(call.block)
        self.tree.unpin(before)

    def call_ended(
        self, call: RunningCall, now_s: float, *, tool: str | None = None, pause: TimeEstimate | None = None
    ) -> Context | None:
        """A call has ended, and its blocks are free.

        Args:
            tool: The tool that runs next, if it is known already.
            pause: An oracle's time until the next call, for simulation and benchmarks.

        Returns the context that it leaves, with a decision; None if it has no full block or its program has ended.
        """
        block = call.block
        self.tree.unpin(block)
        if block is None:
            return None
        block.used_s = max(block.used_s, now_s)
        if call.program not in self._programs:
            self._mark(block)
            return None
        context = self._make_context(call.program, call.name, now_s, tool=tool, level=call.level, pause=pause)
        for each in self.tree.end_context(context, block):
            self._count_held(each, 0)
        self._programs[call.program].last = context
        self._decide(context, now_s)
        return context

    def call_preempted(self, call: RunningCall, now_s: float) -> None:
        """A running call waits again. Its blocks are not in use any more, but will be needed soon."""
        context = self.call_ended(call, now_s)
        if context is not None:
            context.called_s = now_s
            self._decide(context, now_s)

    def call_aborted(self, call: RunningCall, now_s: float) -> None:
        """A running call was aborted. Its blocks are free, and it leaves no context."""
        self.tree.unpin(call.block)
        if call.block is not None:
            self._mark(call.block)

    # -- what happens between two calls, and after the last one

    def happened(self, program: Hashable, event: KvEvent, now_s: float) -> None:
        """Something has happened in a program. Its latest context is decided again."""
        row = self._programs.get(program)
        match event:
            case ToolStarted(tool, run):
                if row is None or run in row.tools:
                    return
                row.tools[run] = _Tool(tool, now_s)
                if len(row.tools) > _MOST_TOOLS:
                    del row.tools[next(iter(row.tools))]
                self._pause_changed(program, row, now_s)
            case ToolEnded(run, took_s):
                ended = row.tools.pop(run, None) if row is not None else None
                if row is None or ended is None:
                    return
                self.tool_times.observe(ended.name, now_s - ended.since_s if took_s is None else took_s)
                self._pause_changed(program, row, now_s)
            case CallAnnounced():
                for context in self._paused(program):
                    context.soon_s = now_s
                    self._decide(context, now_s)
            case ProgramGone():
                self._program_gone(program)

    def _program_gone(self, program: Hashable) -> None:
        self._programs.pop(program, None)
        for context in self.contexts_of(program):
            self._give_up(context)
            block = self.tree.drop_context(context)
            if block is not None:
                self._mark(block)

    def _paused(self, program: Hashable) -> list[Context]:
        """The latest context of a program, unless a call has come for it or an oracle knows when one will."""
        latest = self.contexts_of(program)[-1:]
        return [each for each in latest if each.called_s is None and not each.pause.is_oracle]

    def _pause_changed(self, program: Hashable, row: OpenProgram, now_s: float) -> None:
        """A tool has begun or ended. The pause ends when the tool returns that is expected to return last."""
        for run, each in list(row.tools.items()):
            if each.since_s < now_s - MOST_HOLD_S:  # the message of its end may have been lost
                del row.tools[run]
        last = max(
            row.tools.values(),
            key=lambda each: self.tool_times.of(each.name).remaining_s(now_s - each.since_s),
            default=None,
        )
        for context in self._paused(program):
            if last is not None:
                context.tool, context.since_s, context.pause = last.name, last.since_s, self.tool_times.of(last.name)
                context.new_tokens = self._expected_tokens(last.name)
            else:
                context.tool, context.since_s = None, now_s
                context.pause = self._return_delays.get(context.name) or self._return_delay_of_all
            self._decide(context, now_s)

    # -- decisions and the order of eviction

    def epoch(self, memory: Memory, now_s: float) -> None:
        """Decide and rank everything again with what is known now; call it about once a second.

        O(n) for n contexts, however many blocks they have. The leaves are ranked when somebody asks what goes next.
        """
        self.observe_memory(memory)
        for context in self._decided_again():
            self.revisit(context, now_s)
        if self.policy.decides or self.policy.changes_with_time:
            self.order.mark_all()

    def _decided_again(self) -> list[Context]:
        contexts = self.contexts_anywhere() if self.policy.decides else []
        return list(dict.fromkeys([*self._held, *contexts])) if self._held else contexts

    def to_revisit(self) -> list[Context | Block]:
        """The contexts and blocks for which `revisit` should be called once in each epoch, instead of `epoch`."""
        found: list[Context | Block] = [*self._decided_again()]
        if self.policy.decides or self.policy.changes_with_time:
            found += self.order.leaves()
        return found

    def revisit(self, each: Context | Block, now_s: float) -> None:
        """Decide on a context again, or rank a leaf again, with what is known now. It may be gone by now."""
        if isinstance(each, Block):
            self.rank_again([each])
            return
        is_there = self.tree.end_of(each) is not None
        if is_there:
            each.decision = self.policy.decide(each, self.memory, now_s)
        self._count_held(each, self.tree.own_tokens(each) if each.decision.action is Action.KEEP else 0)

    def contexts_of(self, program: Hashable) -> list[Context]:
        """The contexts of a program, the one that was used last at the end."""
        return self.tree.contexts_of(program)

    def chain_of(self, context: Context) -> list[Hashable]:
        """The keys of the blocks of a context that are still cached, the first one first."""
        return self.tree.chain(self.tree.end_of(context))

    def copied(self, context: Context) -> None:
        """A worker has confirmed that all of a context is in host memory as well."""
        context.on_host = True
        block = self.tree.end_of(context)
        if block is not None:
            self._mark(block)

    def block_evicted(self, key: Hashable) -> None:
        """The engine has evicted a block. The blocks behind it cannot be found any more, and are forgotten, too."""
        block = self.tree.get(key)
        if block is not None and not block.pins:
            self.tree.remove(block)
            if block.parent is not None:
                self._mark(block.parent)

    def rank_again(self, blocks: Iterable[Block]) -> None:
        """Rank blocks again, as far as they are cached: blocks behind them were removed, for example."""
        for block in blocks:
            if self.tree.get(block.key) is block:
                self._mark(block)

    def reset(self) -> None:
        """The engine has emptied its prefix cache. The blocks of running calls stay."""
        for context in list(self._held):
            self._count_held(context, 0)
        for block in self.tree.roots():
            below = [block]
            while below:
                each = below.pop()
                if each.pins:
                    below += each.children
                else:
                    self.block_evicted(each.key)

    def observe_memory(self, memory: Memory) -> None:
        super().observe_memory(memory)
        self.order.memory = self.memory

    def observe_queue(self, waiting_calls: Iterable[tuple[Hashable, int]], now_s: float) -> None:
        """The queue's order has changed. O(n) for n waiting calls.

        Args:
            waiting_calls: For each waiting call its program and the level of its queue; the call that starts next
                comes first.
        """
        called_of: dict[Hashable, Iterator[Context]] = {}
        calls: list[tuple[Context | None, int]] = []
        for program, level in waiting_calls:
            called = called_of.get(program)
            if called is None:
                found = [context for context in self.contexts_of(program) if context.called_s is not None]
                called = called_of[program] = iter(found)
            calls.append((next(called, None), level))
        self._set_turns(calls, now_s)

    def check_integrity(self) -> None:
        """Assert that the counts agree, and that only open programs have contexts. For tests."""
        self.tree.check_integrity()
        self.order.check_integrity()
        if self.held_tokens != sum(self._held.values()):
            raise AssertionError("held tokens are miscounted")
        if not self.tree.programs <= self._programs.keys():
            raise AssertionError("a program that has ended has a context")

    def _find(self, program: Hashable, chain: Sequence[Hashable]) -> tuple[int, list[Context]]:
        """How many blocks of a chain are cached, and the program's contexts that the chain continues."""
        hit = self.tree.hit_blocks(chain)
        return hit, self.tree.contexts_on(program, self.tree.get(chain[hit - 1]) if hit else None)

    def contexts_anywhere(self) -> list[Context]:
        """The contexts of open programs."""
        return self.tree.contexts()

    def _own_tokens(self, context: Context) -> int | None:
        return self.tree.own_tokens(context) if self.tree.end_of(context) is not None else None

    def _after_decision(self, context: Context, now_s: float) -> None:
        block = self.tree.end_of(context)
        if block is not None:
            self._mark(block)

    def _mark(self, block: Block) -> None:
        if block.is_leaf:
            self.order.mark(block)


class TieredRetention(Retention):
    """Retention that still knows contexts which the device has evicted, as long as host memory has a part of them.

    Attributes:
        host: The host memory.
        spills: Contexts to copy to host memory. The caller takes them out.
        moving: Those that another replica waits for, to be copied before all others. The caller takes them out.
        left: What ended programs have left, with the keys of its blocks, to be copied when nothing else is. The caller
            takes it out.
        keeps_ended: Whether ended programs leave something, as where copies delay no step.
    """

    def __init__(self, policy: KvPolicy, block_tokens: int, memory: Memory, host: HostTier) -> None:
        super().__init__(policy, block_tokens, memory)
        self.host = host
        self.spills: dict[Context, None] = {}
        self.moving: dict[Context, None] = {}
        self.left: dict[Context, list[Hashable]] = {}
        self.keeps_ended = False

    def call_ended(
        self, call: RunningCall, now_s: float, *, tool: str | None = None, pause: TimeEstimate | None = None
    ) -> Context | None:
        context = super().call_ended(call, now_s, tool=tool, pause=pause)
        if context is not None:
            self.host.claim(context, self.tree.chain(call.block), now_s)
            if context.on_host:
                self._no_spill(context)
                self._after_decision(context, now_s)
        return context

    def spill_now(self, program: Hashable) -> None:
        """A program goes on elsewhere: its contexts are to be copied at once."""
        self.moving.update((each, None) for each in self.contexts_of(program) if each.tokens and not each.on_host)

    def _no_spill(self, context: Context) -> None:
        self.spills.pop(context, None)
        self.moving.pop(context, None)

    def _program_gone(self, program: Hashable) -> None:
        chains = {context: self.chain_of(context) for context in self.contexts_of(program)}
        super()._program_gone(program)
        for context, chain in chains.items():
            self._no_spill(context)
            if not self.keeps_ended:
                self.host.drop(context)
                continue
            if context.decision.action is Action.SPILL and chain and not context.on_host:
                self.left[context] = chain
            context.is_needed, context.tokens, context.chance, context.decision = False, 0, 0.0, LEAVE
        self.host.rank_again(chains)
        while len(self.left) > MOST_LEFT:
            del self.left[next(iter(self.left))]

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
        for each in self.tree.end_context(context, block):
            self._count_held(each, 0)
        context.is_fetched = True
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
