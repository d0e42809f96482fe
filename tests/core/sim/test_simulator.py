"""The simulator: the papers' examples, and random programs against an engine that plays every step."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from naive_engine import NaiveEngine
from sim_programs import ASTRAEA_2, FIGURE_2, FIGURE_9, chain, programs

from weft.core.policies import PolicyConfig
from weft.core.routing import BALANCERS, BalancerConfig
from weft.core.sim import SimSettings, SimulationError, StepTime, TraceCall, TraceProgram, simulate
from weft.core.sim.sim_programs import SimProgram
from weft.core.trace.workloads import generate, poisson

UNIT = SimSettings(batch_size=2, unit_steps=True)
# Powers of two, so that sums are exact however they are grouped.
EXACT = StepTime(fixed_s=2**-4, decode_token_s=2**-8, prefill_token_s=2**-7, context_token_s=2**-11)
POLICIES = [
    PolicyConfig("fcfs"),
    PolicyConfig("plas", (1.0, 2.0, 4.0), None),
    PolicyConfig("plas", (2.0, 3.0), 0.5),
    PolicyConfig("atlas", (1.0, 4.0), 2.0),
    PolicyConfig("atlas", (0.25, 0.5, 1.0), 0.5, decide_every=3),
    PolicyConfig("atlas", (0.5, 1.0, 2.0), 1.0, token_s=0.125),
    PolicyConfig("mlfq", (1.0, 3.0), 4.0),
    PolicyConfig("mlfq", (0.5, 1.0), 0.25),
    PolicyConfig("rr", quanta_s=(2.0,)),
    PolicyConfig("rr", quanta_s=(0.25,)),
    PolicyConfig("learned"),
    PolicyConfig("auto"),
    PolicyConfig("astraea", (3, 9), 2.0),
    PolicyConfig("astraea", (3, 9), 1.5, preempt=True),
    PolicyConfig("astraea", (3, 9), 2.0, decide_every=3),
    PolicyConfig("atlas", (1.0, 4.0), 2.0, gate=True),
    PolicyConfig("fcfs", gate=True),
]


# -- the papers' examples


def test_autellix_figure_2() -> None:
    """Autellix Fig. 2: four programs on two slots wait 18 units under FCFS, and 12 under PLAS with bounds 2 and 3."""
    fcfs = simulate(FIGURE_2, replace(UNIT, policy=PolicyConfig("fcfs")))
    plas = simulate(FIGURE_2, replace(UNIT, policy=PolicyConfig("plas", (2, 3))))
    assert {name: row.wait for name, row in fcfs.programs.items()} == {"A": 3, "B": 4, "C": 7, "D": 4}
    assert {name: row.wait for name, row in plas.programs.items()} == {"A": 3, "B": 4, "C": 2, "D": 3}
    assert (fcfs.total_wait, plas.total_wait) == (18, 12)
    assert {name: row.service for name, row in plas.programs.items()} == {"A": 9, "B": 10, "C": 3, "D": 4}


def test_autellix_figure_9() -> None:
    """Autellix Fig. 9: a program of parallel calls takes 14 units under FCFS, and 11 if the critical path is known."""
    assert simulate(FIGURE_9, replace(UNIT, policy=PolicyConfig("fcfs"))).makespan == 14
    assert simulate(FIGURE_9, replace(UNIT, policy="srpt")).makespan == 11


def test_astraea_figure_2() -> None:
    """Astraea Fig. 2: two requests on one slot take 15.0 units on average under FCFS, 12.5 with the shortest call
    first, 14.5 under least attained service and 11.5 under SRPT.

    Least attained service is PLAS with bounds 4 and 6. As in the figure, no call is preempted.
    """
    one_slot = replace(UNIT, batch_size=1)
    assert simulate(ASTRAEA_2, replace(one_slot, policy=PolicyConfig("fcfs"))).mean_latency == 15.0
    assert simulate(ASTRAEA_2, replace(one_slot, policy=PolicyConfig("plas", (4, 6)))).mean_latency == 14.5
    assert simulate(ASTRAEA_2, replace(one_slot, policy="srpt")).mean_latency == 11.5
    assert simulate(ASTRAEA_2, replace(one_slot, policy="sjf")).mean_latency == 12.5


def test_astraea_is_not_shown_in_its_own_figure_2() -> None:
    """By its own rule Astraea takes 14.5 units on its example, no less than least attained service, and 15.0 if only
    the wait of the call counts, as many as FCFS. Whose first call comes first matters: with B first FCFS takes 14.5."""
    one_slot = replace(UNIT, batch_size=1)
    by_program, by_call = PolicyConfig("astraea-oracle"), PolicyConfig("astraea-oracle", wait="call")
    assert simulate(ASTRAEA_2, replace(one_slot, policy=by_program)).mean_latency == 14.5
    assert simulate(ASTRAEA_2, replace(one_slot, policy=by_call)).mean_latency == 15.0
    assert simulate(ASTRAEA_2[::-1], replace(one_slot, policy=by_call)).mean_latency == 14.5
    assert simulate(ASTRAEA_2[::-1], replace(one_slot, policy=PolicyConfig("fcfs"))).mean_latency == 14.5


def test_executions_are_recorded() -> None:
    """Under round robin with a quantum of two, two calls alternate every two units."""
    policy = PolicyConfig("rr", quanta_s=(2.0,))
    result = simulate([chain("A", (4,)), chain("B", (4,))], replace(UNIT, policy=policy, batch_size=1), runs=True)
    assert [(execution.program, execution.start_s, execution.end_s) for execution in result.runs] == [
        ("A", 0, 2),
        ("B", 2, 4),
        ("A", 4, 6),
        ("B", 6, 8),
    ]
    assert result.counts.preemptions == 2


def test_a_call_may_have_starved_before_it_arrives() -> None:
    """When a2 arrives at 11, its program has waited 4 units and has 2 units of service. With beta 1, a2 is promoted at
    once and preempts b2, which has run since 8."""
    starved = TraceProgram("A", (TraceCall("a1", (), 2), TraceCall("a2", ("a1",), 2, gap_s=5.0)))
    trace = [chain("Z", (4,)), starved, chain("B", (2, 10), 5.0)]
    policy = PolicyConfig("plas", (1.0,), 1.0, quanta_s=(100.0, 100.0))
    result = simulate(trace, replace(UNIT, policy=policy, batch_size=1))
    assert {name: row.finish for name, row in result.programs.items()} == {"Z": 4, "A": 13, "B": 20}


def test_srpt_counts_the_work_of_prompts() -> None:
    """A long prompt with a short answer is more work than a short prompt with a slightly longer answer."""
    settings = SimSettings(policy="srpt", batch_size=1, step_time=EXACT)
    result = simulate([one_call(400, 10, "A"), one_call(1, 12, "B")], settings)
    assert result.programs["B"].finish < result.programs["A"].finish


def test_priority_is_the_order_in_which_programs_arrive() -> None:
    """A's calls go before those of B, which arrives later. Neither the order in the trace nor the arrival of the calls
    matters. A call of B that runs when A's next call arrives keeps running, as in vLLM."""
    first = TraceProgram(
        "A", (TraceCall("a1", (), 2), TraceCall("a2", ("a1",), 2), TraceCall("a3", ("a2",), 2, 0, 1.0))
    )
    trace = [chain("B", (4, 1), 1.0), first]
    result = simulate(trace, replace(UNIT, policy="priority", batch_size=1), runs=True)
    assert [execution.call_id for execution in result.runs] == ["a1", "a2", "b1", "a3", "b2"]
    assert {name: row.finish for name, row in result.programs.items()} == {"B": 11, "A": 10}


