"""What the scheduler keeps of programs, calls and requests under way, and what calls find in the KV cache."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable
from dataclasses import dataclass, field
from typing import Final

from weft.core.accounts import MOST_WAITS, Account, Attained
from weft.core.ids import CallId, ProgramId
from weft.core.kv_cache.contexts import ComputedBefore
from weft.core.kv_cache.stats import KvStats
from weft.core.log import get_logger
from weft.core.policies import Call, ProgramView
from weft.engine.kv_cache.order import KvOrder
from weft.engine.kv_cache.store import HostStore
from weft.engine.vllm_compat.names import Request
from weft.engine.wire.control import CallKey
from weft.engine.wire.reports import CallAccount

_MOST_HELD: Final = 10_000  # for a front end that does not ask


class AbortedAccounts:
    """Holds accounts of calls that ended in the front end: by a cancellation, a closed stream or a stop string.

    vLLM sends no output for such a call, so nothing can carry its last account back.

    Args:
        most: How many accounts are held. The oldest are dropped.
    """

    def __init__(self, most: int = _MOST_HELD) -> None:
        self._most = most
        self._held: dict[CallKey, CallAccount] = {}  # the oldest first
        self.dropped = 0

    def __len__(self) -> int:
        return len(self._held)

    def add(self, call: CallKey, account: CallAccount) -> None:
        self._held[call] = account
        if len(self._held) > self._most:
            del self._held[next(iter(self._held))]
            if self.dropped == 0:
                get_logger().warning("the front end does not ask for the accounts of aborted calls", held=self._most)
            self.dropped += 1

    def take(self, calls: Iterable[CallKey]) -> dict[CallKey, CallAccount]:
        """The accounts of these calls, as far as they are held. They are no longer held."""
        return {call: self._held.pop(call) for call in calls if call in self._held}

    def forget(self, program_ids: Collection[ProgramId]) -> None:
        """Drop the accounts of programs that have ended, whose rows have left the process table."""
        if self._held:
            ended = frozenset(program_ids)
            self._held = {call: account for call, account in self._held.items() if call[0] not in ended}


@dataclass(slots=True)
class ProgramEntry:
    """A program with requests on this engine."""

    view: ProgramView
    requests: int = 0
    has_ended: bool = False  # its end was reported while requests were under way


@dataclass(slots=True)
class Ledger:
    """The cost of one call.

    The sequences of a call with n > 1 share the ledger: a step is charged once, and the call waits while no sequence
    runs.
    """

    call_id: CallId
    program_id: ProgramId
    inherited: Attained  # what the program had attained when the call arrived (Alg. 1 line 11)
    waiting_since_s: float
    ends_program: bool = False
    sequences: int = 0
    running: int = 0
    service_s: float = 0.0
    wait_s: float = 0.0
    preemptions: int = 0
    fetched_tokens: int = 0
    swapped_tokens: int = 0
    recomputed_tokens: int = 0
    last_step: int = -1  # the last step that was charged
    arrived_s: float = field(init=False)
    waits: tuple[tuple[float, float], ...] = ()  # see Account.waits

    def __post_init__(self) -> None:
        self.arrived_s = self.waiting_since_s

    def start(self, now_s: float) -> None:
        """A sequence starts to run."""
        if self.running == 0:
            length_s = now_s - self.waiting_since_s
            self._note_wait(length_s)
            self.wait_s += length_s
        self.running += 1

    def stop(self, now_s: float) -> None:
        """A sequence stops."""
        self.running -= 1
        self.waiting_since_s = now_s

    def _note_wait(self, length_s: float) -> None:
        start_s = self.waiting_since_s - self.arrived_s
        if not start_s or length_s <= 0:
            return
        if not self.waits and self.wait_s:
            self.waits = ((0.0, self.wait_s),)
        if len(self.waits) < MOST_WAITS:
            self.waits = (*self.waits, (start_s, length_s))

    def account(self) -> Account:
        """The call's account; the scheduler does not know the numbers of prompt and output tokens."""
        return Account(
            self.service_s,
            self.wait_s,
            self.preemptions,
            fetched_tokens=self.fetched_tokens,
            swapped_tokens=self.swapped_tokens,
            recomputed_tokens=self.recomputed_tokens,
            waits=self.waits,
        )


