"""What the scheduler says of its calls and its programs' KV, for people who look on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, islice

from weft.core.live import MOST_CALLS, LiveCall, ProgramKv, SchedulerState
from weft.core.policies import Policy, ProgramView
from weft.engine.kv_cache.order import KvOrder
from weft.engine.kv_cache.store import HostStore
from weft.engine.scheduler.call_table import CallTable
from weft.engine.scheduler.ledger import Entry, Ledger
from weft.engine.vllm_compat.names import KVCacheManager


class LiveView:
    """Reads the state of a scheduler between two steps. Nothing changes.

    Args:
        policy: Ranks the calls.
        table: The calls and programs.
        order: May know what programs have in the KV cache between their calls.
        manager: vLLM's KV blocks.
        block_tokens: The tokens of a block.
        store: Host memory; None: there is none.
    """

    def __init__(
        self,
        policy: Policy,
        table: CallTable,
        order: KvOrder,
        *,
        manager: KVCacheManager,
        block_tokens: int,
        store: HostStore | None,
    ) -> None:
        self._has_levels = policy.has_level(1)
        self._table = table
        self._order = order
        self._manager = manager
        self._block_tokens = block_tokens
        self._store = store

    def state(self, now_s: float) -> SchedulerState:
        """The state now, of at most `MOST_CALLS` calls and programs. O(n) for n calls and programs."""
        ledgers: dict[int, tuple[Ledger, Entry]] = {}  # a call with several sequences has one ledger
        for entry in self._table.entries.values():
            ledgers.setdefault(id(entry.ledger), (entry.ledger, entry))
        running = sum(ledger.running > 0 for ledger, _entry in ledgers.values())
        calls = (self._call(ledger, entry, now_s) for ledger, entry in ledgers.values())
        return SchedulerState(
            running,
            len(ledgers) - running,
            float(self._manager.usage),
            tuple(islice(calls, MOST_CALLS)),
            tuple(islice(self._kv(), MOST_CALLS)),
        )

    def _call(self, ledger: Ledger, entry: Entry, now_s: float) -> LiveCall:
        waits_s = 0.0 if ledger.running else now_s - ledger.waiting_since_s
        level = entry.call.rank.level if self._has_levels else None
        return LiveCall(
            ledger.call_id, ledger.program_id, level, ledger.running > 0, ledger.service_s, ledger.wait_s + waits_s
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