def test_priority_serves_one_programs_calls_as_they_arrive() -> None:
    """Parallel calls of a program run in the order in which they arrive."""
    calls = (TraceCall("c1", (), 5), TraceCall("c2", (), 1, gap_s=2.0), TraceCall("c3", (), 1, gap_s=1.0))
    result = simulate([TraceProgram("A", calls)], replace(UNIT, policy="priority", batch_size=1), runs=True)
    assert [execution.call_id for execution in result.runs] == ["c1", "c3", "c2"]


def test_the_latest_program_is_preempted_under_priority() -> None:
    """When the KV cache is full, the later program's call is preempted, even if it arrived before the other call."""
    first = TraceProgram("A", (TraceCall("a1", (), 1, 1), TraceCall("a2", ("a1",), 40, 40, gap_s=1.0)), name="A")
    trace = [first, one_call(40, 40, "B")]
    tight = SimSettings(policy="priority", kv_tokens=120, step_time=EXACT)
    preempted = {}
    for policy in ("priority", PolicyConfig("fcfs")):
        result = simulate(trace, replace(tight, policy=policy), runs=True)
        calls = [execution.call_id for execution in result.runs]
        preempted[result.policy] = {call for call in calls if calls.count(call) > 1}
    assert preempted == {"priority": {"c"}, "fcfs": {"a2"}}


