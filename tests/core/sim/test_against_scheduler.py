"""The simulator against the scheduler plugin on vLLM's scheduler, without a model: the same calls in every step."""

from __future__ import annotations

import heapq
import itertools
import math
import random
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from weft.core.ids import ProgramId
from weft.core.policies import PolicyConfig, StepCosts
from weft.core.policies.gate.gated import Gated
from weft.core.policies.policy import Policy, PolicyEvent
from weft.core.policies.view import KvSize
from weft.core.prediction.reuse import ReusedPart
from weft.core.sim import SimResult, SimSettings, StepTime, TraceCall, TraceProgram, simulate

pytestmark = pytest.mark.engine

SLOTS = 3
GATE_TOKENS = 400
STEP_COSTS = StepCosts(1.0, 0.0, 0.0)
CONFIGS: list[dict[str, Any]] = [
    {"name": "fcfs"},
    {"name": "rr", "quanta_s": (3.0,)},
    {"name": "mlfq", "bounds_s": (2.0, 5.0), "beta": 2.0},
    {"name": "plas", "bounds_s": (3.0, 7.0, 15.0), "beta": 1.5},
    {"name": "atlas", "bounds_s": (2.0, 5.0, 11.0), "beta": 1.0},
    {"name": "atlas", "bounds_s": (2.0, 5.0, 11.0), "beta": 1.0, "decide_every": 3},
    {"name": "atlas", "bounds_s": (4.0, 8.0, 20.0), "beta": 3.0, "token_s": 0.5},
    {"name": "learned"},
    {"name": "astraea", "thresholds_tokens": (20, 40), "tau": 2.0, "preempt": False},
    {"name": "astraea", "thresholds_tokens": (12, 24, 36), "tau": 100.0, "preempt": True},
    {"name": "fair", "inner": "fcfs", "weights": (("T0", 3.0),)},
    {"name": "fair", "inner": "atlas"},
    {"name": "fair", "inner": "learned"},
    {"name": "fair", "gate": False},
    {"name": "fair", "inner": "astraea", "decide_every": 2},
]


def workload(seed: int, output_tokens: tuple[int, int] = (1, 9), prompt_tokens: int = 40) -> list[TraceProgram]:
    """Twelve programs of three names and four tenants, most with deadlines, of up to eight calls with random parents,
    and prompts of up to `prompt_tokens` tokens. Gaps, which first calls do not have, and arrivals are whole seconds."""
    rng = random.Random(seed)
    programs = []
    for number in range(12):
        calls: list[TraceCall] = []
        for index in range(rng.randint(1, 8)):
            parents = rng.sample([call.call_id for call in calls], min(len(calls), rng.randint(0, 2)))
            gap_s = float(rng.choice((0, 0, 2)))
            output, prompt = rng.randint(*output_tokens), rng.randint(1, prompt_tokens)
            calls.append(TraceCall(f"c{index}", tuple(parents), output, prompt, gap_s if parents else 0.0))
        arrival_s, name = float(rng.randint(0, 40)), f"name-{number % 3}"
        deadline_s = 20.0 * (number % 4) or None
        programs.append(TraceProgram(f"P{number}", tuple(calls), arrival_s, name, f"T{number % 7 // 2}", deadline_s))
    return programs


def conversations(seed: int, reused: float = 1.0) -> list[TraceProgram]:
    """Twelve programs of up to six calls, which use a part of the context before them; every second gap is 2 s."""
    rng = random.Random(seed)
    programs = []
    for number in range(12):
        calls: list[TraceCall] = []
        context = 0
        for index in range(rng.randint(1, 6)):
            parents = (calls[-1].call_id,) if calls else ()
            shared = int(reused * context)
            prompt, output = context + rng.randint(5, 40), rng.randint(1, 9)
            gap_s = float(rng.choice((0, 2))) if parents else 0.0
            calls.append(TraceCall(f"c{index}", parents, output, prompt, gap_s, shared_prefix_tokens=shared))
            context = prompt + output
        programs.append(TraceProgram(f"P{number}", tuple(calls), float(rng.randint(0, 40)), f"name-{number % 3}"))
    return programs


class Contexts:
    """The prompts of calls, and what the harness's worker continues them with."""

    def __init__(self) -> None:
        self._contexts: dict[str, list[int]] = {}

    def prompt(self, name: str, call: TraceCall) -> list[int]:
        """A prompt that begins with the first parent's prompt and output, if the call shares them. Nothing else is
        shared."""
        from scheduler_harness import expected_output

        prompt = [len(self._contexts) + 1000] * call.prompt_tokens
        if call.shared_prefix_tokens:
            shared = call.shared_prefix_tokens
            prompt[:shared] = self._contexts[f"{name}/{call.parents[0]}"][:shared]
        self._contexts[f"{name}/{call.call_id}"] = prompt + expected_output(prompt, call.output_tokens)
        return prompt


