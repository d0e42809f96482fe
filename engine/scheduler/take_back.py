"""Calls that the scheduler has not begun and gives back, so that another engine runs them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from weft.engine.scheduler.ledger import Entry
from weft.engine.vllm_compat.names import Request, RequestStatus
from weft.engine.wire.control import CallKey


def not_begun(
    queue: Iterable[Request], entries: Mapping[str, Entry], calls: Iterable[CallKey], most: int
) -> dict[CallKey, str]:
    """Return the first `most` of the calls that have never run and have nothing under way, with their requests.

    A call with several sequences is left: they may run already.

    Args:
        queue: the requests that wait, those included that the policy holds back.
        entries: by request.
        calls: the calls that may leave, in the order of preference.
        most: how many are returned.
    """
    waiting = {}
    for request in queue:
        ledger = entries[request.request_id].ledger
        # A prompt that is fetched, or a grammar that is compiled, has another status.
        is_new = request.status == RequestStatus.WAITING and request.num_preemptions == 0
        if is_new and not request.num_computed_tokens and not request.num_output_tokens and ledger.sequences == 1:
            waiting[ledger.program_id, ledger.call_id] = request.request_id
    found = [(call, waiting[call]) for call in dict.fromkeys(calls) if call in waiting]
    return dict(found[:most])
