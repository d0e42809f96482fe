"""What the front end tells a scheduler and asks it between two steps."""

from __future__ import annotations

from typing import Any, Final

from weft.core.class_rows import together
from weft.core.kv_cache.retention import CallAnnounced, KvEvent, ToolEnded, ToolStarted
from weft.core.policies import Policy
from weft.core.policies.history import History
from weft.core.policies.queues.levels import Levels, ScheduleStats
from weft.engine.kv_cache.order import KvOrder
from weft.engine.scheduler.call_table import CallTable
from weft.engine.scheduler.ledger import AbortedAccounts, KvAccounts
from weft.engine.scheduler.live import LiveView
from weft.engine.wire.answers import Answer, LearnedReport, encode_aborted, encode_answer
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

_MOST_CLASSES: Final = 100  # in an answer


class ControlHandler:
    """Carries out control messages that leave vLLM's requests as they are."""

    def __init__(
        self,
        policy: Policy,
        table: CallTable,
        aborted: AbortedAccounts,
        levels: Levels,
        *,
        kv_order: KvOrder,
        kv_accounts: KvAccounts,
        live: LiveView,
        model: str,
    ) -> None:
        self.has_history = False
        self._policy = policy
        self._table = table
        self._aborted = aborted
        self._levels = levels
        self._kv_order = kv_order
        self._kv_accounts = kv_accounts
        self._live = live
        self._model = model

    def use_history(self, text: str) -> None:
        """Learn what programs of earlier runs did, before the first one of this run ends."""
        self._policy.on_event(History.from_json(text)[self._model])
        self.has_history = True

    def receive(
        self,
        message: ProgramsEnded | ProgramEvents | AbortedCalls | SpillProgram | ExchangeService | Question | None,
        now_s: float,
    ) -> Any:
        """Carry out a message.

        Returns:
            By the message's type: how many of the programs that have ended were known here, the accounts of the
            aborted calls that were asked for, whether KV is being copied, or the answer to a question.
        """
        match message:
            case ProgramsEnded(program_ids=ended, abandoned=abandoned):
                self._aborted.forget((*ended, *abandoned))
                known = [self._table.end_program(each) for each in ended]
                known += [self._table.end_program(each, is_abandoned=True) for each in abandoned]
                return {"ended": sum(known)}
            case ProgramEvents(events):
                for event in events:
                    if (view := self._table.view(event.program_id)) is not None:
                        self._kv_order.happened(view, _kv_event(event), now_s)
            case AbortedCalls(calls):
                return encode_aborted(self._aborted.take(calls))
            case SpillProgram(program_id, begins):
                view = self._table.view(program_id)
                is_copying = view is not None and self._kv_order.spill(view, begins=begins)
                is_done = view is not None and not is_copying
                return {"copying": is_copying, "blocks": self._kv_order.on_host(view) if is_done else []}
            case ExchangeService(elsewhere):
                return dict(self._policy.exchange(elsewhere))
            case TakeLearned() | TakeKvStats() | TakeScheduleStats() | TakeState() as question:
                return encode_answer(self._answer(question, now_s))
        return {}

    def _answer(self, question: Question, now_s: float) -> Answer:
        match question:
            case TakeLearned():
                classes, ends = together(self._policy.classes())[:_MOST_CLASSES], self._policy.take_ends()
                return LearnedReport(self._model, tuple(classes), tuple(ends), self.has_history)
            case TakeKvStats():
                return self._kv_accounts.stats(self._kv_order)
            case TakeScheduleStats():
                return self._schedule_stats()
            case TakeState():
                return self._live.state(now_s)

    def _schedule_stats(self) -> ScheduleStats:
        entries = self._table.entries.values()
        running = (entry.call.rank.level for entry in entries if entry.running)
        waiting = (entry.call.rank.level for entry in entries if not entry.running)
        return self._levels.stats(running, waiting, self._policy.promotions)


def _kv_event(event: ProgramEvent) -> KvEvent:
    match event.kind:
        case EventKind.TOOL_STARTED:
            return ToolStarted(event.tool, event.run)
        case EventKind.TOOL_ENDED:
            return ToolEnded(event.run, event.took_s)
        case EventKind.PREFETCH:
            return CallAnnounced()
