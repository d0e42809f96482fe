"""Charging the calls of a step: what the step took, and what work it did for each call."""

from __future__ import annotations

import heapq
import math
from collections import defaultdict, deque
from collections.abc import Mapping
from typing import Final, NamedTuple

from weft.core.policies import Policy
from weft.core.policies.queues import Levels
from weft.core.policies.steps import FIT_STEPS, StepCostFit
from weft.engine.kv_cache.order import KvOrder
from weft.engine.kv_cache.store import HostStore
from weft.engine.scheduler.batch import recomputes
from weft.engine.scheduler.ledger import Entry
from weft.engine.vllm_compat.names import Request, SchedulerOutput

_MOST_LEFT: Final = 64  # entries of a heap that are out of date


class PromptPart(NamedTuple):
    """What a step computes for a call whose known tokens are not all in the KV cache yet."""

    prompt_tokens: int  # of the prompt, computed for the first time by the program
    new_tokens: int  # computed for the first time
    is_last: bool  # the step also generates a token


class Step(NamedTuple):
    """An engine step under way."""

    scheduled_at_s: float
    prompts: dict[str, PromptPart]  # by request; the others generate tokens


class StepCharges:
    """Charges each call of a step with the step's time, and the policy with the work.

    Where ranks do not follow the time that calls have run, most steps of most calls only decode and tell the policy
    nothing. A call is charged for these together when it is due (`Call.charge_at_tokens`), or leaves (`settle`).

    Steps overlap under asynchronous scheduling. A step's time therefore runs from its schedule or from the end of the
    step before it, whichever is later.

    Args:
        in_flight: The steps under way, first in, first out. They outlive the policy: the calls of a step may all have
            been aborted when the scheduler begins with another one.
        token_s: The service that a new token counts for, in seconds; None to count time.

    Attributes:
        rank_changed: Whether a charge has changed the rank of a call. The caller sets it back.
    """

    def __init__(
        self,
        entries: Mapping[str, Entry],
        requests: Mapping[str, Request],
        policy: Policy,
        kv_order: KvOrder,
        in_flight: deque[Step],
        *,
        token_s: float | None,
        swap: HostStore | None,
    ) -> None:
        self._entries = entries
        self._requests = requests
        self._policy = policy
        self._kv_order = kv_order
        self._token_s = token_s
        self._swap = swap
        self._in_flight = in_flight
        self._prompts: dict[str, PromptPart] = {}  # of the step that is being formed
        self._updated_at_s = -math.inf
        self._steps = 0
        # The requests whose steps are charged together: by request, the service in decoding steps when that began, and
        # its number. When each is due, as a heap: the decoding step, the number, and the request.
        self._decoding: dict[str, tuple[float, int]] = {}
        self._due: list[tuple[float, int, str]] = []
        self._decoding_steps = self._begun = 0
        self._decoding_s = 0.0  # the service of a call that was in all of these steps
        self._fit = StepCostFit()
        self.levels = Levels()
        self.rank_changed = False

    def note_prompt(self, request: Request, entry: Entry, scheduled_tokens: int) -> None:
        """The step that is being formed computes known tokens of a request. vLLM counts them as computed already."""
        computed = request.num_computed_tokens
        before = max(entry.computed_tokens, computed - scheduled_tokens)
        prompt_tokens = max(0, min(computed, entry.call.prompt_tokens) - max(before, entry.known_tokens))
        part = PromptPart(prompt_tokens, max(0, computed - before), not request.is_prefill_chunk)
        self._prompts[request.request_id] = part
        entry.computed_tokens = max(computed, entry.computed_tokens)
        entry.computes_prompt = not part.is_last

    def step_formed(self, output: SchedulerOutput, now_s: float) -> None:
        """A step was formed, and its prompts have been noted."""
        if output.total_num_scheduled_tokens > 0:
            self._in_flight.append(Step(now_s, self._prompts))
        self._prompts = {}

    def step_ended(self, output: SchedulerOutput, now_s: float) -> bool:
        """The outputs of a step are there, and vLLM has not read them yet. Returns whether the policy was told of work
        or costs."""
        step = self._in_flight.popleft()
        step_s = now_s - max(step.scheduled_at_s, self._updated_at_s)
        self._updated_at_s = now_s
        self._steps += 1
        has_charged = self._observe(output, step, step_s)
        scheduled, decoding = output.num_scheduled_tokens, self._decoding
        self._settle_due(scheduled, has_drafts=bool(output.scheduled_spec_decode_tokens))
        others = [request_id for request_id in scheduled if request_id not in decoding]
        self._decoding_s += step_s if self._token_s is None else self._token_s
        served: defaultdict[int, float] = defaultdict(float)  # seconds, by queue
        # This is done for each call in each step, so what does not change is read once.
        entry_of, requests, prompts, token_s = self._entries.get, self._requests, step.prompts, self._token_s
        charge, follows_time = self._policy.charge, self._policy.ranks_follow_time
        for request_id in others:
            entry = entry_of(request_id)
            if entry is None:  # aborted while the step ran
                continue
            scheduled_tokens = scheduled[request_id]
            request, part = requests[request_id], prompts.get(request_id) if prompts else None
            call, ledger, service_s = entry.call, entry.ledger, step_s
            if token_s is not None:
                service_s = (scheduled_tokens if part is None else part.new_tokens) * token_s
                ledger.service_s += service_s
                served[call.rank.level] += service_s
            elif ledger.last_step != self._steps:
                ledger.last_step = self._steps
                ledger.service_s += step_s
                served[call.rank.level] += step_s
            if part is not None:
                call.computed_tokens += part.prompt_tokens
            else:
                call.output_tokens = request.num_output_tokens + 1
                if not follows_time and call.output_tokens < call.charge_at_tokens:
                    if scheduled_tokens == 1 and ledger.sequences == 1:
                        self._charge_later(request_id, call.charge_at_tokens - call.output_tokens)
                    continue
            has_charged = True
            rank = call.rank
            recomputed = request.num_preemptions > 0 and recomputes(request, entry)
            charge(call, service_s, now_s, recomputed=recomputed)
            if call.rank is not rank:
                self.rank_changed = True
            if part is not None and part.is_last:
                call.output_tokens = request.num_output_tokens + 1
        for level, level_s in served.items():
            self.levels.served(level, level_s)
        return has_charged

    def _charge_later(self, request_id: str, steps: float) -> None:
        """Charge a request for its next steps together, after `steps` steps at the latest."""
        self._begun += 1
        self._decoding[request_id] = self._decoding_s, self._begun
        if steps < math.inf:
            heapq.heappush(self._due, (self._decoding_steps + steps, self._begun, request_id))
        if len(self._due) > 2 * len(self._decoding) + _MOST_LEFT:  # many have left before they were due
            self._due = [each for each in self._due if self._is_decoding(each)]
            heapq.heapify(self._due)

    def _is_decoding(self, due: tuple[float, int, str]) -> bool:
        _, number, request_id = due
        return request_id in self._decoding and self._decoding[request_id][1] == number

    def _settle_due(self, scheduled: Mapping[str, int], *, has_drafts: bool) -> None:
        """A step has ended. Settle the requests that were not in it, and those that it is to charge on its own."""
        self._decoding_steps += 1
        for request_id in [each for each in self._decoding if has_drafts or each not in scheduled]:
            self.settle(request_id)
        while self._due and self._due[0][0] <= self._decoding_steps:
            due = heapq.heappop(self._due)
            if self._is_decoding(due):
                self.settle(due[-1])

    def settle(self, request_id: str) -> None:
        """Charge a request for the steps that were to be charged together. Call it before the request leaves the batch,
        and before anybody reads what its call has had."""
        began = self._decoding.pop(request_id, None)
        if began is None:
            return
        entry, owed_s = self._entries[request_id], self._decoding_s - began[0]
        entry.call.output_tokens = self._requests[request_id].num_output_tokens
        entry.ledger.service_s += owed_s
        self.levels.served(entry.call.rank.level, owed_s)

    def settle_all(self) -> None:
        """Settle all requests."""
        for request_id in list(self._decoding):
            self.settle(request_id)

    def _observe(self, output: SchedulerOutput, step: Step, step_s: float) -> bool:
        scheduled, total = output.num_scheduled_tokens, output.total_num_scheduled_tokens
        if self._swap is not None:
            self._swap.choice.observe_step(total, step_s)
        prompt_tokens = sum(scheduled[request_id] for request_id in step.prompts)
        self._fit.observe(len(scheduled) - len(step.prompts), prompt_tokens, step_s)
        if self._steps % FIT_STEPS or (costs := self._fit.costs()) is None:
            return False
        self._policy.on_event(costs)
        self._kv_order.use_prefill_speed(costs.prefill_token_s)
        return True
