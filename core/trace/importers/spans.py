"""Programs from calls with times: what a call came after, how long after, and how much of its prompt is old."""

from __future__ import annotations

import heapq
from collections.abc import Iterable

from weft.core.errors import TraceError
from weft.core.trace.format import TraceCall


def ordered(calls: Iterable[TraceCall], where: str) -> tuple[TraceCall, ...]:
    """Return the calls of a program in the order of their times, each one after its parents.

    Args:
        calls: the calls. Parents that are not among them are not waited for.
        where: the place, for the message.

    Raises:
        TraceError: calls wait for one another in a circle.
    """
    by_id = {call.call_id: call for call in calls}
    missing: dict[str, int] = {}
    children: dict[str, list[str]] = {}
    for call in by_id.values():
        known = [parent for parent in call.parents if parent in by_id]
        missing[call.call_id] = len(known)
        for parent in known:
            children.setdefault(parent, []).append(call.call_id)
    numbers = {call_id: number for number, call_id in enumerate(by_id)}
    free = [(by_id[each].at_s or 0.0, numbers[each]) for each, count in missing.items() if not count]
    heapq.heapify(free)
    names, found = list(by_id), list[TraceCall]()
    while free:
        call_id = names[heapq.heappop(free)[1]]
        found.append(by_id[call_id])
        for child in children.get(call_id, ()):
            missing[child] -= 1
            if not missing[child]:
                heapq.heappush(free, (by_id[child].at_s or 0.0, numbers[child]))
    if len(found) < len(by_id):
        raise TraceError(
            f"{where}: its calls wait for one another in a circle; expected that each began after another."
        )
    return tuple(found)


def shared_tokens(prompt: int, cached: int, before: tuple[int, int] | None) -> int:
    """Return how many first tokens of a prompt the call before has had, where only the lengths are known.

    A prompt that is not shorter than the one before is taken to continue it. Of another one, only what a cache has
    found is taken to be old.

    Args:
        prompt: its length in tokens.
        cached: the tokens that the prefix cache of the engine found.
        before: the lengths of the prompt and the output of the agent's call before. None: there is none.
    """
    if before is None:
        return min(cached, prompt)
    return min(prompt, sum(before), prompt if prompt >= before[0] else cached)
