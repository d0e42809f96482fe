"""What the front end tells a scheduler and asks it between two steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, Final

from weft.core.class_rows import together
from weft.core.kv_cache.retention import CallAnnounced, KvEvent, ToolEnded, ToolStarted
from weft.core.policies import Policy, ProgramView
from weft.core.policies.history import History
from weft.core.policies.queues import Levels, ScheduleStats
from weft.core.show import MOST_CALLS, LiveCall, ProgramKv, SchedulerState
from weft.engine.kv_cache.order import KvOrder
from weft.engine.kv_cache.store import HostStore
from weft.engine.scheduler.call_table import CallTable
from weft.engine.scheduler.ledger import AbortedAccounts, KvAccounts
from weft.engine.vllm_compat.names import KVCacheManager, Request
from weft.engine.wire.control import (
    AbortedCalls,
    EventKind,
    ExchangeService,
    ProgramEvent,
    ProgramEvents,
    ProgramsEnded,
    Question,
    SpillProgram,
    TakeKvStats,
    TakeLearned,
    TakeScheduleStats,
    TakeState,
)
from weft.engine.wire.reports import Answer, LearnedReport, encode_aborted, encode_answer

_MOST_CLASSES: Final = 100  # in an answer


@dataclass(eq=False, slots=True)
class ControlHandler:
    """Carries out control messages that leave vLLM's requests as they are."""

    policy: Policy
    table: CallTable
    aborted: AbortedAccounts
    levels: Levels
    kv_order: KvOrder
    kv_accounts: KvAccounts
    live: LiveView
    model: str
    has_history: bool = False

    def use_history(self, text: str) -> None:
        """Learn what programs of earlier runs did, before the first one of this run ends."""
        self.policy.on_event(History.from_json(text)[self.model])
        self.has_history = True

    def receive(
        self,
        message: ProgramsEnded | ProgramEvents | AbortedCalls | SpillProgram | ExchangeService | Question | None,
        now_s: float,
    ) -> Any:
        """Carry out a message. Returns by its type how many of the programs that have ended were known here, the
        accounts of the aborted calls that were asked for, whether KV is being copied, or the answer to a question."""
        match message:
            case ProgramsEnded(program_ids=ended, abandoned=abandoned):
                self.aborted.forget((*ended, *abandoned))
                known = [self.table.end_program(each, now_s) for each in ended]
                known += [self.table.end_program(each, now_s, is_abandoned=True) for each in abandoned]
                return {"ended": sum(known)}
            case ProgramEvents(events):
                for event in events:
                    if (view := self.table.view(event.program_id)) is not None:
                        self.kv_order.happened(view, _kv_event(event), now_s)
            case AbortedCalls(calls):
                return encode_aborted(self.aborted.take(calls))
            case SpillProgram(program_id, begins):
                named = (self.table.view(program_id),) if program_id is not None else self.table.idle_programs()
                views = [view for view in named if view is not None]
                is_copying = any([self.kv_order.spill(view, begins=begins) for view in views])  # noqa: C419  all begin
                done = () if is_copying else views
                return {"copying": is_copying, "blocks": [key for view in done for key in self.kv_order.on_host(view)]}
            case ExchangeService(elsewhere):
                return dict(self.policy.exchange(elsewhere))
            case TakeLearned() | TakeKvStats() | TakeScheduleStats() | TakeState() as question:
                return encode_answer(self._answer(question, now_s))
        return {}

    def _answer(self, question: Question, now_s: float) -> Answer:
        match question:
            case TakeLearned():
                classes, ends = together(self.policy.classes())[:_MOST_CLASSES], self.policy.take_ends()
                return LearnedReport(self.model, tuple(classes), tuple(ends), self.has_history)
            case TakeKvStats():
                return self.kv_accounts.stats(self.kv_order)
            case TakeScheduleStats():
                return self._schedule_stats()
            case TakeState():
                return self.live.state(now_s)

    def _schedule_stats(self) -> ScheduleStats:
        entries = self.table.entries.values()
        running = (entry.call.rank.level for entry in entries if entry.running)
        waiting = (entry.call.rank.level for entry in entries if not entry.running)
        return self.levels.stats(running, waiting, self.policy.promotions)


