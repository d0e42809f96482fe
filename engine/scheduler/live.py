"""What the scheduler says of its calls and its programs' KV, for people who look on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, islice

from weft.core.policies import Policy, ProgramView
from weft.core.show import MOST_CALLS, LiveCall, ProgramKv, SchedulerState
from weft.engine.kv_cache.order import KvOrder
from weft.engine.kv_cache.store import HostStore
from weft.engine.scheduler.call_table import CallTable
from weft.engine.vllm_compat.names import KVCacheManager, Request


class LiveView:
    """Reads the state of a scheduler between two steps. Nothing changes."""

    def __init__(
        self,
        policy: Policy,
        table: CallTable,
        order: KvOrder,
        *,
        requests: Mapping[str, Request],
        manager: KVCacheManager,
        block_tokens: int,
        store: HostStore | None,
    ) -> None:
        self._policy = policy
        self._has_levels = policy.levels > 1
        self._table = table
        self._order = order
        self._requests = requests
        self._manager = manager
        self._block_tokens = block_tokens
        self._store = store

    def state(self, now_s: float) -> SchedulerState:
        """The state now, of at most `MOST_CALLS` calls and programs. O(n log n) for n calls and programs."""
        calls: dict[int, list[str]] = {}  # the requests of each call, by its ledger: a call may have several sequences
        for request_id, entry in self._table.entries.items():
            calls.setdefault(id(entry.ledger), []).append(request_id)
        places = self._places()
        running = sum(self._table.entries[requests[0]].ledger.running > 0 for requests in calls.values())
        return SchedulerState(
            running,
            len(calls) - running,
            float(self._manager.usage),
            tuple(self._call(requests, places, now_s) for requests in islice(calls.values(), MOST_CALLS)),
            tuple(islice(self._kv(), MOST_CALLS)),
        )

    def _places(self) -> dict[int, int]:
        """The places of waiting calls, by ledger: that of a call's first sequence."""
        waiting = chain(self._policy.waiting, self._policy.held)
        places: dict[int, int] = {}
        for call in islice(waiting, MOST_CALLS):
            places.setdefault(id(self._table.entries[call.key].ledger), len(places) + 1)
        return places

    def _call(self, requests: Sequence[str], places: Mapping[int, int], now_s: float) -> LiveCall:
        entry = self._table.entries[requests[0]]
        ledger = entry.ledger
        waits_s = 0.0 if ledger.running else now_s - ledger.waiting_since_s
        return LiveCall(
            ledger.call_id,
            ledger.program_id,
            level=entry.call.rank.level if self._has_levels else None,
            runs=ledger.running > 0,
            service_s=ledger.service_s,
            wait_s=ledger.wait_s + waits_s,
            prompt_tokens=entry.call.prompt_tokens,
            output_tokens=sum(self._requests[each].num_output_tokens for each in requests),
            place=None if ledger.running else places.get(id(ledger)),
        )

    def _kv(self) -> Iterator[ProgramKv]:
        """What is known of each program, those with calls first."""
        requests: dict[ProgramView, list[str]] = {}
        for request_id, entry in self._table.entries.items():
            requests.setdefault(entry.call.program, []).append(request_id)
        idle = self._table.idle_programs() if self._order.knows_contexts else ()
        programs = chain(requests.items(), ((program, []) for program in idle))
        return (each for program, its_requests in programs if (each := self._kv_of(program, its_requests)) is not None)

    def _kv_of(self, program: ProgramView, requests: Sequence[str]) -> ProgramKv | None:
        """A program's calls continue its contexts, so the larger count has the other in it."""
        blocks = {block for each in requests for block in self._manager.get_block_ids(each)[0]}
        host_tokens = sum(map(self._store.saved_tokens, requests)) if self._store is not None else 0
        contexts = self._order.tokens_of(program)
        if contexts is None:
            is_known = bool(blocks or host_tokens)
            return ProgramKv(program.program_id, len(blocks) * self._block_tokens, host_tokens) if is_known else None
        device_tokens = max(len(blocks) * self._block_tokens, contexts[0])
        return ProgramKv(program.program_id, device_tokens, host_tokens + contexts[1])
