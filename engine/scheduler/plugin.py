"""Weft's scheduler: a `scheduler_cls` plugin for stock vLLM.

It decides the order of calls by a `weft.core.policies` object and leaves batching, KV blocks and outputs to vLLM. Use
it through `weft.Engine`, or on its own::

    vllm serve MODEL --scheduler-cls weft.engine.scheduler.WeftScheduler \\
        --additional-config '{"weft": {"name": "atlas", "bounds_s": [1, 4, 16], "beta": 8}}'

A request names its program in `vllm_xargs` (`program_id`, and optionally `thread_id`, `call_id`, `parents` and what the
program has attained; see `weft.engine.wire`), or by its `session_id`; one that names none is its own program.
`weft.engine.server.check_ids.CheckIds` has the server refuse malformed ones.
"""

from __future__ import annotations

import time
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

from weft.core.errors import PolicyError
from weft.core.ids import CallId, ProgramId
from weft.core.policies import PolicyConfig
from weft.core.policies.base import Call
from weft.core.process_table import Attained
from weft.engine.kv_cache.connector import SwapConnector
from weft.engine.processes.host import end_with_parent
from weft.engine.scheduler.ledger import Entry, Ledger, Program, Step
from weft.engine.scheduler.queue import PolicyQueue
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
from weft.engine.wire import ABORTED_KEY, ACCOUNT_KEY, SWAP_KEY, decode_call

# Programs without a call here are remembered, for clients that send ids but no numbers; this many, the latest used.
_REMEMBERED_PROGRAMS: Final = 10_000


