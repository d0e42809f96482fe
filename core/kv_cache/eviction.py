"""Which copies in host memory are given up when a preempted call finds too few free slots."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple


class HostCopy(NamedTuple):
    """The copy of one call's KV cache in host memory."""

    call: str  # the call's request
    tokens: int  # tokens whose KV it holds
    waiting: bool  # the call is preempted; otherwise it runs, and the copy is kept for its next preemption
    pinned: bool  # the copy must stay
    extents: frozenset[int]  # numbers of the extents that its blocks lie in; copies of one prefix share extents


def copies_to_evict(
    copies: Iterable[HostCopy],
    extent_slots: Mapping[int, int],
    *,
    tokens: int,
    free_slots: int,
    needed_slots: int,
) -> list[str] | None:
    """The copies that make way for a call of `tokens` tokens, or None if too few slots would become free.

    Copies of calls that run are given up first, from the oldest on. Copies of waiting calls follow, from the shortest
    on, because they cost least to compute again. A waiting call keeps its copy if it has as many tokens as the call at
    hand or more. An extent becomes free with the last copy that lies in it.

    Args:
        copies: every copy, the oldest first.
        extent_slots: slots in each extent.
        tokens: tokens of the call that needs slots.
        free_slots: slots that are free already.
        needed_slots: slots that the call needs.

    Returns:
        The calls whose copies to give up: of the order above as many as are needed, and no more.
    """
    held = list(copies)
    users = Counter(extent for copy in held for extent in copy.extents)
    candidates = [copy for copy in held if not copy.pinned and (not copy.waiting or copy.tokens < tokens)]
    candidates.sort(key=lambda copy: (copy.waiting, copy.tokens if copy.waiting else 0))  # stable: the oldest first
    evicted: list[str] = []
    for copy in candidates:
        if free_slots >= needed_slots:
            break
        evicted.append(copy.call)
        users.subtract(copy.extents)
        free_slots += sum(extent_slots[extent] for extent in copy.extents if users[extent] == 0)
    return evicted if free_slots >= needed_slots else None
