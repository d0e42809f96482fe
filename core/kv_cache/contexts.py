"""The contexts that open programs leave between two calls: what is expected of each, and what a KV policy decides.

The same for engines, where contexts lie in blocks (`weft.core.kv_cache.retention`), and for the simulator, where they
lie in segments (`weft.core.sim.segment_contexts`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable

from weft.core.kv_cache.policies import LEAVE, Action, Context, KvPolicy, Memory
from weft.core.prediction import Reuse, TimeEstimate, ToolTimes, WaitsByLevel
from weft.core.prediction.names import SamplesByName
from weft.core.prediction.samples import Samples
from weft.core.prediction.tool_times import pause_name


class Contexts(ABC):
    """Joins predictors and a KV policy, for one replica. Reads no clock: times are seconds on the caller's.

    Args:
        policy: A policy of its own.
        memory: The engine's memory at first.
    """

    def __init__(self, policy: KvPolicy, memory: Memory) -> None:
        self.policy = policy
        self.memory = memory  # as last told
        self.tool_times = ToolTimes()
        self._delay_of_all = Samples(median=0.1)
        self._delays = SamplesByName(self._delay_of_all)  # by program: from a tool's end to the next call
        self.reuse = Reuse()
        self.held_tokens = 0  # of contexts that are held, without those that programs share
        self._held: dict[Context, int] = {}
        self._new_tokens_of_all = Samples(median=100.0)
        self._new_tokens = SamplesByName(self._new_tokens_of_all)  # by tool: of the next prompt
        self._waits = WaitsByLevel()

    @abstractmethod
    def _own_tokens(self, context: Context) -> int | None:
        """The tokens that count if a context is held; None if nothing of it is cached."""

    @abstractmethod
    def _decided(self, context: Context, now_s: float) -> None:
        """A context was decided again."""

    def observe_memory(self, memory: Memory) -> None:
        """The memory has changed. Decisions from now on go by it. O(1), for each step."""
        self.memory = memory

    # -- the life of a context

    def _left(
        self, program: Hashable, name: str, now_s: float, *, tool: str | None, level: int, pause: TimeEstimate | None
    ) -> Context:
        """A call of a program has ended in the queue of this level, and leaves a context. Where it lies and what
        happens to it comes next."""
        pause_is_known_by = pause_name(tool, name)
        context = Context(program, name, now_s, pause or self.tool_times.of(pause_is_known_by), tool=tool)
        context.level, context.waits = level, self._waits.of(level)
        context.chance = self.reuse.chance(name, 0)
        context.new_tokens = self._expected_tokens(pause_is_known_by)
        return context

    def _called(self, context: Context, new_tokens: float, now_s: float) -> None:
        """A call that needs a context has arrived, with so many tokens behind it."""
        name = pause_name(context.tool, context.name)
        context.called_s = now_s
        if context.since_s is not None and context.tool is None:  # its tool has returned
            self._delay_of_all.observe(context.elapsed_s(now_s))
            self._delays.observe(context.name, context.elapsed_s(now_s))
        else:
            self.tool_times.observe(name, context.elapsed_s(now_s))
        self._new_tokens_of_all.observe(new_tokens)
        self._new_tokens.observe(name, new_tokens)
        self.reuse.observe(context.name, context.age, continued=True)
        self._decide(context, now_s)

    def _began(self, contexts: Iterable[Context], name: str, level: int, waited_s: float, now_s: float) -> None:
        """A call starts to run after a wait in the queue of this level, of a program that has these contexts."""
        self._waits.of(level).observe(now_s, waited_s)
        for context in contexts:
            context.age += 1
            context.chance = self.reuse.chance(name, context.age)

    def _queued(self, calls: Iterable[tuple[Context | None, int]], now_s: float) -> None:
        """These calls wait, the one that starts next first: the context that it needs, and the level of its queue.

        Calls of better queues that are still to come go first. So a turn is counted within the queue, by how often a
        call of that queue gets its turn. It does not come before that of the calls ahead.
        """
        before: dict[int, int] = {}
        latest_s = now_s
        for context, level in calls:
            turn = before[level] = before.get(level, 0) + 1
            if context is not None:
                context.level, context.waits = level, self._waits.of(level)
                latest_s = max(latest_s, now_s + (turn - (level == 0)) * context.waits.turn_s)
                context.turn_s = latest_s

    def _given_up(self, context: Context) -> None:
        """The program has ended."""
        if context.called_s is None:
            self.reuse.observe(context.name, context.age, continued=False)
        self._hold(context, 0)

    # -- decisions

    def _decide(self, context: Context, now_s: float) -> None:
        context.decision = self.policy.decide(context, self.memory, now_s) if self.policy.decides else LEAVE
        own_tokens = self._own_tokens(context)
        if own_tokens is not None:
            self._hold(context, own_tokens)
        self._decided(context, now_s)

    def _hold(self, context: Context, own_tokens: int) -> None:
        """Count what is held. Holds that expire or are evicted leave the count in the next epoch."""
        held = own_tokens if context.decision.action is Action.KEEP else 0
        self.held_tokens += held - self._held.pop(context, 0)
        if held:
            self._held[context] = held

    def _expected_tokens(self, name: str) -> float:
        return (self._new_tokens.get(name) or self._new_tokens_of_all).mean_s
