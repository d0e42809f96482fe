"""What happens between two calls of a program: tools run, and the next call may be announced."""

from __future__ import annotations

from abc import abstractmethod
from array import array
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from weft.core.kv_cache.contexts import Contexts
from weft.core.kv_cache.policies import MOST_HOLD_S, Context, KvPolicy, Memory

_MOST_TOOLS: Final = 64  # tools that run in a program at once


class _Tool(NamedTuple):
    name: str
    since_s: float


@dataclass(eq=False, slots=True)
class OpenProgram:
    """A program that has made a call and has not ended."""

    name: str
    last: Context | None = None  # the context that it left last
    tools: dict[Hashable, _Tool] = field(default_factory=dict)  # running tools by run, the oldest first


class Pauses(Contexts):
    """Learns the times of tools, and decides again on the contexts of programs that wait for them."""

    def __init__(self, policy: KvPolicy, memory: Memory) -> None:
        super().__init__(policy, memory)
        self._programs: OrderedDict[Hashable, OpenProgram] = OrderedDict()

    @abstractmethod
    def contexts_of(self, program: Hashable) -> list[Context]:
        """The contexts of a program, the one that was used last at the end."""

    def tool_started(self, program: Hashable, tool: str, now_s: float, *, run: Hashable = None) -> None:
        """A program waits for a tool from now on. Its latest context is decided again.

        Args:
            program: The program. It must have made a call.
            run: Tells this run of a tool from others. A run that is known already changes nothing.
        """
        row = self._programs.get(program)
        if row is None or run in row.tools:
            return
        row.tools[run] = _Tool(tool, now_s)
        if len(row.tools) > _MOST_TOOLS:
            del row.tools[next(iter(row.tools))]
        self._pause_changed(program, row, now_s)

    def tool_ended(self, program: Hashable, now_s: float, *, run: Hashable = None, took_s: float | None = None) -> None:
        """A tool has returned. Its time is learned, whether a call follows or not, and the context is decided again.

        Args:
            run: As in `tool_started`. An unknown run changes nothing.
            took_s: How long the tool took; None: since `tool_started`.
        """
        row = self._programs.get(program)
        tool = row.tools.pop(run, None) if row is not None else None
        if row is None or tool is None:
            return
        self.tool_times.observe(tool.name, now_s - tool.since_s if took_s is None else took_s)
        self._pause_changed(program, row, now_s)

    def call_announced(self, program: Hashable, now_s: float) -> None:
        """A program announces that its next call comes soon. After 30 s the call is not expected any more."""
        for context in self._paused(program):
            context.soon_s = now_s
            self._decide(context, now_s)

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
