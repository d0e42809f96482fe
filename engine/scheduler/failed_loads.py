"""What a KV block that could not be loaded makes void: the calls that read it, and all blocks that they computed since.

vLLM can compute such blocks again in place. It then leaves their hashes, under which other calls find them meanwhile,
and where steps overlap it delivers the token of the step in flight. So Weft preempts these calls instead.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from weft.engine.vllm_compat.names import KVCacheManager, Request


def void_calls(
    invalid: Iterable[int],
    running: Iterable[Request],
    manager: KVCacheManager,
    readers: Iterable[tuple[str, Sequence[int]]] = (),
) -> tuple[list[Request], set[str], set[int]]:
    """What has been read or computed from invalid blocks: the running requests that have read such blocks, the readers
    that have, and all blocks that hold no valid KV.

    Args:
        readers: Calls that were to load blocks, or that have left since, by their requests' ids, with the blocks that
            they had then.
    """
    running = list(running)
    void, calls, found = set(invalid), set[str](), set[str]()
    chains = [(calls, request.request_id, manager.get_block_ids(request.request_id)[0]) for request in running]
    chains += [(found, key, blocks) for key, blocks in readers]
    grows = True
    while grows:
        grows = False
        for those, key, numbers in chains:
            first = next((index for index, number in enumerate(numbers) if number in void), None)
            if first is not None:
                those.add(key)
                grows = grows or not void.issuperset(numbers[first:])
                void.update(numbers[first:])
    return [request for request in running if request.request_id in calls], found, void
