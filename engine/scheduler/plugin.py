"""Weft's scheduler: a `scheduler_cls` plugin for stock vLLM.

It orders calls by a policy of `weft.core.policies` and leaves batching, KV blocks and outputs to vLLM. Use it through
`weft.Engine`, or on its own::

    vllm serve MODEL --scheduler-cls weft.engine.scheduler.WeftScheduler \\
        --additional-config '{"weft": {"policy": {"name": "atlas", "bounds_s": [1, 4, 16], "beta": 8}}}'

A request names its program in `vllm_xargs`: `program_id`, and optionally the rest of a
`weft.engine.wire.call_header.CallHeader`, or by its `session_id`. A request that names none is a program of its own.
`weft.engine.http.CheckIds` makes the server refuse malformed headers.
"""

from __future__ import annotations

import math
import time
from bisect import insort
from collections import deque
from collections.abc import Callable
from itertools import pairwise
from typing import Any, Final

from weft.core.kv_cache.fetch_ahead import loads_beside
from weft.core.kv_cache.policies import KvPolicyConfig
from weft.core.kv_cache.retention import ProgramGone
from weft.core.policies import Call, KvSize, Policy, ProgramView, Rank
from weft.engine.kv_cache.connector import SwapConnector
from weft.engine.kv_cache.order import CallKv, KvOrder
from weft.engine.kv_cache.soft_hold import make_order
from weft.engine.kv_cache.store import HostStore
from weft.engine.processes.host import end_with_parent
from weft.engine.scheduler.batch import BatchFormer
from weft.engine.scheduler.call_table import CallTable, HeaderReader
from weft.engine.scheduler.charging import Step, StepCharges
from weft.engine.scheduler.control_handler import ControlHandler, LiveView
from weft.engine.scheduler.failed_loads import void_calls
from weft.engine.scheduler.ledger import AbortedAccounts, Entry, KvAccounts, Ledger
from weft.engine.scheduler.queue import PolicyQueue, not_begun
from weft.engine.vllm_compat.names import (
    AsyncScheduler,
    EngineCoreOutput,
    EngineCoreOutputs,
    ModelRunnerOutput,
    PauseState,
    Request,
    RequestStatus,
    SchedulerOutput,
)
from weft.engine.vllm_compat.versions.members import check_members
from weft.engine.wire.control import TakeBack, UseHistory, decode_control
from weft.engine.wire.reports import attach, encode_account
from weft.engine.wire.scheduler_config import decode_config

# Behind a server, programs that nobody ends are forgotten after so many seconds without a request.
_IDLE_S: Final = 600.0


