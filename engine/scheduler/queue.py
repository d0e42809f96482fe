"""vLLM's waiting queue over a Weft policy."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping

from weft.core.policies import Call, Policy
from weft.engine.scheduler.ledger import Entry
from weft.engine.vllm_compat.names import Request, RequestQueue, RequestStatus
from weft.engine.wire.control import CallKey


def not_begun(
    queue: Iterable[Request],
    entries: Mapping[str, Entry],
    calls: Iterable[CallKey],
    may_leave: Callable[[Request], bool],
    most: int,
) -> dict[CallKey, str]:
    """Return the first `most` of the calls that have never run and have nothing under way, with their requests.

    A call with several sequences is left: they may run already.

    Args:
        queue: the requests that wait, those included that the policy holds back.
        calls: the calls that may leave, in the order of preference.
        may_leave: asked of each in turn, until there are enough.
    """
    waiting = {}
    for request in queue:
        ledger = entries[request.request_id].ledger
        # A prompt that is fetched, or a grammar that is compiled, has another status.
        is_new = request.status == RequestStatus.WAITING and request.num_preemptions == 0
        if is_new and not request.num_computed_tokens and not request.num_output_tokens and ledger.sequences == 1:
            waiting[ledger.program_id, ledger.call_id] = request
    found = (call for call in dict.fromkeys(calls) if call in waiting and may_leave(waiting[call]))
    return {call: waiting[call].request_id for call in itertools.islice(found, most)}


class PolicyQueue(RequestQueue):
    """The requests whose calls wait under a policy, in the policy's order.

    vLLM pops requests that it cannot admit yet and prepends them again in the same step. They return to their rank
    here, so prepending is adding.

    The policy may hold requests back. They are counted, and removed like others. But the queue is false while it has
    no others, so that vLLM takes none of them.
    """

    def __init__(self, policy: Policy, call_of: Callable[[Request], Call], clock: Callable[[], float]) -> None:
        self._waiting, self._held = policy.waiting, policy.held
        self._policy = policy
        self._call_of = call_of
        self._clock = clock
        self._members: dict[str, tuple[Call, Request]] = {}

    def add_request(self, request: Request) -> None:
        call = self._call_of(request)
        self._members[request.request_id] = call, request
        self._policy.arrive(call, self._clock())

    def prepend_request(self, request: Request) -> None:
        call = self._call_of(request)
        self._members[request.request_id] = call, request
        if call not in self._waiting and call not in self._held:
            self._waiting.push(call)

    def prepend_requests(self, requests: Iterable[Request]) -> None:
        for request in requests:
            self.prepend_request(request)

    def peek_request(self) -> Request:
        return self._members[self._waiting.peek().key][1]

    def pop_request(self) -> Request:
        return self._members.pop(self._waiting.pop().key)[1]

    def remove_request(self, request: Request) -> None:
        member = self._members.pop(request.request_id, None)
        if member is not None:
            self._waiting.discard(member[0])
            self._held.discard(member[0])

    def remove_requests(self, requests: Iterable[Request]) -> None:
        for request in requests:
            self.remove_request(request)

    def __bool__(self) -> bool:
        return len(self._waiting) > 0

    def __len__(self) -> int:
        return len(self._waiting) + len(self._held)

    def __iter__(self) -> Iterator[Request]:
        return (self._members[call.key][1] for call in [*self._waiting, *self._held])