def sent_with_calls(program: TraceProgram, now_s: float) -> dict[str, Any]:
    """What the front end sends of a program with each of its calls."""
    left_s = math.inf if program.deadline_s is None else max(0.0, program.arrival_s + program.deadline_s - now_s)
    return {
        "program_id": program.program,
        "program_name": program.name,
        "fingerprint": program.fingerprint,
        "tenant": program.tenant,
        "program_time_left_s": left_s,
    }


def _know_costs(policy: Policy) -> None:
    """Tell a policy the costs that the simulator knows. The fit of an engine is not exact."""
    on_event = policy.on_event

    def tell(event: PolicyEvent) -> None:
        on_event(replace(STEP_COSTS, slots=event.slots) if isinstance(event, StepCosts) else event)

    setattr(policy, "on_event", tell)  # noqa: B010


def schedule(
    programs: list[TraceProgram], config: dict[str, Any], folder: Path, **settings: Any
) -> tuple[list[set[str]], float, int]:
    """Serve programs with the plugin, at one second a step.
    Returns:
        The calls in the batch at each second, those without tokens in the step included, the end of the last call in
        seconds, and the number of preemptions.
    """
    from scheduler_harness import SchedulerHarness

    from weft.engine.wire.control import ProgramsEnded, encode_control

    harness = SchedulerHarness(folder, config, **{"slots": SLOTS, "batched_tokens": 1024, **settings})
    policy = harness.scheduler.weft_policy
    _know_costs(policy)
    begin_s = harness.clock()
    sequence = itertools.count()
    arrivals: list[tuple[float, int, str, TraceCall | None]] = []  # heap; None: the program arrives
    by_name = {program.program: program for program in programs}
    left = {program.program: len(program.calls) for program in programs}
    unfinished = {f"{p.program}/{call.call_id}": set(call.parents) for p in programs for call in p.calls}
    for program in programs:
        heapq.heappush(arrivals, (program.arrival_s, next(sequence), program.program, None))

    def start_gap(name: str, call: TraceCall, now_s: float) -> None:
        if call.gap_s:
            heapq.heappush(arrivals, (now_s + call.gap_s, next(sequence), name, call))
        else:
            add(name, call)

    def add(name: str, call: TraceCall) -> None:
        ids = {"call_id": call.call_id, **sent_with_calls(by_name[name], harness.clock() - begin_s)}
        prompt = contexts.prompt(name, call)
        harness.add(f"{name}/{call.call_id}", prompt=prompt, max_tokens=call.output_tokens, **ids)

    contexts = Contexts()
    steps: list[set[str]] = []
    while arrivals or harness.scheduler.has_unfinished_requests():
        now_s = harness.clock() - begin_s
        while arrivals and arrivals[0][0] <= now_s:
            _, _, name, arrived = heapq.heappop(arrivals)
            for call in by_name[name].calls if arrived is None else [arrived]:
                if arrived is not None:
                    add(name, call)
                elif not call.parents:
                    start_gap(name, call, now_s)
        if not harness.scheduler.has_unfinished_requests():
            steps.append(set())
            harness.clock.advance(1.0)
            continue
        finished_before = len(harness.finished)
        scheduled = harness.step()
        steps.append(scheduled | {request.request_id for request in harness.scheduler.running})
        for request_id in harness.finished[finished_before:]:
            name, ended = request_id.split("/")
            for call in by_name[name].calls:
                parents = unfinished[f"{name}/{call.call_id}"]
                if ended in parents:
                    parents.discard(ended)
                    if not parents:
                        start_gap(name, call, harness.clock() - begin_s)
            left[name] -= 1
            if not left[name]:
                harness.scheduler(encode_control(ProgramsEnded((ProgramId(name),))))
    preemptions = sum(account["preemptions"] for account in harness.accounts.values())
    return steps, harness.clock() - begin_s, preemptions


def simulated_steps(result: SimResult, count: int) -> list[set[str]]:
    """The calls in the simulated batch at each of `count` seconds."""
    steps: list[set[str]] = [set() for _ in range(count)]
    for execution in result.runs:
        for second in range(int(execution.start_s), int(execution.end_s)):
            steps[second].add(f"{execution.program}/{execution.call_id}")
    return steps


