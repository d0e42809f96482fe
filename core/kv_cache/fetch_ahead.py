"""Chooses the contexts that are copied back from host memory before their next call runs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, Generic, NamedTuple, TypeVar

from weft.core.kv_cache.policies import Context, Memory

EVERY_S: Final = 0.1  # so often it is asked what is due
STEP_BYTES: Final = 64 << 20  # that one step copies back ahead of need
SHARE: Final = 0.99  # of the KV cache that contexts may fill
WATERMARK: Final = 50  # vLLM admits a call only if it leaves some blocks free; at most a fiftieth is assumed
LEAD_S: Final = 1.0  # a copy should be done this long before its context is needed, because the time is a guess
_SHORT: Final = 0.25
_LEAST_CHANCE: Final = 0.5  # of a copy back that no call has asked for: it saves a call as much as it costs others

T = TypeVar("T")


class Expected(NamedTuple, Generic[T]):
    """A context that a call will need."""

    context: T
    expected_s: float  # the time until the call runs
    is_called: bool  # whether the call waits already, or may come at any moment
    device_tokens: int  # its tokens in the KV cache
    host_tokens: int  # its tokens that only host memory has and that are worth a copy


def expect(context: Context, memory: Memory, now_s: float) -> Expected[Context]:
    """When a context is needed, and what of it is where.

    Its call may come at any moment once the pause has lasted nearly as long as the shortest fourth of all such pauses.
    An expectation alone would come too late for these, and rises again when a pause is longer than expected.
    """
    only_host = max(0, context.host_tokens - context.tokens) if is_likely(context) else 0
    is_called = context.called_s is not None or (only_host > 0 and context.elapsed_s(now_s) >= short_pause_s(context))
    return Expected(context, context.expected_s(memory, now_s), is_called, context.tokens, only_host)


def is_likely(context: Context) -> bool:
    """Whether a call comes that continues a context, or will more likely than not. What a compaction has left behind,
    for example, or a branch that was not taken, would be copied back, evicted and copied back again in vain."""
    return context.called_s is not None or context.soon_s is not None or context.chance >= _LEAST_CHANCE


def short_pause_s(context: Context) -> float:
    """How long the pause has lasted when its call may come at any moment."""
    return context.pause.quantile_s(_SHORT) - LEAD_S


def contexts_to_fetch(
    contexts: Iterable[Expected[T]], *, room_tokens: float, copy_token_s: float, lead_s: float = LEAD_S
) -> list[T]:
    """The contexts to copy back now, in the order in which they are needed.

    A context that is needed sooner keeps its room, so a copy displaces only contexts that are needed later. If a call
    has not arrived, its context is copied as late as possible, because the call may not come, or may come later.

    Args:
        room_tokens: The tokens that the KV cache holds, without those that running calls use.
        lead_s: Seconds by which a copy should be done before its context is needed. Infinite: all copies are due.
    """
    found: list[T] = []
    done_s = 0.0
    for each in sorted(contexts, key=lambda context: context.expected_s):
        room_tokens -= each.device_tokens
        if room_tokens <= 0:
            break
        copy_s = each.host_tokens * copy_token_s
        is_due = each.is_called or each.expected_s <= done_s + copy_s + lead_s
        if each.host_tokens and is_due and each.host_tokens <= room_tokens:
            found.append(each.context)
            room_tokens -= each.host_tokens
            done_s += copy_s
    return found


def loads_beside(running: int) -> bool:
    """Whether a call that could start waits while its context is copied back, or its own step waits for the copy.

    A step that waits delays all running calls by the whole copy, and a call that waits is delayed by the rest of a step
    more. So a call waits as soon as there is another to compute meanwhile.
    """
    return running > 0