@given(programs(most=8), st.integers(1, 3))
def test_priority_is_first_come_first_served_for_programs_of_one_call(
    given_programs: list[TraceProgram], batch_size: int
) -> None:
    """If each program has one call, the order of the programs is the order of the calls."""
    single = [replace(program, calls=(replace(program.calls[0], gap_s=0.0),)) for program in given_programs]
    configuration = SimSettings(batch_size=batch_size, kv_tokens=60, chunk_tokens=8, step_time=EXACT)
    priority = simulate(single, replace(configuration, policy="priority"), runs=True)
    fcfs = simulate(single, replace(configuration, policy=PolicyConfig("fcfs")), runs=True)
    assert (priority.programs, priority.runs, priority.counts) == (fcfs.programs, fcfs.runs, fcfs.counts)


# -- against an engine that plays every step


@given(programs(unit=True), st.sampled_from(POLICIES), st.integers(1, 3))
def test_unit_steps_agree_with_a_naive_engine(
    given_programs: list[TraceProgram], policy: PolicyConfig, batch_size: int
) -> None:
    """Every program has the arrival, end, wait and service that the naive engine gives it, although steps are jumped
    over."""
    configuration = replace(UNIT, policy=policy, batch_size=batch_size)
    naive = NaiveEngine(given_programs, configuration, policy.make())
    result = simulate(given_programs, configuration)
    assert result.programs == naive.results
    assert result.counts.preemptions == naive.preemptions


@settings(max_examples=200)
@given(programs(), st.sampled_from(POLICIES), st.integers(1, 4), st.integers(4, 16))
def test_steps_with_prompts_agree_with_a_naive_engine(
    given_programs: list[TraceProgram], policy: PolicyConfig, batch_size: int, chunk_tokens: int
) -> None:
    """They also agree with prompts in chunks, steps whose duration grows with the context, and recomputation."""
    configuration = SimSettings(
        policy=policy,
        batch_size=batch_size,
        chunk_tokens=chunk_tokens,
        kv_tokens=math.inf,
        prefix_cache=False,
        step_time=EXACT,
    )
    naive = NaiveEngine(given_programs, configuration, policy.make())
    result = simulate(given_programs, configuration)
    assert result.programs == naive.results
    assert result.counts.preemptions == naive.preemptions


def test_newcomers_that_share_a_prompt_preempt_no_call() -> None:
    """A newcomer whose prompt a running call has in the cache needs only its own tokens; the running call stays.

    Counted with the whole prompt, each of the six preempted the running call, which was readmitted at once.
    """
    trace = [one_call(300, 100, "long", shared_prefix_tokens=160)]
    trace += [
        replace(one_call(161, 30, f"new-{number}", shared_prefix_tokens=160), arrival_s=20.0 + number)
        for number in range(6)
    ]
    policy = PolicyConfig("atlas", (8.0, 64.0), None)
    settings = SimSettings(policy=policy, kv_tokens=600, step_time=StepTime(1.0, 0.0, 0.0, 0.0))
    result = simulate(trace, settings)
    assert result.counts.preemptions == 0
    assert result.total_wait == 0


