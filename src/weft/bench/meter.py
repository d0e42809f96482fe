"""Measures a scheduler, vLLM's or Weft's, through a thin subclass that is the same for both."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from weft.bench.clock import Clock
from weft.bench.results.records import RoundCounts
from weft.bench.settings import BLOCK_TOKENS
from weft.core.policies import Policy
from weft.core.sim.settings import StepSample
from weft.engine.kv_cache.connector import StepPlan
from weft.engine.vllm_compat.names import Request, SchedulerOutput


class Meter:
    """Counts an engine's work from the batches that its scheduler hands to the model."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Set everything to 0. No call may be in flight."""
        self.counts = RoundCounts()
        self.samples: list[StepSample] = []
        self._computed: dict[str, int] = {}  # by request: the most tokens that it has had in the KV cache
        self._blocks: dict[str, set[Any]] = {}  # by program: the hashes of the blocks that it has had in the KV cache
        self._step: tuple[int, int, int] | None = None  # decode, prefill and context tokens of the step under way
        self._copied_tokens = 0  # in the step under way
        self._calls = 0, 0  # that wait during the step under way, and that are in it
        self._scheduling_s = self._copying_s = 0.0  # in the step under way

    def note_scheduled(self, output: SchedulerOutput, requests: Mapping[str, Request], schedule_s: float) -> None:
        """A step has been scheduled, in so many seconds."""
        counts = self.counts
        counts.schedule_s += schedule_s
        self._scheduling_s += schedule_s
        self._calls = len(requests) - len(output.num_scheduled_tokens), len(output.num_scheduled_tokens)
        for request_id in output.finished_req_ids:
            self._computed.pop(request_id, None)
        for request in output.scheduled_new_reqs:
            counts.calls += 1
            counts.prompt_tokens += len(request.prompt_token_ids or ())
            counts.cached_tokens += request.num_computed_tokens
        if not output.total_num_scheduled_tokens:
            return
        decode = prefill = context = 0
        for request_id, present in _present_tokens(output):
            tokens = output.num_scheduled_tokens[request_id]
            before = self._computed.get(request_id, 0)
            counts.computed_tokens += tokens
            counts.recomputed_tokens += self._recomputed(requests[request_id], present, tokens)
            self._computed[request_id] = max(before, present + tokens)
            if tokens == 1:
                decode += 1
                context += present + 1
            else:
                prefill += tokens
                context += present
        counts.steps += 1
        self._step = decode, prefill, context
        self._copied_tokens = copied_blocks(output) * BLOCK_TOKENS

    def _recomputed(self, request: Request, present: int, tokens: int) -> int:
        """How many of the tokens that a step computes for a request, after those present, its program had computed
        before: the request itself, or in full blocks another one. vLLM shares full blocks only.
        """
        program = request.request_id.partition("-")[0]
        known, hashes = self._blocks.setdefault(program, set()), request.block_hashes
        ends = present + tokens
        own = min(max(self._computed.get(request.request_id, 0), present), ends)
        found = own - present
        for number in range(present // BLOCK_TOKENS, min(-(-ends // BLOCK_TOKENS), len(hashes))):
            begin, end = number * BLOCK_TOKENS, (number + 1) * BLOCK_TOKENS
            if hashes[number] in known:
                found += max(0, min(end, ends) - max(begin, own))
            elif end <= ends:
                known.add(hashes[number])
        return found

    def note_updated(self, update_s: float) -> None:
        """The scheduler has processed a step's output, in so many seconds."""
        self.counts.update_s += update_s
        self._scheduling_s += update_s

    def note_copied(self, copy_s: float) -> None:
        """KV has been copied between the KV cache and host memory, in so many seconds."""
        self._copying_s += copy_s

    def end_step(self, step_s: float) -> None:
        """The engine's step has ended, after so many seconds."""
        counts, (waiting, running) = self.counts, self._calls
        counts.waiting_steps += waiting
        counts.running_steps += running
        counts.waiting_s += waiting * step_s
        counts.copying_s += running * self._copying_s
        counts.scheduling_s += running * self._scheduling_s
        counts.computing_s += running * (step_s - self._copying_s - self._scheduling_s)
        self._calls, self._scheduling_s, self._copying_s = (0, 0), 0.0, 0.0
        if self._step is not None:
            self.samples.append(StepSample(*self._step, step_s, self._copied_tokens))
            self._step = None


def copied_blocks(output: SchedulerOutput) -> int:
    """The blocks that a step copies to host memory or back."""
    metadata = output.kv_connector_metadata
    if not isinstance(metadata, StepPlan):
        return 0
    plan = metadata.plan
    return sum(len(batch.slots) for batch in (plan.out, plan.spill, *plan.loads, plan.fetch))


def _present_tokens(output: SchedulerOutput) -> Iterator[tuple[str, int]]:
    """The requests of a step, each with the number of its tokens that were in the KV cache before the step."""
    for request in output.scheduled_new_reqs:
        yield request.req_id, request.num_computed_tokens
    cached = output.scheduled_cached_reqs
    yield from zip(cached.req_ids, cached.num_computed_tokens, strict=True)


def timed(copies: Callable[..., Any], meter: Meter, clock: Clock) -> Callable[..., Any]:
    """A method of the worker's connector that reports to a meter how long it took by a clock."""

    def timed_copies(*args: Any, **kwargs: Any) -> Any:
        began_s = clock.timer()
        result = copies(*args, **kwargs)
        meter.note_copied(clock.timer() - began_s)
        return result

    return timed_copies


def metered(base: Any, meter: Meter, clock: Clock, *, is_weft: bool) -> Any:
    """A subclass of scheduler class `base` that reports to a meter and a clock.

    `is_weft` says whether `base` is Weft's scheduler, which then takes its time from `clock`.
    """

    class Metered(base):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            if is_weft:
                self.set_clock(lambda: clock.now_s)

        def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
            began_s = clock.timer()
            output = super().schedule(*args, **kwargs)
            meter.note_scheduled(output, self.requests, clock.timer() - began_s)
            clock.note_scheduled()
            return output

        def update_from_output(self, *args: Any, **kwargs: Any) -> Any:
            began_s = clock.timer()
            outputs = super().update_from_output(*args, **kwargs)
            meter.note_updated(clock.timer() - began_s)
            return outputs

        def _preempt_request(self, request: Request, *args: Any, **kwargs: Any) -> None:
            meter.counts.preemptions += 1
            super()._preempt_request(request, *args, **kwargs)

        def reset_weft(self, policy: Policy) -> None:
            """Forget all calls and programs that Weft's idle scheduler has seen, and go on with a new policy object."""
            self.use_policy(policy)
            self.set_clock(lambda: clock.now_s)

    return Metered