def _kv_event(event: ProgramEvent) -> KvEvent:
    match event.kind:
        case EventKind.TOOL_STARTED:
            return ToolStarted(event.tool, event.run)
        case EventKind.TOOL_ENDED:
            return ToolEnded(event.run, event.took_s)
        case EventKind.PREFETCH:
            return CallAnnounced()


@dataclass(frozen=True, eq=False, slots=True)
class LiveView:
    """Reads the state of a scheduler between two steps. Nothing changes."""

    policy: Policy
    table: CallTable
    order: KvOrder
    requests: Mapping[str, Request]
    manager: KVCacheManager
    block_tokens: int
    store: HostStore | None

    def state(self, now_s: float) -> SchedulerState:
        """The state now, of at most `MOST_CALLS` calls and programs. O(n log n) for n calls and programs."""
        calls: dict[int, list[str]] = {}  # the requests of each call, by its ledger: a call may have several sequences
        for request_id, entry in self.table.entries.items():
            calls.setdefault(id(entry.ledger), []).append(request_id)
        places = self._places()
        running = sum(self.table.entries[requests[0]].ledger.running > 0 for requests in calls.values())
        return SchedulerState(
            running,
            len(calls) - running,
            float(self.manager.usage),
            tuple(self._call(requests, places, now_s) for requests in islice(calls.values(), MOST_CALLS)),
            tuple(islice(self._kv(), MOST_CALLS)),
        )

    def _places(self) -> dict[int, int]:
        """The places of waiting calls, by ledger: that of a call's first sequence."""
        waiting = chain(self.policy.waiting, self.policy.held)
        places: dict[int, int] = {}
        for call in islice(waiting, MOST_CALLS):
            places.setdefault(id(self.table.entries[call.key].ledger), len(places) + 1)
        return places

    def _call(self, requests: Sequence[str], places: Mapping[int, int], now_s: float) -> LiveCall:
        entry = self.table.entries[requests[0]]
        ledger = entry.ledger
        waits_s = 0.0 if ledger.running else now_s - ledger.waiting_since_s
        return LiveCall(
            ledger.call_id,
            ledger.program_id,
            level=entry.call.rank.level if self.policy.levels > 1 else None,
            runs=ledger.running > 0,
            service_s=ledger.service_s,
            wait_s=ledger.wait_s + waits_s,
            prompt_tokens=entry.call.prompt_tokens,
            output_tokens=sum(self.requests[each].num_output_tokens for each in requests),
            place=None if ledger.running else places.get(id(ledger)),
        )

    def _kv(self) -> Iterator[ProgramKv]:
        """What is known of each program, those with calls first."""
        requests: dict[ProgramView, list[str]] = {}
        for request_id, entry in self.table.entries.items():
            requests.setdefault(entry.call.program, []).append(request_id)
        idle = self.table.idle_programs() if self.order.knows_contexts else ()
        programs = chain(requests.items(), ((program, []) for program in idle))
        return (each for program, its_requests in programs if (each := self._kv_of(program, its_requests)) is not None)

    def _kv_of(self, program: ProgramView, requests: Sequence[str]) -> ProgramKv | None:
        """A program's calls continue its contexts, so the larger count has the other in it."""
        blocks = {block for each in requests for block in self.manager.get_block_ids(each)[0]}
        host_tokens = sum(map(self.store.saved_tokens, requests)) if self.store is not None else 0
        contexts = self.order.tokens_of(program)
        if contexts is None:
            is_known = bool(blocks or host_tokens)
            return ProgramKv(program.program_id, len(blocks) * self.block_tokens, host_tokens) if is_known else None
        device_tokens = max(len(blocks) * self.block_tokens, contexts[0])
        return ProgramKv(program.program_id, device_tokens, host_tokens + contexts[1])