@given(
    given_programs=programs(most=8),
    policy=st.sampled_from([*POLICIES, "srpt"]),
    batch_size=st.integers(1, 4),
    kv_tokens=st.integers(20, 120),
    prefix_cache=st.booleans(),
)
def test_a_preempted_call_stays_out_of_the_step(
    given_programs: list[TraceProgram], kv_tokens: int, **others: object
) -> None:
    """A call that is preempted is not admitted again in the same step: its place went to a call of better rank."""
    largest = max(call.prompt_tokens + call.output_tokens for program in given_programs for call in program.calls)
    settings = SimSettings(
        kv_tokens=max(largest, kv_tokens),
        chunk_tokens=64,
        step_time=EXACT,
        **others,  # type: ignore[arg-type]
    )
    ended: dict[tuple[str, str], float] = {}
    for run in sorted(simulate(given_programs, settings, runs=True).runs, key=lambda run: run.start_s):
        assert ended.get((run.program, run.call_id)) != run.start_s
        ended[run.program, run.call_id] = run.end_s


def test_a_jump_over_a_prompt_leaves_room_for_its_first_token() -> None:
    """The step after a jump preempts if the KV cache lacks the token of a call that still computes its prompt."""
    both = [
        TraceProgram("decodes", (TraceCall("c", (), output_tokens=10, prompt_tokens=11),)),
        TraceProgram("computes", (TraceCall("c", (), output_tokens=6, prompt_tokens=30),), arrival_s=0.25),
    ]
    configuration = SimSettings(
        policy=PolicyConfig("fcfs"), batch_size=3, kv_tokens=46, prefix_cache=False, chunk_tokens=8, step_time=EXACT
    )
    jumped = simulate(both, configuration, runs=True)
    assert jumped.counts.preemptions == 1
    assert jumped == simulate(both, configuration, runs=True, jump=False)