@pytest.mark.parametrize(
    ("chunk_tokens", "prompt_tokens"), [(1024, 40), (24, 150)], ids=["short prompts", "prompts in chunks"]
)
@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: "-".join(str(each) for each in config.values()))
def test_every_step_has_the_same_calls(
    config: dict[str, Any], chunk_tokens: int, prompt_tokens: int, tmp_path: Path
) -> None:
    """For five random workloads under each policy, simulator and plugin agree in every step, the end and the number of
    preemptions. They also divide the steps alike, where prompts take several steps and displace each other."""
    settings = SimSettings(
        policy=PolicyConfig(**config),
        batch_size=SLOTS,
        chunk_tokens=chunk_tokens,
        kv_tokens=math.inf,
        prefix_cache=False,
        step_time=StepTime(1.0, 0.0, 0.0, 0.0),
    )
    preempted = 0
    for seed in range(5):
        programs = workload(seed, prompt_tokens=prompt_tokens)
        steps, end_s, preemptions = schedule(programs, config, tmp_path, batched_tokens=chunk_tokens, blocks=400)
        result = simulate(programs, settings, runs=True)
        assert simulated_steps(result, len(steps)) == steps
        assert max(row.finish for row in result.programs.values()) == end_s
        assert result.counts.preemptions == preemptions
        preempted += preemptions
    assert preempted > 0 or config["name"] in ("fcfs", "fair") or not config.get("preempt", True)


@pytest.mark.parametrize(
    ("name", "reused"), [("fcfs", 1.0), ("atlas", 1.0), ("learned", 1.0), ("fair", 1.0), ("learned", 0.4)]
)
def test_a_gate_holds_back_the_same_calls(
    name: str, reused: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind the gate, for five random workloads of conversations, simulator and plugin agree in every step. The gate
    is told of a KV cache that is too small for all. The real ones are larger, because vLLM counts in blocks. Calls that
    use a part of a context teach the gate to count no more of it."""
    on_event, part_of = Gated.on_event, ReusedPart.part

    def tell(gated: Gated, event: PolicyEvent) -> None:
        on_event(gated, KvSize(GATE_TOKENS) if isinstance(event, KvSize) else event)

    monkeypatch.setattr(Gated, "on_event", tell)
    parts: list[float] = []
    monkeypatch.setattr(ReusedPart, "part", lambda self, name: parts.append(part_of(self, name)) or parts[-1])
    from scheduler_harness import BLOCK_TOKENS

    own = {"bounds_s": (2.0, 5.0, 11.0), "beta": 1.0} if name == "atlas" else {}
    held = 0
    for seed in range(5):
        programs = conversations(seed, reused)
        config: dict[str, Any] = {"name": name, "gate": True, **own}
        steps, end_s, _ = schedule(programs, config, tmp_path, prefix_caching=True, blocks=400)
        ungated, _, _ = schedule(programs, config | {"gate": False}, tmp_path, prefix_caching=True, blocks=400)
        held += steps != ungated
        settings = SimSettings(
            policy=PolicyConfig(**config),
            batch_size=SLOTS,
            chunk_tokens=1024,
            kv_tokens=400 * BLOCK_TOKENS,
            block_tokens=BLOCK_TOKENS,
            step_time=StepTime(1.0, 0.0, 0.0, 0.0),
        )
        result = simulate(programs, settings, runs=True)
        assert simulated_steps(result, len(steps)) == steps
        assert max(row.finish for row in result.programs.values()) == end_s
    assert held > 0
    assert (min(parts) < 0.6) == (reused < 1)


@pytest.mark.parametrize(("name", "block_tokens"), [("fcfs", 1), ("fcfs", 16), ("atlas", 1), ("atlas", 16)])
def test_a_full_kv_cache_makes_similar_preemptions_and_ends(name: str, block_tokens: int, tmp_path: Path) -> None:
    """When the KV cache holds a third of the slots' calls, preemptions agree within 10 % and mean ends within 5 %.

    FCFS agrees exactly if the simulator counts blocks, too.
    """
    from scheduler_harness import BLOCK_TOKENS

    blocks, slots, chunk_tokens = 32, 8, 64
    config: dict[str, Any] = {"name": name} | ({} if name == "fcfs" else {"bounds_s": (10.0, 20.0, 40.0), "beta": 8.0})
    settings = SimSettings(
        policy=PolicyConfig(**config),
        batch_size=slots,
        chunk_tokens=chunk_tokens,
        kv_tokens=blocks * BLOCK_TOKENS,
        block_tokens=block_tokens,
        prefix_cache=False,
        step_time=StepTime(1.0, 0.0, 0.0, 0.0),
    )
    end_ratios, preemptions = [], []
    for seed in range(3):
        programs = workload(seed, (64, 240))
        # vLLM keeps one block for itself.
        harness = {"slots": slots, "blocks": blocks + 1, "batched_tokens": chunk_tokens}
        _, end_s, count = schedule(programs, config, tmp_path, **harness)
        result = simulate(programs, settings)
        end_ratios.append(max(row.finish for row in result.programs.values()) / end_s)
        preemptions.append((result.counts.preemptions, count))
    simulated, real = (sum(counts) for counts in zip(*preemptions, strict=True))
    assert statistics.fmean(end_ratios) == pytest.approx(1, abs=0.05)
    assert simulated == pytest.approx(real, rel=0.1)
    if name == "fcfs" and block_tokens > 1:
        assert (set(end_ratios), simulated) == ({1.0}, real)
