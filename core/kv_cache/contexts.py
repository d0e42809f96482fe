"""The contexts that open programs leave between two calls: what is expected of each, and what a KV policy decides.

This part is the same for engines, where contexts lie in blocks (`weft.core.kv_cache.retention`), and for the simulator,
where they lie in segments (`weft.core.sim.kv_cache.segment_contexts`).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from array import array
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from typing import Final

from weft.core.kv_cache.policies import LEAVE, Action, Context, KvPolicy, Memory
from weft.core.prediction import Reuse, TimeEstimate, ToolTimes, WaitsByLevel
from weft.core.prediction.samples import Samples, SamplesByName
from weft.core.prediction.times import pause_name

MOST_TURNS: Final = 1000  # in the queue, looked at in each epoch; later ones are too far away to tell
NEXT_TURNS: Final = 100  # looked at between two epochs


class Contexts(ABC):
    """Joins predictors and a KV policy for one replica. Times are seconds on the caller's clock.

    Attributes:
        held_tokens: The tokens of contexts that are held, without those that several programs share.
    """

    def __init__(self, policy: KvPolicy, memory: Memory) -> None:
        self.policy = policy
        self.memory = memory
        self.tool_times = ToolTimes()
        self._return_delay_of_all = Samples(median=0.1)
        # By program name: from a tool's return to the next call.
        self._return_delays = SamplesByName(self._return_delay_of_all)
        self.reuse = Reuse()
        self.held_tokens = 0
        self._held: dict[Context, int] = {}
        self._new_tokens_of_all = Samples(median=100.0)
        self._new_tokens = SamplesByName(self._new_tokens_of_all)  # by tool: the tokens that the next prompt adds
        self._waits = WaitsByLevel()

    @abstractmethod
    def _own_tokens(self, context: Context) -> int | None:
        """The tokens of a context that no other program shares; None if nothing of the context is cached."""

    @abstractmethod
    def _after_decision(self, context: Context, now_s: float) -> None:
        """Act on a new decision about a context."""

    def observe_memory(self, memory: Memory) -> None:
        """Note the present memory, which later decisions take into account. O(1); call it with each step."""
        self.memory = memory

    # -- the life of a context

    def _make_context(
        self, program: Hashable, name: str, now_s: float, *, tool: str | None, level: int, pause: TimeEstimate | None
    ) -> Context:
        """Make the context that a call leaves when it has ended. The caller places it and has it decided.

        Args:
            tool: The tool that runs next, if it is known.
            level: The queue of the scheduling policy in which the call was.
            pause: An oracle's estimate of the pause. None: predict it.
        """
        pause_is_known_by = pause_name(tool, name)
        context = Context(program, name, now_s, pause or self.tool_times.of(pause_is_known_by), tool=tool)
        context.level, context.waits = level, self._waits.of(level)
        context.chance = self.reuse.chance(name, 0)
        context.new_tokens = self._expected_tokens(pause_is_known_by)
        return context

    def _next_call_arrived(self, context: Context, new_tokens: float, now_s: float) -> None:
        """A call that continues a context has arrived. It adds `new_tokens` to the context."""
        name = pause_name(context.tool, context.name)
        context.called_s = now_s
        if context.since_s is not None and context.tool is None:  # its tool has returned
            self._return_delay_of_all.observe(context.elapsed_s(now_s))
            self._return_delays.observe(context.name, context.elapsed_s(now_s))
        else:
            self.tool_times.observe(name, context.elapsed_s(now_s))
        self._new_tokens_of_all.observe(new_tokens)
        self._new_tokens.observe(name, new_tokens)
        self.reuse.observe(context.name, context.age, continued=True)
        self._decide(context, now_s)

    def _call_started(self, contexts: Iterable[Context], name: str, level: int, waited_s: float, now_s: float) -> None:
        """A call starts to run after a wait in the queue of this level. Its program has these contexts."""
        self._waits.of(level).observe(now_s, waited_s)
        for context in contexts:
            context.age += 1
            context.chance = self.reuse.chance(name, context.age)

    def _set_turns(self, calls: Iterable[tuple[Context | None, int]], now_s: float) -> None:
        """Set when the turn of each waiting call is expected to come.

        A call of a better queue may still arrive and go first. Therefore a call's turn is counted within its own queue,
        by how often a call of that queue has started lately. It is never before the turn of a call ahead.

        Args:
            calls: For each waiting call, the context that it needs and the level of its queue. The call that starts
                next comes first.
        """
        before: dict[int, int] = {}
        latest_s = now_s
        of = self._waits.of
        for context, level in calls:
            turn = before[level] = before.get(level, 0) + 1
            if context is not None:
                context.level, context.waits = level, of(level)
                latest_s = max(latest_s, now_s + (turn - (level == 0)) * context.waits.turn_s)
                context.turn_s = latest_s

    def _give_up(self, context: Context) -> None:
        """Note that the program of a context has ended."""
        if context.called_s is None:
            self.reuse.observe(context.name, context.age, continued=False)
        self._count_held(context, 0)

    # -- decisions

    def _decide(self, context: Context, now_s: float) -> None:
        context.ask_s = -math.inf
        context.decision = self.policy.decide(context, self.memory, now_s) if self.policy.decides else LEAVE
        if context.decision.action is Action.KEEP or context in self._held:
            own_tokens = self._own_tokens(context)
            if own_tokens is not None:
                self._count_held(context, own_tokens)
        self._after_decision(context, now_s)

    def _count_held(self, context: Context, own_tokens: int) -> None:
        """Count the tokens of a held context. A hold that has expired or was evicted counts until the next epoch."""
        held = own_tokens if context.decision.action is Action.KEEP else 0
        if held or context in self._held:
            self.held_tokens += held - self._held.pop(context, 0)
            if held:
                self._held[context] = held

    def _expected_tokens(self, name: str) -> float:
        return (self._new_tokens.get(name) or self._new_tokens_of_all).mean


_MOST_CHAINS: Final = 8  # chains of a program: the latest
_MOST_BLOCKS: Final = 1 << 21  # of all programs, 8 bytes each; the programs that were used longest ago are forgotten


class ComputedBefore:
    """Remembers the contexts of open programs as chains of block hashes, whether they are cached yet or not.

    A hash stands for the tokens of a block and all tokens before them, so two chains share only a beginning.
    """

    def __init__(self) -> None:
        self._chains: OrderedDict[Hashable, list[array[int]]] = OrderedDict()  # by program, the latest used last
        self._blocks = 0

    def blocks(self, program: Hashable, hashes: Sequence[Hashable]) -> int:
        """How many of these blocks, from the first one on, the program has computed in an earlier call."""
        return max((_common(chain, hashes) for chain in self._chains.get(program, ())), default=0)

    def add(self, program: Hashable, hashes: Sequence[Hashable]) -> None:
        """A call of a program has computed these blocks, or has found them in the cache."""
        if not hashes:
            return
        chains = self._chains.setdefault(program, [])
        self._chains.move_to_end(program)
        for number, chain in enumerate(chains):
            common = _common(chain, hashes)
            if common == len(chain) or common == len(hashes):  # one chain continues the other
                del chains[number]
                break
        else:
            chain, common = array("q"), 0
            if len(chains) == _MOST_CHAINS:
                self._blocks -= len(chains.pop(0))
        before = len(chain)
        chain.extend(map(hash, hashes[max(common, before) :]))
        self._blocks += len(chain) - before
        chains.append(chain)
        while self._blocks > _MOST_BLOCKS:
            self.forget(next(iter(self._chains)))

    def forget(self, program: Hashable) -> None:
        """A program has ended. Forget its chains."""
        self._blocks -= sum(map(len, self._chains.pop(program, ())))


def _common(chain: array[int], hashes: Sequence[Hashable]) -> int:
    """How many first blocks two chains share, found by bisection."""
    low, high = 0, min(len(chain), len(hashes))
    while low < high:
        middle = (low + high) // 2
        if chain[middle] == hash(hashes[middle]):
            low = middle + 1
        else:
            high = middle
    return low