@settings(max_examples=200)
@given(
    given_programs=programs(most=8),
    policy=st.sampled_from([*POLICIES, "priority", "srpt"]),
    batch_size=st.integers(1, 4),
    kv_tokens=st.integers(200, 400),
    prefix_cache=st.booleans(),
    block_tokens=st.sampled_from((1, 4)),
    preemption=st.sampled_from(("recompute", "swap")),
    replicas=st.integers(1, 3),
    balancer=st.sampled_from(BALANCERS),
)
def test_jumping_changes_nothing_with_a_full_kv_cache(
    given_programs: list[TraceProgram],
    balancer: str,
    kv_tokens: int,
    block_tokens: int,
    replicas: int,
    **others: object,
) -> None:
    """Several engines with small KV caches that fill up give the same result whether steps are jumped over or not. All
    engines are empty at the end."""
    largest = max(call.prompt_tokens + call.output_tokens for program in given_programs for call in program.calls)
    configuration = SimSettings(
        kv_tokens=-(-max(largest, kv_tokens // 4) // block_tokens) * block_tokens,
        block_tokens=block_tokens,
        chunk_tokens=8,
        step_time=EXACT,
        balancer=BalancerConfig(balancer, **({"threshold_tokens": 16} if balancer == "locality" else {})),
        replicas=replicas,
        **others,  # type: ignore[arg-type]
    )
    jumped = simulate(given_programs, configuration, runs=True)
    assert jumped == simulate(given_programs, configuration, runs=True, jump=False)
    for program in given_programs:
        row = jumped.programs[program.program]
        assert row.finish >= row.arrival + sum(call.output_tokens for call in program.calls[:1]) * EXACT.fixed_s


# -- determinism


@pytest.mark.parametrize("policy", [PolicyConfig("atlas", (1.0, 2.0, 4.0), 2.0), PolicyConfig("plas"), "srpt"])
def test_the_same_seed_gives_the_same_schedule(policy: PolicyConfig) -> None:
    """A seeded workload on three engines has the same result three times, call by call. Another seed changes it. The
    table of `test_digests.py` has it from process to process."""

    def schedule(seed: int) -> object:
        trace = generate("mixed", 12, poisson(random.Random(seed), 4.0), random.Random(seed))
        configuration = SimSettings(policy=policy, replicas=3, batch_size=8, kv_tokens=60_000)
        return simulate(trace, configuration, runs=True)

    first = schedule(1)
    assert all(schedule(1) == first for _ in range(2))
    assert schedule(2) != first


# -- KV cache, prefixes, preemption


def one_call(prompt_tokens: int, output_tokens: int, program: str = "A", **others: object) -> TraceProgram:
    call = TraceCall("c", (), output_tokens, prompt_tokens, **others)  # type: ignore[arg-type]
    return TraceProgram(program, (call,), name="same")


def test_a_single_call_takes_the_time_of_its_steps() -> None:
    """20 prompt tokens in chunks of 8 take three steps, the last of which generates a token. Two more tokens take two
    steps."""
    settings = SimSettings(batch_size=1, chunk_tokens=8, step_time=EXACT)
    result = simulate([one_call(20, 3)], settings, batches=True)
    # The steps attend to 0, 8 and 16 tokens of the prompt, then to 21 and 22 tokens.
    steps = [(0, 8, 0), (0, 8, 8), (0, 4, 16), (1, 0, 21), (1, 0, 22)]
    assert result.makespan == sum(EXACT.step_s(*step) for step in steps)
    assert result.programs["A"].service == result.makespan
    # The last two steps are recorded as one batch.
    assert [batch[3:6] for batch in result.batches] == steps[:4]
    assert [batch.steps for batch in result.batches] == [1, 1, 1, 2]
    took_s = [batch.took_s(EXACT) for batch in result.batches]
    assert [batch.began_s for batch in result.batches] == [sum(took_s[:number]) for number in range(4)]
    assert sum(took_s) == result.makespan


def test_a_program_finds_its_prefix_only_on_its_engine() -> None:
    """The second call of a chain finds the first call's prompt and output on the engine where the first call ran, and
    nothing on another engine. Without a prefix cache it finds nothing."""
    calls = (TraceCall("a", (), 4, 30), TraceCall("b", ("a",), 4, 40, shared_prefix_tokens=34))
    trace = [TraceProgram("A", calls)]

    def hits(**changes: object) -> float:
        return simulate(trace, replace(SimSettings(step_time=EXACT), **changes)).prefix_hit_rate  # type: ignore[arg-type]

    assert hits() == 34 / 70
    assert hits(prefix_cache=False) == 0
    assert hits(block_tokens=16) == 32 / 70
    assert hits(replicas=2, balancer=BalancerConfig("round_robin")) == 0
    assert hits(replicas=2, balancer=BalancerConfig("affinity")) == 34 / 70


def test_a_context_that_just_fills_its_blocks_lacks_the_last_one() -> None:
    """An engine never computes the KV of a call's last token, so the block that it is in cannot be found."""
    calls = (TraceCall("a", (), 4, 28), TraceCall("b", ("a",), 4, 40, shared_prefix_tokens=32))
    result = simulate([TraceProgram("A", calls)], SimSettings(step_time=EXACT, block_tokens=16))
    assert result.counts.prefix_hits == 16


@pytest.mark.parametrize("jump", [True, False])
def test_no_call_starts_in_a_step_that_has_preempted_another(jump: bool) -> None:
    """At 2 s b needs a third block of four, and is preempted. c2 would fit at once, but as in vLLM it starts a step
    later, whether steps are jumped over or not."""
    first = TraceProgram("A", (TraceCall("c1", (), 12, 3), TraceCall("c2", (), 2, 8, gap_s=2.0)))
    trace = [first, TraceProgram("B", (TraceCall("b", (), 5, 7),))]
    settings = SimSettings(
        "priority", kv_tokens=16, block_tokens=4, prefix_cache=False, step_time=StepTime(1.0, 0.0, 0.0, 0.0)
    )
    runs = simulate(trace, settings, runs=True, jump=jump).runs
    assert [(run.call_id, run.start_s) for run in runs][:2] == [("b", 0), ("c2", 3)]


def test_programs_of_one_name_share_their_first_prompt() -> None:
    """An engine computes a system prompt once for all programs of one name. Programs of other names do not share it."""
    trace = [one_call(24, 2, name, shared_prefix_tokens=16) for name in "AB"]
    other = replace(one_call(24, 2, "C", shared_prefix_tokens=16), name="other")
    result = simulate([*trace, other], SimSettings(step_time=EXACT))
    assert result.counts.prefix_hits == 16


def test_policies_may_be_shown_other_names() -> None:
    """A policy sees the names that it is given, and programs share the prompts that they shared before."""
    trace = [replace(chain(name, (1,)), name="one") for name in "AB"]
    seen = SimProgram(trace[0], 0, "other")
    assert (seen.view.name, SimProgram(trace[1], 1).view.name) == ("other", "one")
    shared = [one_call(24, 2, name, shared_prefix_tokens=16) for name in "AB"]
    result = simulate(shared, SimSettings(step_time=EXACT), names={"A": "first", "B": "second"})
    assert result.counts.prefix_hits == 16


def test_a_full_kv_cache_preempts_and_recomputes() -> None:
    """Two calls fit into the KV cache until they have grown. The later one is preempted, and recomputed or swapped."""
    trace = [one_call(40, 40, "A"), one_call(40, 40, "B")]
    ample = SimSettings(policy=PolicyConfig("fcfs"), kv_tokens=1000, step_time=EXACT)
    tight = replace(ample, kv_tokens=120)
    swapped = simulate(trace, replace(tight, preemption="swap"))
    recomputed = simulate(trace, tight)
    assert simulate(trace, ample).counts.preemptions == 0
    assert (recomputed.counts.preemptions, recomputed.counts.swapped) == (1, 0)
    # The cache is full at 60 tokens for each call, of which B has computed 59. A's last 20 tokens evict the end of B's.
    assert recomputed.counts.recomputed == 59 - 40
    assert (swapped.counts.preemptions, swapped.counts.recomputed) == (1, 0)
    assert swapped.counts.swapped > 40
    assert recomputed.programs["A"].finish < recomputed.programs["B"].finish
    assert simulate(trace, ample).makespan < swapped.makespan < recomputed.makespan


def test_a_victims_tokens_include_its_prefix() -> None:
    """A's second call has 80 of its tokens from the prefix cache. It is preempted for B, which needs some of them."""
    long = (TraceCall("a", (), 20, 60), TraceCall("b", ("a",), 40, 85, shared_prefix_tokens=80))
    trace = [TraceProgram("A", long), replace(one_call(50, 5, "B"), arrival_s=32.0)]
    settings = SimSettings(policy=PolicyConfig("plas", (8.0,)), kv_tokens=130, step_time=StepTime(1.0, 0.0, 0.0, 0.0))
    result = simulate(trace, settings)
    assert result.counts.preemptions == 1
    assert result.programs["B"].wait < 2


def test_swapping_takes_time() -> None:
    """Each swapped token takes `copy_token_s` twice: when it is copied to host memory and when it is copied back."""
    trace = [one_call(40, 40, "A"), one_call(40, 40, "B")]
    settings = SimSettings(
        policy=PolicyConfig("fcfs"),
        kv_tokens=120,
        step_time=replace(EXACT, copy_token_s=0.0),
        preemption="swap",
        prefix_cache=False,
    )
    instant, slow = (
        simulate(trace, settings),
        simulate(trace, replace(settings, step_time=replace(EXACT, copy_token_s=2**-6))),
    )
    assert slow.counts == instant.counts
    assert slow.makespan - instant.makespan == pytest.approx(2 * instant.counts.swapped * 2**-6)


def test_old_prefixes_are_evicted() -> None:
    """When the KV cache is full, the least recently used prefix that no call reads is evicted."""

    def program(name: str, arrival_s: float, gap_s: float) -> TraceProgram:
        calls = (TraceCall("a", (), 10, 50), TraceCall("b", ("a",), 10, 60, gap_s=gap_s, shared_prefix_tokens=60))
        return TraceProgram(name, calls, arrival_s, name)

    apart = [program("A", 0, 100.0), program("B", 50, 1.0)]
    assert simulate(apart, SimSettings(kv_tokens=1000, step_time=EXACT)).counts.prefix_hits == 120
    assert simulate(apart, SimSettings(kv_tokens=70, step_time=EXACT)).counts.prefix_hits == 60


# -- policies and replicas


def test_attained_service_lets_short_programs_overtake_long_ones() -> None:
    """For conversations under load, the mean latency under SRPT is below that under ATLAS, which is below FCFS."""
    trace = generate("chat", 150, poisson(random.Random(1), 2.0), random.Random(1))

    def mean(policy: PolicyConfig | Literal["srpt"]) -> float:
        return simulate(trace, SimSettings(policy=policy, batch_size=32)).mean_latency

    assert mean("srpt") < mean(PolicyConfig("atlas")) < mean(PolicyConfig("fcfs"))


@pytest.mark.parametrize("replicas", [1, 2, 64])
def test_more_engines_shorten_the_makespan(replicas: int) -> None:
    """64 equal calls that arrive together take as many rounds as one engine has calls."""
    trace = [chain(f"P{number}", (4,)) for number in range(64)]
    settings = SimSettings(batch_size=1, unit_steps=True, replicas=replicas, balancer=BalancerConfig("least_used"))
    assert simulate(trace, settings).makespan == 4 * 64 / replicas


def test_latencies_are_interpolated() -> None:
    """Percentiles of five programs that take 1 to 5 units."""
    trace = [chain(f"P{length}", (length,)) for length in (3, 1, 5, 2, 4)]
    result = simulate(trace, SimSettings(batch_size=8, chunk_tokens=8, unit_steps=True))
    assert [result.latency(percent) for percent in (0, 50, 75, 90, 100)] == [1, 3, 4, pytest.approx(4.6), 5]
    assert (result.mean_latency, result.total_wait, result.prefix_hit_rate) == (3, 0, 0)


def test_progress_is_reported() -> None:
    """`progress` is called with the number of programs that have ended, after every 64th."""
    reported: list[int] = []
    simulate([chain(f"P{number}", (1,)) for number in range(200)], progress=reported.append)
    assert reported == [64, 128, 192]


# -- errors


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch_size": 0}, "batch_size must be at least 1"),
        ({"replicas": 0}, "replicas must be at least 1"),
        ({"batch_size": 64, "chunk_tokens": 63}, "chunk_tokens must be at least 64"),
        ({"block_tokens": 0}, "block_tokens must be at least 1"),
        ({"kv_tokens": 0}, "kv_tokens must be at least 1"),
        ({"kv_tokens": math.nan}, "kv_tokens must be at least 1"),
        ({"kv_token_bytes": 0}, "kv_token_bytes must be at least 1"),
        ({"policy": 7}, "a PolicyConfig, or the name of a policy, not 7"),
    ],
)
def test_settings_out_of_range_are_refused(change: dict[str, object], message: str) -> None:
    """`SimSettings` refuses them at once and says what is allowed."""
    with pytest.raises(SimulationError, match=message):
        SimSettings(**change)  # type: ignore[arg-type]


