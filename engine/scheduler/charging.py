"""Charging the calls of a step: what the step took, and what work it did for each call."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Mapping
from typing import NamedTuple

from weft.core.policies import Policy
from weft.core.policies.queues.levels import Levels
from weft.core.policies.steps.cost_fit import StepCostFit
from weft.core.policies.steps.costs import FIT_STEPS, StepCosts
from weft.engine.kv_cache.store import HostStore
from weft.engine.scheduler.batch import recomputes
from weft.engine.scheduler.ledger import Entry
from weft.engine.vllm_compat.names import Request, SchedulerOutput


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

    Where ranks do not follow the time that calls have run, steps that decode the same calls as the step before are
    charged together once anything else happens (`settle`).

    Steps overlap under asynchronous scheduling. A step's time therefore runs from its schedule or from the end of the
    step before it, whichever is later.

    Args:
        entries: The requests under way.
        requests: vLLM's requests.
        policy: The policy.
        token_s: The service that a new token counts for, in seconds; None to count time.
        swap: It learns the speed of steps; None if KV is not swapped.

    Attributes:
        costs: What steps cost, as last fitted.
        levels: Wait and service by queue.
        rank_changed: Whether a charge has changed the rank of a call, and nobody has asked since.
        has_charged: Whether the policy was told of work or costs, and nobody has asked since.
    """

    def __init__(
        self,
        entries: Mapping[str, Entry],
        requests: Mapping[str, Request],
        policy: Policy,
        token_s: float | None,
        swap: HostStore | None,
    ) -> None:
        self._entries = entries
        self._requests = requests
        self._policy = policy
        self._token_s = token_s
        self._swap = swap
        self._in_flight: deque[Step] = deque()  # first in, first out
        self._prompts: dict[str, PromptPart] = {}  # of the step that is being formed
        self._updated_at_s = -math.inf
        self._steps = 0
        self._latest: dict[str, int] = {}  # the tokens of the latest step by request, if further steps may repeat it
        self._repeats: float = 0  # how many may, before the policy has to be told of a call's work
        self._repeated = 0  # how many did since it was told
        self._owed_s = 0.0  # the service of these
        self._fit = StepCostFit()
        self.costs = StepCosts()
        self.levels = Levels()
        self.rank_changed = False
        self.has_charged = False

    def take_rank_changed(self) -> bool:
        """Whether the rank of a call has changed since the last question."""
        changed, self.rank_changed = self.rank_changed, False
        return changed

    def take_has_charged(self) -> bool:
        """Whether the policy was told of work or costs since the last question."""
        charged, self.has_charged = self.has_charged, False
        return charged

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

    def step_ended(self, output: SchedulerOutput, now_s: float) -> None:
        """The outputs of a step are there, and vLLM has not read them yet."""
        step = self._in_flight.popleft()
        step_s = now_s - max(step.scheduled_at_s, self._updated_at_s)
        self._updated_at_s = now_s
        self._steps += 1
        self._observe(output, step, step_s)
        if self._repeats > 0 and not step.prompts and output.num_scheduled_tokens == self._latest:
            self._repeats -= 1
            self._repeated += 1
            self._owed_s += step_s if self._token_s is None else self._token_s
            return
        self.settle()
        served: defaultdict[int, float] = defaultdict(float)  # seconds, by queue
        # This is done for each call in each step, so what does not change is read once.
        entry_of, requests, prompts, token_s = self._entries.get, self._requests, step.prompts, self._token_s
        charge, follows_time = self._policy.charge, self._policy.ranks_follow_time
        repeats: float = math.inf
        for request_id, scheduled_tokens in output.num_scheduled_tokens.items():
            entry = entry_of(request_id)
            if entry is None:  # aborted while the step ran
                repeats = 0
                continue
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
                    repeats = min(repeats, call.charge_at_tokens - call.output_tokens - 1)
                    continue
            repeats = 0
            self.has_charged = True
            rank = call.rank
            recomputed = request.num_preemptions > 0 and recomputes(request, entry)
            charge(call, service_s, now_s, recomputed=recomputed)
            if call.rank is not rank:
                self.rank_changed = True
            if part is not None and part.is_last:
                call.output_tokens = request.num_output_tokens + 1
        for level, level_s in served.items():
            self.levels.served(level, level_s)
        if repeats > 0 and output.total_num_scheduled_tokens == len(output.num_scheduled_tokens):
            self._latest, self._repeats = output.num_scheduled_tokens, repeats

    def settle(self) -> None:
        """Charge the calls of the latest steps for what is owed. Call it before a call leaves the batch, and before
        anybody reads what calls have had."""
        owing, owed_s = self._latest if self._repeated else {}, self._owed_s
        self._latest, self._repeats, self._repeated, self._owed_s = {}, 0, 0, 0.0
        settled: set[int] = set()  # ledgers that several requests share
        for request_id in owing:
            entry = self._entries[request_id]
            entry.call.output_tokens = self._requests[request_id].num_output_tokens
            if self._token_s is not None or id(entry.ledger) not in settled:
                settled.add(id(entry.ledger))
                entry.ledger.service_s += owed_s
                self.levels.served(entry.call.rank.level, owed_s)

    def _observe(self, output: SchedulerOutput, step: Step, step_s: float) -> None:
        scheduled, total = output.num_scheduled_tokens, output.total_num_scheduled_tokens
        if self._swap is not None:
            self._swap.choice.observe_step(total, step_s)
        prompt_tokens = sum(scheduled[request_id] for request_id in step.prompts)
        self._fit.observe(len(scheduled) - len(step.prompts), prompt_tokens, step_s)
        if self._steps % FIT_STEPS == 0 and (costs := self._fit.costs()) is not None:
            self.costs = costs
            self.has_charged = True
            self._policy.use_costs(costs)
