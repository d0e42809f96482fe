"""What a KV block that could not be loaded makes void: the calls that read it, and all blocks that they computed since.

vLLM can compute such blocks again in place. It then leaves their hashes, under which other calls find them meanwhile,
and where steps overlap it delivers the token of the step in flight. So Weft preempts these calls instead.
"""

from __future__ import annotations

from collections.abc import Iterable

from weft.engine.vllm_compat.names import KVCacheManager, Request


def void_calls(
    invalid: Iterable[int], running: Iterable[Request], manager: KVCacheManager
) -> tuple[list[Request], set[int]]:
    """The running requests that have read invalid blocks, and all blocks that hold no valid KV.

    Args:
        invalid: The blocks that could not be loaded.
        running: The running requests.
        manager: vLLM's KV cache manager, of a model with one kind of attention. It is not changed.
    """
    void = set(invalid)
    blocks = {request.request_id: manager.get_block_ids(request.request_id)[0] for request in running}
    found: dict[str, Request] = {}
    grows = True
    while grows:
        grows = False
        for request in running:
            numbers = blocks[request.request_id]
            first = next((index for index, number in enumerate(numbers) if number in void), None)
            if first is not None and not (request.request_id in found and void.issuperset(numbers[first:])):
                found[request.request_id] = request
                void.update(numbers[first:])
                grows = True
    return list(found.values()), void