def test_programs_that_cannot_be_served_are_refused() -> None:
    """No programs, two programs with one id, and a call that is longer than the KV cache are errors that say so."""
    with pytest.raises(SimulationError, match="no program to simulate"):
        simulate([])
    with pytest.raises(SimulationError, match="2 programs have the id 'A'"):
        simulate([chain("A", (1,)), chain("A", (2,))])
    with pytest.raises(SimulationError, match=r"'c' of program 'A' has 110 tokens.*holds 109; .*kv_tokens"):
        simulate([one_call(100, 10)], SimSettings(kv_tokens=109))
    with pytest.raises(SimulationError, match=r"'c' of program 'A' has 110 tokens.*holds 108; .*kv_tokens"):
        simulate([one_call(100, 10)], SimSettings(kv_tokens=111, block_tokens=4))
    assert simulate([one_call(100, 10)], SimSettings(kv_tokens=110)).counts.preemptions == 0


def test_without_chunks_a_prompt_waits_for_a_step_that_has_room_for_all_of_it() -> None:
    """Steps take a second and compute 10 tokens. The prompt of 8 does not fit behind that of 6. In chunks it begins in
    the first step, and whole it waits. So does the prompt of 2 behind it, for which there would be room."""
    made = [TraceProgram(f"p{tokens}", (TraceCall("a", (), 1, tokens),)) for tokens in (6, 8, 2)]
    engine = SimSettings("fcfs", batch_size=4, chunk_tokens=10, step_time=StepTime(1.0, 0.0, 0.0, 0.0))
    chunks = simulate(made, engine).programs.values()
    whole = simulate(made, replace(engine, chunked_prefill=False)).programs.values()
    assert [row.wait for row in chunks] == [0.0, 0.0, 1.0]
    assert [row.wait for row in whole] == [0.0, 1.0, 1.0]