class WeftScheduler(AsyncScheduler):
    """Orders waiting and running calls by program (Autellix, Algorithm 1)."""

    max_num_active_reqs: int  # vLLM's, without the slots of calls whose KV is on its way

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._config = config = decode_config(self.vllm_config.additional_config)
        self._has_own_client = config.one_client
        self._headers = HeaderReader(trusts_clients=config.trust_clients)
        if self._has_own_client:  # behind a server, the server ends its processes
            end_with_parent()
        else:  # an engine's host has done it
            check_members()
        self._policy = policy = config.policy
        self._decide_every = policy.decide_every
        self._token_s = policy.token_s
        if not self.vllm_config.scheduler_config.async_scheduling:
            # Steps do not overlap. vLLM then has its plain scheduler, which keeps no placeholders for tokens in flight.
            for name in ("_update_after_schedule", "_update_request_with_output"):
                setattr(self, name, getattr(super(AsyncScheduler, self), name))
        connector = self.connector
        self._swap = connector.store if isinstance(connector, SwapConnector) else None
        self._most_active, self._loading = self.max_num_active_reqs, 0  # requests with a slot; those that load
        self._clock: Callable[[], float] = time.monotonic
        self._aborted = AbortedAccounts()
        self._steps_in_flight: deque[Step] = deque()
        self.use_policy(policy.make())
        self._left: dict[str, Ledger] = {}  # of requests that left since the last outputs
        self._to_tell: set[str] = set()  # the requests whose next output carries their account
        self._computing: dict[str, Request] = {}  # they ran in the last step, and do not have all of their prompts yet

    def use_policy(self, policy: Policy) -> None:
        """Schedule by a policy from now on, and forget all programs. No request may be under way."""
        self.weft_policy = policy
        self._steps_to_decision = 0
        self._has_changed = True  # something has happened since the policy was asked last
        self._next_change_s = -math.inf  # when it should be asked again though nothing happens
        evicts_by = self._config.evicts_by(policy, has_host_memory=self._swap is not None)
        self._kv_order = self._make_kv_order(evicts_by)
        policy.on_event(KvSize(self._kv_tokens(), self._kv_order.host_tokens))
        if isinstance(self.connector, SwapConnector):
            self.connector.wants_step = lambda: self._kv_order.wants_step
            self.connector.loads_beside = self._loads_beside
        self._kv_accounts = KvAccounts(self.kv_cache_manager.block_pool.hash_block_size, self._swap, evicts_by.name)
        idle_s = math.inf if self._has_own_client else _IDLE_S
        self._table = CallTable(policy, self._program_gone, idle_s)
        self._entries = self._table.entries
        self._charges = StepCharges(
            self._entries,
            self.requests,
            policy,
            self._kv_order,
            self._steps_in_flight,
            token_s=self._token_s,
            swap=self._swap,
        )
        self._former = BatchFormer(self, policy, self._table, self._swap, self._can_start)
        self.waiting = PolicyQueue(policy, self._call_of, self._now_s)
        live = LiveView(
            policy,
            self._table,
            self._kv_order,
            requests=self.requests,
            manager=self.kv_cache_manager,
            block_tokens=self.block_size,
            store=self._swap,
        )
        self._control = ControlHandler(
            policy,
            self._table,
            self._aborted,
            self._charges.levels,
            kv_order=self._kv_order,
            kv_accounts=self._kv_accounts,
            live=live,
            model=self._config.model,
        )

    def set_clock(self, clock: Callable[[], float]) -> None:
        """Replace the clock, in seconds, before the first request. vLLM makes schedulers itself and passes none in."""
        self._clock = clock

    def _kv_tokens(self) -> float:
        """The tokens that the KV cache holds; inf where it keeps nothing between calls."""
        if not self.cache_config.enable_prefix_caching:
            return math.inf
        # vLLM keeps one block for itself. The groups of a model with several kinds of attention share the others.
        blocks = self.kv_cache_config.num_blocks - 1
        return blocks * self.block_size / len(self.kv_cache_config.kv_cache_groups)

    def _make_kv_order(self, evicts_by: KvPolicyConfig) -> KvOrder:
        if len(self.kv_cache_config.kv_cache_groups) != 1 or not self.cache_config.enable_prefix_caching:
            return KvOrder()
        return make_order(evicts_by.make(), self.kv_cache_manager.block_pool, self.block_size, self._swap)

    def _program_gone(self, program: ProgramView) -> None:
        self._kv_order.happened(program, ProgramGone(), self._clock())
        self._kv_accounts.forget(program)

    def _now_s(self) -> float:
        return self._clock()

    def _call_of(self, request: Request) -> Call:
        return self._entries[request.request_id].call

    def _rank_of(self, request: Request) -> Rank:
        return self._entries[request.request_id].call.rank

    def check_integrity(self) -> None:
        """Assert that every request is in one queue and that the sums agree. For tests."""
        running = {request.request_id for request in self.running}
        waiting = {call.key for call in (*self.weft_policy.waiting, *self.weft_policy.held)}
        held = {request.request_id for request in self.kv_holding_waiting}
        checks = {
            "a request is in two queues": not (running & waiting or running & held or waiting & held),
            "a request is lost": running | waiting | held == set(self.requests) == set(self._entries),
            "the queue and the policy disagree": {request.request_id for request in self.waiting} == waiting,
            "running requests are out of order": self._charges.rank_changed
            or all(self._rank_of(one) <= self._rank_of(other) for one, other in pairwise(self.running)),
        }
        failed = [what for what, holds in checks.items() if not holds]
        if failed:
            raise AssertionError("; ".join(failed))
        self._table.check_integrity(running)
        self._kv_order.check_integrity()
        if self._swap is not None:
            self._swap.check_integrity()

    # -- arrival, departure, control

    def add_request(self, request: Request) -> None:
        self._has_changed = True
        if request.request_id not in self._entries:  # otherwise it is the next input of a streaming session
            header = self._headers.read(request)
            now_s = self._clock()
            entry = self._table.open(request.request_id, header, request.num_prompt_tokens, now_s)
            entry.next_tool, entry.is_next_soon = header.tool_started or None, header.prefetch
            self._kv_order.call_arrived(request, entry.call.program, now_s, tool=header.tool_ended or None)
        super().add_request(request)

    def _free_request(self, request: Request, delay_free_blocks: bool = False) -> Any:
        self._batch_changed()
        entry = self._entries.get(request.request_id)
        if entry is not None:
            now_s = self._clock()
            self._charges.settle(request.request_id)
            if entry.ledger.ends_program:  # the policy counts what its other calls have done as well
                self._charges.settle_all()
            entry.call.output_tokens = request.num_output_tokens
            if entry.running and not self.weft_policy.ranks_follow_time:  # the others were charged in each step
                self.weft_policy.charge(entry.call, 0.0, now_s)
            self._kv_order.call_left(self._kv_of(request, entry), now_s)
            self._kv_accounts.call_left(request, entry.call.program)
        self._note_left(request)
        self._to_tell.discard(request.request_id)
        is_aborted = request.status == RequestStatus.FINISHED_ABORTED
        ledger = self._table.close(request.request_id, self._clock(), is_aborted=is_aborted)
        if ledger is not None:
            self._left[request.request_id] = ledger
            if is_aborted and ledger.sequences == 0 and self._has_own_client and self._table.knows(ledger.program_id):
                self._aborted.add((ledger.program_id, ledger.call_id), encode_account(ledger.account()))
        return super()._free_request(request, delay_free_blocks)

    def _batch_changed(self) -> None:
        self._has_changed = True
        self._former.turned_away.clear()  # vLLM may admit them now

    def _kv_of(self, request: Request, entry: Entry) -> CallKv:
        call = entry.call
        manager = self.kv_cache_manager
        return CallKv(request, call.program, manager, entry.next_tool, entry.is_next_soon, call.rank.level)

    def __call__(self, message: object) -> dict[str, Any]:
        """Receive a control message (`weft.engine.vllm_compat.control`). Returns the calls that were given back, or
        what `ControlHandler.receive` returns."""
        self._has_changed = True
        self._charges.settle_all()
        match decode_control(message):
            case UseHistory(history):
                self._use_history(history)
                return {}
            case TakeBack() as message:
                return self._take_back(message)
            case other:
                return self._control.receive(other, self._clock())

    def _use_history(self, text: str) -> None:
        if self._control.has_history:
            return
        if self._table.is_empty:  # the engine's own prompts at its start are no programs to learn from
            self.use_policy(self._policy.make())
        self._control.use_history(text)

    def _take_back(self, message: TakeBack) -> dict[str, Any]:
        manager = self.kv_cache_manager

        def is_cheap(request: Request) -> bool:
            if not manager.prefix_cache_lookup_enabled(request):
                return True
            found = manager.coordinator.find_longest_cache_hit(request.block_hashes, request.num_tokens - 1)
            return found[1] <= message.most_cached

        taken = not_begun(self.waiting, self._entries, message.calls, is_cheap, message.most)
        self.finish_requests(list(taken.values()), RequestStatus.FINISHED_ABORTED)
        self._aborted.take(taken)  # another engine accounts for them
        return {"taken": [list(call) for call in taken], "waiting": len(self.waiting)}

    # -- one step

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        now_s = self._clock()
        # Between decisions vLLM still gives the slot of a call that ends to the first that waits.
        decides = self._steps_to_decision == 0
        self._steps_to_decision = (self._decide_every if decides else self._steps_to_decision) - 1
        self._give_slots_to_loads()
        if self._has_changed or now_s >= self._next_change_s:
            admits = self.pause_state == PauseState.UNPAUSED and not self._holds_prompts(throttle_prefills)
            self._rank_and_preempt(now_s, admits=admits, decides=decides)
        self._kv_order.before_step(self._former, now_s)
        output = super().schedule(throttle_prefills)
        started = len(output.scheduled_new_reqs) + len(output.scheduled_cached_reqs.resumed_req_ids)
        if started or self._computing:  # otherwise all requests decode
            self._note_prompts(output, now_s)
        self._former.step_formed(output, now_s)
        self._charges.step_formed(output, now_s)
        return output

    def _holds_prompts(self, throttle_prefills: bool) -> bool:
        """Whether vLLM leaves prompts of more than one token out of the step, so that running calls decode without
        them: with data parallelism where other ranks compute none (`throttle_prefills`), and since vLLM 0.33 also as
        `--prefill-schedule-interval` says."""
        interval: int = getattr(self, "local_prefill_interval", 1)
        holds_by_itself = interval > 1 and self.num_executed_steps + 1 - self.last_prefill_step < interval
        if not throttle_prefills and not holds_by_itself:
            return False
        return not self.prefill_capacity_bound and any(not request.is_prefill_chunk for request in self.running)

    def _rank_and_preempt(self, now_s: float, *, admits: bool, decides: bool) -> None:
        changed = self.weft_policy.decide(now_s) if decides else ()
        # vLLM preempts running[-1] when KV blocks run out inside the step. Calls that end in the same step end in this
        # order, as they do in the simulator.
        if self._charges.rank_changed or any(self._entries[call.key].running for call in changed):
            self.running.sort(key=self._rank_of)
            self._charges.rank_changed = False
        has_prompts = len(self._inflight_prefills) > 0
        for request in self._former.form(admits=admits, may_preempt=decides, has_prompts=has_prompts):
            self.force_out(request)
        # Most steps only decode. Then nothing is to be done until something happens.
        self._has_changed = not (decides and self._former.is_settled)
        self._next_change_s = self.weft_policy.next_change_s()

    def _note_prompts(self, output: SchedulerOutput, now_s: float) -> None:
        started: list[Request] = []
        for request in reversed(self.running):  # vLLM appends those that it admits
            if self._entries[request.request_id].running:
                break
            started.append(request)
        del self.running[len(self.running) - len(started) :]
        for request in reversed(started):
            self._start(request, self._entries[request.request_id], output, now_s)
            insort(self.running, request, key=self._rank_of)
        computing = self._computing | {request.request_id: request for request in reversed(started)}
        self._computing = {}
        for key, request in computing.items():
            entry = self._entries.get(key)
            if entry is None or not entry.running:  # it has left, or was preempted
                continue
            if tokens := output.num_scheduled_tokens.get(key, 0):
                self._charges.note_prompt(request, entry, tokens)
            if entry.computes_prompt:
                self._computing[key] = request

    def get_grammar_bitmask(self, scheduler_output: SchedulerOutput) -> Any:
        """vLLM asks when it has given the step to the workers. So this is the time to prepare the next one."""
        bitmask = super().get_grammar_bitmask(scheduler_output)
        self._kv_order.while_step_runs(self._former, self._clock())
        return bitmask

    def _start(self, request: Request, entry: Entry, output: SchedulerOutput, now_s: float) -> None:
        self._batch_changed()
        entry.running = entry.computes_prompt = True
        entry.output_tokens = request.num_output_tokens
        found = request.num_computed_tokens - output.num_scheduled_tokens.get(request.request_id, 0)
        if request.num_preemptions == 0:
            entry.call.cached_tokens = min(found, entry.call.prompt_tokens)
        program = entry.call.program
        self._kv_accounts.call_began(request, entry, program, found)
        self._kv_order.call_began(request, program, program.name, found, now_s, level=entry.call.rank.level)
        if entry.ledger.running == 0:
            self._charges.levels.started(entry.call.rank.level, now_s - entry.ledger.waiting_since_s)
        entry.ledger.start(now_s)
        self._to_tell.add(request.request_id)
        self.weft_policy.start(entry.call, now_s)

    def _reserve_prefill_lookahead(self, request: Request, num_computed_tokens: int, num_new_tokens: int) -> int:
        """Limit a running prompt to its share of the step. vLLM asks this for each request that it schedules."""
        shares = self._former.shares
        if not shares and not self.num_prefill_lookahead:  # the usual case, in which vLLM's method changes nothing
            return max(num_new_tokens, 0)
        if not request.has_encoder_inputs:
            num_new_tokens = min(num_new_tokens, shares.get(request.request_id, num_new_tokens))
        return super()._reserve_prefill_lookahead(request, num_computed_tokens, num_new_tokens)

    def force_out(self, request: Request) -> None:
        """Preempt a running request, before the next step is formed."""
        self.running.remove(request)
        self._preempt_request(request, time.monotonic())
        self.prev_step_scheduled_req_ids.discard(request.request_id)

    def _loads_beside(self, request: Request, found_tokens: int) -> bool:
        """Whether a request that could start waits while its KV is copied back beside the steps of the others. It has
        its slot meanwhile. With nothing beside which to copy, its own step waits."""
        if request.skip_reading_prefix_cache or not loads_beside(len(self.running)):
            return False
        waits = self._kv_order.loads_beside(request, found_tokens, self._former.running_blocks(), self._clock())
        if waits:
            self._loading += 1
            self.max_num_active_reqs -= 1
        return waits

    def _give_slots_to_loads(self) -> None:
        before, self._loading = self._loading, self._kv_order.calls_loading
        self.max_num_active_reqs = self._most_active - self._loading
        if self._loading < before:  # calls that were passed over can start
            self._batch_changed()

    def _handle_blocked_waiting_request(self, request: Request) -> bool:
        if self._kv_order.is_loading(request.request_id):
            return False
        return bool(super()._handle_blocked_waiting_request(request))

    def _can_start(self, request: Request) -> bool:
        """Whether a waiting request could start in this step. vLLM asks the same when it admits the request."""
        if request.num_stale_output_tokens and not request.drop_stale_output:
            return False
        return bool(self._handle_blocked_waiting_request(request))

    def _preempt_request(self, request: Request, timestamp: float, drop_stale_output: bool = False) -> None:
        entry = self._entries[request.request_id]
        now_s = self._clock()
        self._has_changed = True
        self._charges.settle(request.request_id)
        self._former.preempted()
        if entry.running:
            self._table.set_stalled(entry, now_s, stalled=False)
            entry.running = False
            entry.ledger.stop(now_s)
        entry.ledger.preemptions += 1
        entry.computed_tokens = max(entry.computed_tokens, request.num_computed_tokens)
        # Of a step in flight, only tokens that are computed from known tokens are sure to stay.
        entry.lost_tokens = min(request.num_computed_tokens, request.num_tokens)
        self._note_left(request)
        self._save_kv(request, entry.lost_tokens, is_void=drop_stale_output)
        self._kv_order.call_preempted(self._kv_of(request, entry), now_s)
        self.weft_policy.preempt(entry.call, now_s)
        super()._preempt_request(request, timestamp, drop_stale_output)

    def _note_left(self, request: Request) -> None:
        """A request gives its blocks back. Loads that fail may make them void, and a token that is on the way."""
        if self._swap is not None:
            self._swap.left(request.request_id, lambda: self.kv_cache_manager.get_block_ids(request.request_id)[0])

    def _save_kv(self, request: Request, tokens: int, *, is_void: bool) -> None:
        """Plan to swap the KV of a victim out, before vLLM frees its blocks.

        The next step copies the KV, after the steps in flight have written to it.
        """
        if self._swap is None:
            return
        if is_void:  # the prefix cache is being reset, or the KV could not be loaded
            self._swap.release(request.request_id)
        elif not request.skip_reading_prefix_cache:  # vLLM would not let such a request load
            blocks = self.kv_cache_manager.get_block_ids(request.request_id)[0]
            self._swap.save(request.request_id, blocks, tokens, request.block_hashes)

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> bool:
        self._kv_order.let_go()
        try:
            reset = bool(super().reset_prefix_cache(*args, **kwargs))
        finally:  # vLLM raises an error if calls that run cannot be reset, because their steps are in flight
            if self._swap is not None:
                self._swap.reset()
        if reset:
            self._kv_order.reset(self._clock())
        return reset

    def _handle_stopped_request(self, request: Request) -> bool:
        entry = self._entries.get(request.request_id)
        if request.resumable and entry is not None and entry.running:  # it goes on when its client sends more input
            self._batch_changed()
            self._charges.settle(request.request_id)
            self._to_tell.add(request.request_id)
            self._table.set_stalled(entry, self._clock(), stalled=False)
            entry.running = False
            entry.ledger.stop(self._clock())
            entry.call.waiting_since_s = self._clock()
        return bool(super()._handle_stopped_request(request))

    # -- charging and reporting

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        if scheduler_output.total_num_scheduled_tokens > 0:
            self._has_changed |= self._charges.step_ended(scheduler_output, self._clock())
        copied = model_runner_output.kv_connector_output
        if self._swap is not None and copied is not None and copied.invalid_block_ids:
            self._void_loads(self._swap, copied.invalid_block_ids)
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        to_tell = self._to_tell
        for client_outputs in outputs.values() if to_tell or self._left else ():
            for output in client_outputs.outputs:
                if output.finish_reason is not None or output.request_id in to_tell:
                    self._attach_account(output)
                # Other outputs may never reach a caller, and other clients' callers are not told of the engine.
                if self._swap is not None and self._has_own_client and output.finish_reason is not None:
                    output.kv_transfer_params = attach(output.kv_transfer_params, self._swap.stats())
        self._left.clear()
        return outputs

    def _void_loads(self, swap: HostStore, invalid: set[int]) -> None:
        """Blocks could not be loaded: compute again what has been computed from them."""
        calls, readers, void = void_calls(invalid, self.running, self.kv_cache_manager, swap.readers)
        for request in calls:
            self.running.remove(request)
            self._preempt_request(request, time.monotonic(), drop_stale_output=True)
            self.prev_step_scheduled_req_ids.discard(request.request_id)
        for key in sorted(readers):
            if (call := self.requests.get(key)) is not None and call.num_stale_output_tokens:
                call.drop_stale_output = True  # it was preempted since, and its token is on the way
        self.kv_cache_manager.evict_blocks(void)
        invalid.clear()

    def _attach_account(self, output: EngineCoreOutput) -> None:
        """Attach a call's account so far to its output.

        The first output after a wait has it, and the last one. A call that a stop string ends in the host process has
        no last output here, so each of its outputs has it.
        """
        key = output.request_id
        entry, request = self._entries.get(key), self.requests.get(key)
        if entry is not None:  # others were settled when they left
            self._charges.settle(key)
        ledger = entry.ledger if entry is not None else self._left.get(key)
        if ledger is not None:
            output.kv_transfer_params = attach(output.kv_transfer_params, encode_account(ledger.account()))
        params = request.sampling_params if request is not None else None
        if params is None or not params.stop:
            self._to_tell.discard(key)
