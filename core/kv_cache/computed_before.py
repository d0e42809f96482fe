"""Remembers what programs have computed, so that an engine can count the tokens that are computed again."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import Final

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
