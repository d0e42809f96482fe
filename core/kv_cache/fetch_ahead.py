"""Chooses the contexts that are copied back from host memory before their next call runs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, Generic, NamedTuple, TypeVar

LEAD_S: Final = 1.0  # a copy should be done this long before its context is needed, because the time is a guess

T = TypeVar("T")


class Expected(NamedTuple, Generic[T]):
    """A context that a call will need."""

    context: T
    expected_s: float  # the time until the call runs
    is_called: bool  # whether the call waits already
    device_tokens: int  # its tokens in the KV cache
    host_tokens: int  # its tokens that only host memory has


def contexts_to_fetch(
    contexts: Iterable[Expected[T]],
    *,
    room_tokens: float,
    copy_token_s: float,
    busy_s: float = 0.0,
    lead_s: float = LEAD_S,
) -> list[T]:
    """The contexts to copy back now, in the order in which they are needed.

    A context that is needed sooner keeps its room, so a copy displaces only contexts that are needed later. If a call
    has not arrived, its context is copied as late as possible, because the call may not come, or may come later.

    Args:
        contexts: All contexts of open programs, in any order.
        room_tokens: The tokens that the KV cache holds, without those that running calls use.
        copy_token_s: Seconds to copy a token.
        busy_s: Seconds until the copies are done that have begun already.
        lead_s: Seconds by which a copy should be done before its context is needed. Infinite: all copies are due.
    """
    found: list[T] = []
    for each in sorted(contexts, key=lambda context: context.expected_s):
        room_tokens -= each.device_tokens
        if room_tokens <= 0:
            break
        done_s = busy_s + each.host_tokens * copy_token_s
        is_due = each.is_called or each.expected_s <= done_s + lead_s
        if each.host_tokens and is_due and each.host_tokens <= room_tokens:
            found.append(each.context)
            room_tokens -= each.host_tokens
            busy_s = done_s
    return found