class WeftScheduler(AsyncScheduler):
    """Orders waiting and running calls by program (Autellix, Algorithm 1)."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config = dict((self.vllm_config.additional_config or {}).get("weft", {}))
        if isinstance(config.get("bounds_s"), list):
            config["bounds_s"] = tuple(config["bounds_s"])
        # Behind a server, a client must not be told of the calls of others, and the server looks after its processes.
        self._has_own_client = bool(config.pop("one_client", False))
        if self._has_own_client:
            end_with_parent()
        try:
            policy = PolicyConfig(**config)
        except TypeError as error:
            raise PolicyError(f"the scheduler's configuration has an entry that it does not know: {error}") from None
        self.weft_policy = policy.make()
        self._decide_every = policy.decide_every
        self._token_s = policy.token_s
        self._overlaps = bool(self.vllm_config.scheduler_config.async_scheduling)
        connector = self.connector
        self._swap = connector.planner if isinstance(connector, SwapConnector) else None
        self._steps_to_decision = 0
        self._clock: Callable[[], float] = time.monotonic
        self.waiting = PolicyQueue(self.weft_policy, self._call_of, self._now_s)
        self._programs: dict[ProgramId, Program] = {}
        self._idle: OrderedDict[ProgramId, Attained] = OrderedDict()
        # Clients choose call ids, and two programs may choose the same.
        self._ledgers: dict[tuple[ProgramId, CallId], Ledger] = {}
        self._entries: dict[str, Entry] = {}
        self._left: dict[str, Ledger] = {}  # of requests that left since the last outputs
        self._aborted: dict[int, dict[CallId, Any]] = defaultdict(dict)  # accounts to tell each of vLLM's clients
        self._in_flight: deque[Step] = deque()  # first in, first out
        self._updated_at_s = self._clock()
        self._step = 0

    def set_clock(self, clock: Callable[[], float]) -> None:
        """Take seconds from `clock`, before the first request. vLLM makes schedulers itself and would pass none in."""
        self._clock = clock
        self._updated_at_s = clock()

    def _now_s(self) -> float:
        return self._clock()

    def _call_of(self, request: Request) -> Call:
        return self._entries[request.request_id].call

    def check_integrity(self) -> None:
        """Assert that every request is in one place and that the sums agree. For tests.

        Raises:
            AssertionError: they do not; the message names what disagrees.
        """
        running = {request.request_id for request in self.running}
        waiting = {call.key for call in self.weft_policy.waiting}
        held = {request.request_id for request in self.kv_holding_waiting}
        checks = {
            "a request is in two queues": not (running & waiting or running & held or waiting & held),
            "a request is lost": running | waiting | held == set(self.requests) == set(self._entries),
            "the queue and the policy disagree": {request.request_id for request in self.waiting} == waiting,
            "a running mark is wrong": running == {key for key, entry in self._entries.items() if entry.running},
            "a place is taken twice": len({e.call.rank for e in self._entries.values()}) == len(self._entries),
            "a level has no queue": all(self.weft_policy.has_level(e.call.rank.level) for e in self._entries.values()),
            "a quantum was used up": all(e.call.quantum_s > 0 for e in self._entries.values()),
            "a program's calls do not add up": sum(p.calls for p in self._programs.values()) == len(self._entries),
            "a call's samples do not add up": sum(x.sequences for x in self._ledgers.values()) == len(self._entries),
            "a ledger's running count is wrong": sum(x.running for x in self._ledgers.values()) == len(running),
        }
        failed = [what for what, holds in checks.items() if not holds]
        if failed:
            raise AssertionError("; ".join(failed))
        if self._swap is not None:
            self._swap.check_integrity()

    # -- arrival and departure

    def add_request(self, request: Request) -> None:
        if request.request_id not in self._entries:  # else the next input of a streaming session
            self._open(request)
        super().add_request(request)

    def _open(self, request: Request) -> None:
        params = request.sampling_params
        identity, attained = decode_call(
            params.extra_args if params is not None else None, request.request_id, request.session_id
        )
        program = self._programs.get(identity.program_id)
        if program is None:
            known = self._idle.pop(identity.program_id, None) or Attained()
            program = self._programs[identity.program_id] = Program(known)
        program.attained.merge(attained)
        self.weft_policy.program_changed(program.attained)
        program.calls += 1
        key = identity.program_id, identity.call_id
        ledger = self._ledgers.get(key)
        if ledger is None:
            ledger = self._ledgers[key] = Ledger(
                identity.call_id, identity.program_id, replace(program.attained), self._clock()
            )
        ledger.sequences += 1
        self._entries[request.request_id] = Entry(Call(request.request_id, program.attained), ledger)

    def _free_request(self, request: Request, delay_free_blocks: bool = False) -> Any:
        entry = self._entries.pop(request.request_id, None)
        if entry is not None:
            self._close(request, entry)
        return super()._free_request(request, delay_free_blocks)

    def _close(self, request: Request, entry: Entry) -> None:
        request_id, ledger = request.request_id, entry.ledger
        if entry.running:
            ledger.stop(self._clock())
        elif ledger.running == 0:  # aborted, or finished while preempted: its last wait counts too
            ledger.wait_s += self._clock() - ledger.waiting_since_s
            ledger.waiting_since_s = self._clock()
        self.weft_policy.leave(entry.call)
        self._left[request_id] = ledger
        program = self._programs[ledger.program_id]
        ledger.sequences -= 1
        if ledger.sequences == 0:
            del self._ledgers[ledger.program_id, ledger.call_id]
            program.attained.fold(ledger.inherited, ledger.account())
            if self._has_own_client and request.status == RequestStatus.FINISHED_ABORTED:
                self._aborted[request.client_index][ledger.call_id] = ledger.encode()
            self.weft_policy.program_changed(program.attained)
        program.calls -= 1
        if program.calls == 0:
            del self._programs[ledger.program_id]
            if ledger.program_id != request_id:  # else it is a request without ids, and will not come again
                self._idle[ledger.program_id] = program.attained
                if len(self._idle) > _REMEMBERED_PROGRAMS:
                    self._idle.popitem(last=False)

    # -- one step

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        now_s = self._clock()
        # vLLM takes running[-1] as its victim when KV blocks run out inside the step.
        if len(self.running) > 1:
            self.running.sort(key=lambda request: self._entries[request.request_id].call.rank)
        # Between decisions vLLM still gives the slot of a call that ends to the first that waits.
        if self._steps_to_decision == 0:
            self._steps_to_decision = self._decide_every
            self.weft_policy.promote(now_s)
            if self.pause_state == PauseState.UNPAUSED:
                self._preempt_outranked()
        self._steps_to_decision -= 1
        output = super().schedule(throttle_prefills)
        for request in self.running:
            entry = self._entries[request.request_id]
            if not entry.running:  # vLLM has just admitted it
                entry.running = True
                entry.output_tokens = request.num_output_tokens
                if request.num_preemptions > 0:
                    self._count_resumption(request, entry, output)
                entry.ledger.start(now_s)
                self.weft_policy.start(entry.call, now_s)
        if output.total_num_scheduled_tokens > 0:
            self._in_flight.append(Step(now_s, None if self._token_s is None else self._new_tokens(output)))
        return output

    def _count_resumption(self, request: Request, entry: Entry, output: SchedulerOutput) -> None:
        kept = request.num_computed_tokens - output.num_scheduled_tokens.get(request.request_id, 0)
        entry.ledger.recomputed_tokens += max(0, entry.lost_tokens - kept)
        if self._swap is not None:
            entry.ledger.swapped_tokens += self._swap.loaded_tokens(request.request_id)

    def _new_tokens(self, output: SchedulerOutput) -> dict[str, int]:
        new = {}
        for request_id, count in output.num_scheduled_tokens.items():
            entry, computed = self._entries[request_id], self.requests[request_id].num_computed_tokens
            new[request_id] = min(count, max(0, computed - entry.computed_tokens))
            entry.computed_tokens = max(computed, entry.computed_tokens)
        return new

    def _preempt_outranked(self) -> None:
        """Make room where calls of higher queues wait (Alg. 1 lines 32-39)."""
        if not self.waiting or not self.running:
            return
        if self.weft_policy.waiting.peek().rank > self._call_of(self.running[-1]).rank:
            return  # the usual case: the first that waits outranks nobody, so none does
        running = [(request, self._entries[request.request_id]) for request in self.running]
        victims = self.weft_policy.victims(
            [entry.call for request, entry in running if not self._recomputes(request, entry)],
            self.max_num_active_reqs - len(self.running) - self.num_waiting_for_streaming_input,
            ready=self._is_ready,
            free_blocks=self.kv_cache_manager.block_pool.get_num_free_blocks(),
            blocks=self._blocks_of,
        )
        for call in victims:
            self.force_out(self.requests[call.key])

    def force_out(self, request: Request) -> None:
        """Preempt a running request, before the next step is formed."""
        self.running.remove(request)
        self._preempt_request(request, time.monotonic())
        self.prev_step_scheduled_req_ids.discard(request.request_id)

    @staticmethod
    def _recomputes(request: Request, entry: Entry) -> bool:
        """Whether a resumed call has not got further yet. It is let be until it has: where rebuilding the KV cache
        takes longer than a quantum, calls would else preempt each other for ever."""
        return request.num_preemptions > 0 and request.num_output_tokens <= entry.output_tokens

    def _blocks_of(self, call: Call) -> int:
        """KV blocks that a running call holds, or that a waiting one needs for what it has so far."""
        request = self.requests[call.key]
        held = sum(len(group) for group in self.kv_cache_manager.get_block_ids(call.key))
        return held or -(-request.num_tokens // self.block_size)

    def _is_ready(self, call: Call) -> bool:
        """Whether a waiting call could start in this step; vLLM asks the same as it admits."""
        request = self.requests[call.key]
        if request.num_stale_output_tokens and not request.drop_stale_output:
            return False
        return bool(self._handle_blocked_waiting_request(request))

    def _preempt_request(self, request: Request, timestamp: float, drop_stale_output: bool = False) -> None:
        entry = self._entries[request.request_id]
        now_s = self._clock()
        if entry.running:
            entry.running = False
            entry.ledger.stop(now_s)
        entry.ledger.preemptions += 1
        # Of a step in flight, only what is computed from known tokens is sure to stay.
        entry.lost_tokens = min(request.num_computed_tokens, request.num_tokens)
        self._save_kv(request, entry.lost_tokens, is_void=drop_stale_output)
        self.weft_policy.preempt(entry.call, now_s)
        super()._preempt_request(request, timestamp, drop_stale_output)

    def _save_kv(self, request: Request, tokens: int, *, is_void: bool) -> None:
        """Have the KV of a victim swapped out, before vLLM frees its blocks. The next step copies it, after whatever
        is in flight has written to it."""
        if self._swap is None:
            return
        if is_void:  # the prefix cache is being reset
            self._swap.release(request.request_id)
        elif not request.skip_reading_prefix_cache:  # vLLM would not let it load
            blocks = self.kv_cache_manager.get_block_ids(request.request_id)[0]
            self._swap.save(request.request_id, blocks, tokens, request.block_hashes)

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> bool:
        reset = bool(super().reset_prefix_cache(*args, **kwargs))
        if self._swap is not None:
            self._swap.reset()
        return reset

    def _handle_stopped_request(self, request: Request) -> bool:
        entry = self._entries.get(request.request_id)
        if request.resumable and entry is not None and entry.running:  # it goes on when its client sends more input
            entry.running = False
            entry.ledger.stop(self._clock())
            entry.call.waiting_since_s = self._clock()
        return bool(super()._handle_stopped_request(request))

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        if scheduler_output.total_num_scheduled_tokens > 0:
            self._charge(scheduler_output)
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        for client, client_outputs in outputs.items():
            for output in client_outputs.outputs:
                self._attach_account(output)
                if output.finish_reason is not None:  # others may never reach a caller
                    self._attach_news(output, client)
        self._left.clear()
        return outputs

    def _attach_news(self, output: EngineCoreOutput, client: int) -> None:
        """What only Weft's own front end is told, along with a call that ends: there is no other way to it."""
        if self._aborted[client]:
            _attach(output, ABORTED_KEY, self._aborted.pop(client))
        if self._swap is not None and self._has_own_client:
            _attach(output, SWAP_KEY, tuple(self._swap.stats()))

    # Where steps do not overlap, vLLM uses its plain scheduler, which keeps no placeholders for tokens in flight.

    def _update_after_schedule(self, scheduler_output: SchedulerOutput) -> None:
        if self._overlaps:
            super()._update_after_schedule(scheduler_output)
        else:
            super(AsyncScheduler, self)._update_after_schedule(scheduler_output)

    def _update_request_with_output(
        self, request: Request, new_token_ids: list[int], is_stale: bool = False
    ) -> tuple[list[int], bool]:
        if self._overlaps:
            return super()._update_request_with_output(request, new_token_ids, is_stale)
        return super(AsyncScheduler, self)._update_request_with_output(request, new_token_ids, is_stale)

    def _charge(self, scheduler_output: SchedulerOutput) -> None:
        """Charge each call of a step with the step's time. Steps overlap under asynchronous scheduling, so a step's
        time runs from its schedule or from the end of the step before it, whichever is later."""
        now_s = self._clock()
        scheduled_at_s, new_tokens = self._in_flight.popleft()
        step_s = now_s - max(scheduled_at_s, self._updated_at_s)
        self._updated_at_s = now_s
        self._step += 1
        if self._swap is not None:
            self._swap.choice.observe_step(scheduler_output.total_num_scheduled_tokens, step_s)
        for request_id in scheduler_output.num_scheduled_tokens:
            entry = self._entries.get(request_id)
            if entry is None:  # aborted while the step ran
                continue
            ledger, service_s = entry.ledger, step_s
            if new_tokens is not None and self._token_s is not None:
                service_s = new_tokens[request_id] * self._token_s
                ledger.service_s += service_s
            elif ledger.last_step != self._step:
                ledger.last_step = self._step
                ledger.service_s += step_s
            recomputed = self._recomputes(self.requests[request_id], entry)
            self.weft_policy.charge(entry.call, service_s, now_s, recomputed=recomputed)

    def _attach_account(self, output: EngineCoreOutput) -> None:
        """An output carries its call's account so far, not only the last one: a call may end in the front process, by
        a stop string or a closed stream, and then no last output comes."""
        entry = self._entries.get(output.request_id)
        ledger = entry.ledger if entry is not None else self._left.get(output.request_id)
        if ledger is not None:
            _attach(output, ACCOUNT_KEY, ledger.encode())


def _attach(output: EngineCoreOutput, key: str, value: Any) -> None:
    if output.kv_transfer_params is None:
        output.kv_transfer_params = {}
    output.kv_transfer_params[key] = value