@dataclass(slots=True)
class Entry:
    """A request under way."""

    call: Call
    ledger: Ledger
    running: bool = False
    computes_prompt: bool = False  # it runs, and not all of its known tokens are in the KV cache yet
    stalled: bool = False  # it runs, and calls of better rank use up the tokens of the step
    output_tokens: int = 0  # when the request last started
    computed_tokens: int = 0  # the most tokens that the request ever had in the KV cache
    known_tokens: int = 0  # of its prompt, that an earlier call of its program has computed
    lost_tokens: int = 0  # tokens that the request had in the KV cache when it was last preempted
    next_tool: str | None = None  # that begins when the call has ended, if the client knows it already
    is_next_soon: bool = False  # the client has announced the program's next call


class KvAccounts:
    """What calls found where, and what they compute though their program had computed it: in tokens, for each call and
    for the engine.

    Args:
        block_tokens: The tokens of a block that has a hash.
    """

    def __init__(self, block_tokens: int, swap: HostStore | None, policy: str) -> None:
        self._policy = policy
        self._block_tokens = block_tokens
        self._slot_bytes = round(swap.choice.token_bytes * swap.block_tokens) if swap is not None else 0
        self._swap = swap
        self._before = ComputedBefore()
        self._found_tokens = self._fetched_tokens = self._recomputed_tokens = 0

    def call_began(self, request: Request, entry: Entry, program: Hashable, found_tokens: int) -> None:
        """A call starts to run, or runs again, with `found_tokens` of its tokens in the KV cache."""
        loaded = self._swap.loaded_tokens(request.request_id) if self._swap is not None else 0
        if request.num_preemptions > 0:
            lost = entry.lost_tokens
            entry.ledger.swapped_tokens += loaded
        else:
            # vLLM computes the last token of a prompt again in any case, and with it its block.
            most = (request.num_prompt_tokens - 1) // self._block_tokens
            lost = min(self._before.blocks(program, request.block_hashes), most) * self._block_tokens
            entry.known_tokens = lost
            entry.ledger.fetched_tokens += loaded
        again = max(0, lost - found_tokens)
        entry.ledger.recomputed_tokens += again
        self._recomputed_tokens += again
        self._fetched_tokens += loaded
        self._found_tokens += max(0, found_tokens - loaded)

    def call_left(self, request: Request, program: Hashable) -> None:
        """A call has ended, with what it has computed."""
        blocks = request.num_computed_tokens // self._block_tokens
        self._before.add(program, request.block_hashes[:blocks])

    def forget(self, program: Hashable) -> None:
        """No call of a program will come."""
        self._before.forget(program)

    def stats(self, order: KvOrder) -> KvStats:
        """What `engine.kv_stats` shows."""
        ahead_tokens = spilled_tokens = used = slots = 0
        if self._swap is not None:
            swap, ahead_tokens = self._swap.stats(), self._swap.counts.fetched_tokens
            spilled_tokens, used, slots = self._swap.counts.spilled_tokens, swap.used, swap.slots
        return KvStats(
            policy=self._policy,
            found_tokens=self._found_tokens,
            fetched_tokens=self._fetched_tokens + ahead_tokens,
            recomputed_tokens=self._recomputed_tokens,
            spilled_tokens=spilled_tokens,
            held_blocks=order.held_blocks,
            programs_held=order.programs_held,
            host_used_bytes=used * self._slot_bytes,
            host_capacity_bytes=slots * self._slot_bytes,
            tools=order.tools(),
        )
