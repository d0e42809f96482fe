"""Which contexts are copied back from host memory before their next call runs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, Generic, NamedTuple, TypeVar

LEAD_S: Final = 1.0  # a copy is done so long before it is needed, since that is only expected

T = TypeVar("T")


class Expected(NamedTuple, Generic[T]):
    """A context that a call will need."""

    context: T
    expected_s: float  # the time until the call runs
    is_called: bool  # the call waits already
    device_tokens: int  # of it that the KV cache holds
    host_tokens: int  # that only host memory holds


def contexts_to_fetch(
    contexts: Iterable[Expected[T]],
    *,
    room_tokens: float,
    copy_token_s: float,
    busy_s: float = 0.0,
    lead_s: float = LEAD_S,
) -> list[T]:
    """The contexts to copy back now, in the order in which they are needed.

    What is needed sooner keeps its room, so a copy displaces only what is needed later. The context of a call that has
    not arrived is copied once there is just time for it: it may not come, and tools take longer than expected.

    Args:
        contexts: All that open programs have, in any order.
        room_tokens: What the KV cache holds, without what running calls use.
        copy_token_s: To copy a token.
        busy_s: For so long the copies last that have begun already.
        lead_s: A copy is done so long before it is needed. Infinite: all are due.
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
