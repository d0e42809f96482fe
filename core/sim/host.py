"""Host memory of a simulated replica, and the copies to it and from it.

Copies take time, and no computation. Each direction makes one copy after another. The tokens of a copy are found once
the copy is done.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from typing import NamedTuple

from weft.core.sim.calls import SimCall, SimProgram
from weft.core.sim.kv import KvCache
from weft.core.sim.result import Counts


class _Spill(NamedTuple):
    done_s: float
    call: SimCall
    tokens: int


class HostMemory:
    """The contexts of programs in host memory, as prefixes like those on the device.

    If host memory is full, the copies that were used longest ago go first.

    Args:
        capacity: In tokens.
        copy_token_s: Seconds to copy a token, in each direction.
        counts: The totals to add to.
        ended_first: Whether copies of ended programs go before all others, and are not made any more.
    """

    def __init__(self, capacity: float, copy_token_s: float, counts: Counts, *, ended_first: bool = True) -> None:
        self.copy_token_s = copy_token_s
        self._ended_first = ended_first
        self.kv = KvCache(capacity)
        self._counts = counts
        self._spills: deque[_Spill] = deque()  # in the order in which they are done
        self._coming: dict[Hashable, int] = {}  # by a call's key: the tokens that a spill in progress brings
        self._in_until_s = 0.0  # when the last copy back to the device is done

    def tick(self, now_s: float) -> None:
        """The time is `now_s`. Take in the spills that are done."""
        while self._spills and self._spills[0].done_s <= now_s:
            _, call, tokens = self._spills.popleft()
            if self._coming.get(call.kv_key) == tokens:
                del self._coming[call.kv_key]
            segment, hit = self.kv.find(call.prefixes())
            is_wanted = call.owner.unfinished_calls or not self._ended_first
            if is_wanted and hit < tokens <= self.kv.capacity:
                own = self.kv.reserve_call(call, segment, hit, tokens)
                self.kv.name_output(call, own)
                self.kv.release(own)

    def tokens_of(self, call: SimCall) -> int:
        """The tokens of a call's prefix that can be copied back."""
        return self.kv.find(call.prefixes())[1]

    def spill(self, call: SimCall, tokens: int, now_s: float) -> None:
        """Begin to copy the part of a call's first `tokens` that host memory does not have."""
        missing = tokens - max(self.tokens_of(call), self._coming.get(call.kv_key, 0))
        if missing <= 0 or tokens > self.kv.capacity:
            return
        self._counts.spilled += missing
        began_s = max(now_s, self._spills[-1].done_s) if self._spills else now_s
        self._coming[call.kv_key] = tokens
        self._spills.append(_Spill(began_s + missing * self.copy_token_s, call, tokens))

    def fetch(self, tokens: int, now_s: float) -> float:
        """Begin to copy `tokens` back. Returns the time when the copy is done."""
        self._counts.fetched += tokens
        self._in_until_s = max(self._in_until_s, now_s) + tokens * self.copy_token_s
        return self._in_until_s

    def busy_s(self, now_s: float) -> float:
        """Seconds until all copies back to the device are done that have begun."""
        return max(0.0, self._in_until_s - now_s)

    def program_ended(self, program: SimProgram) -> None:
        """Nobody needs the copies of a program any more."""
        if self._ended_first:
            self.kv.evict_first((program.number, index) for index in range(len(program.spec.calls)))
