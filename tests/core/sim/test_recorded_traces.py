"""What recorded traces say beyond generated ones: block hashes, unknown ends, and a closed loop."""

from __future__ import annotations

import itertools
from array import array
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sim_programs import chain, programs

from weft.core.kv_cache.policies import KV_POLICIES, KvPolicyConfig
from weft.core.policies import PolicyConfig
from weft.core.sim import SimSettings, SimulationError, StepTime, TraceCall, TraceProgram, simulate
from weft.core.sim.kv_cache.blocks import BlockTree, block_ends
from weft.core.sim.kv_cache.host import HostMemory
from weft.core.sim.kv_cache.kv_replay import replay_all
from weft.core.sim.replica import SimReplica
from weft.core.sim.sim_programs import SimCall, SimProgram
from weft.core.trace.format import in_order
from weft.core.trace.prefixes import block_hashes

EXACT = StepTime(fixed_s=2**-4, decode_token_s=2**-8, prefill_token_s=2**-7, context_token_s=2**-11)
BLOCK = 4


def with_hashes(drawn: list[TraceProgram]) -> list[TraceProgram]:
    """The same programs with an id for each token instead of chains of first parents."""
    ids = itertools.count()
    systems: dict[str | None, list[int]] = {}
    made = []
    for program in drawn:
        contexts: dict[str, list[int]] = {}
        calls = {}
        for call in in_order(program.calls):
            if call.parents:
                prefix = contexts[call.parents[0]]
            else:
                prefix = systems.setdefault(program.name, [])
                prefix += itertools.islice(ids, max(0, call.shared_prefix_tokens - len(prefix)))
            prefix = prefix[: call.shared_prefix_tokens]
            context = prefix + list(itertools.islice(ids, call.prompt_tokens + call.output_tokens - len(prefix)))
            contexts[call.call_id] = context
            if call.parents:
                calls[call.call_id] = replace(call, hash_ids=array("q", context[len(prefix) :]))
            else:
                calls[call.call_id] = replace(call, shared_prefix_tokens=0, hash_ids=array("q", context))
        made.append(replace(program, calls=tuple(calls[call.call_id] for call in program.calls), block_tokens=1))
    return made


def turns(name: str, *ids: tuple[int, ...], arrival_s: float = 0.0) -> TraceProgram:
    """A program whose calls follow each other, each with these blocks and an output of one block."""
    calls = tuple(
        TraceCall(f"{n}", (f"{n - 1}",) if n else (), BLOCK, len(each) * BLOCK, hash_ids=array("q", each))
        for n, each in enumerate(ids)
    )
    return TraceProgram(name, calls, arrival_s, block_tokens=BLOCK)


@given(programs(), st.sampled_from(["fcfs", "atlas", "mlfq"]), st.integers(1, 3))
def test_hashes_say_the_same_as_chains_of_first_parents(drawn: list[TraceProgram], policy: str, calls: int) -> None:
    """While nothing is evicted, a trace with an id for each token gives the same schedule and the same hits.

    Policies that learn are left out: they tell programs apart by the first block of the prompt where a trace has
    hashes, and by its length where it has none.
    """
    setting = SimSettings(PolicyConfig(policy), calls, kv_tokens=float("inf"), step_time=EXACT)
    expected, found = simulate(drawn, setting), simulate(with_hashes(drawn), setting)
    assert found.programs == expected.programs
    assert found.counts.prefix_hits == expected.counts.prefix_hits


@settings(max_examples=60)
@given(
    programs(),
    st.sampled_from(["fcfs", "atlas", "auto"]),
    st.sampled_from([None, *KV_POLICIES]),
    st.integers(0, 1),
    st.integers(150, 300),
)
def test_all_programs_end_with_a_small_kv_cache(
    drawn: list[TraceProgram], policy: str, kv_policy: str | None, host: int, kv_tokens: int
) -> None:
    """The tree of cached blocks stays whole whatever is evicted, spilled and shared, and every call is served."""
    config = None if kv_policy is None else KvPolicyConfig(kv_policy)
    setting = SimSettings(
        PolicyConfig(policy), 2, kv_tokens=kv_tokens, kv_policy=config, host_kv_tokens=host * 200, step_time=EXACT
    )
    again = [replace(program, program=f"{program.program}-again", arrival_s=9.0) for program in drawn]
    result = simulate(with_hashes([*drawn, *again]), setting)
    assert all(row.finish >= row.arrival for row in result.programs.values())
    assert sum(row.calls for row in result.programs.values()) == 2 * sum(len(program.calls) for program in drawn)


def test_programs_share_the_blocks_of_equal_ids() -> None:
    """The second program finds the blocks that it has in common with the first one, and no others."""
    first, second = turns("A", (1, 2, 3)), turns("B", (1, 2, 4), arrival_s=100.0)
    result = simulate([first, second], SimSettings(step_time=EXACT))
    assert result.counts.prefix_hits == 2 * BLOCK


def test_an_output_is_found_by_whoever_repeats_it() -> None:
    """The first call's output is block 4, with which another program's prompt goes on."""
    first = TraceProgram(
        "A", (TraceCall("a", (), BLOCK, 3 * BLOCK, hash_ids=array("q", [1, 2, 3, 4])),), block_tokens=BLOCK
    )
    result = simulate([first, turns("B", (1, 2, 3, 4, 5), arrival_s=100.0)], SimSettings(step_time=EXACT))
    assert result.counts.prefix_hits == 4 * BLOCK


def test_a_call_that_has_another_ancestor_finds_its_blocks() -> None:
    """The third call goes on from the first one although the second is its parent, as after a rewind."""
    program = turns("A", (1, 2, 3), (1, 7), (1, 2, 3, 8))
    assert simulate([program], SimSettings(step_time=EXACT)).counts.prefix_hits == (1 + 3) * BLOCK


@given(st.lists(st.lists(st.integers(0, 2), max_size=6), min_size=1, max_size=8))
def test_the_tree_of_blocks_has_every_path(words: list[list[int]]) -> None:
    """The node with which a call's blocks end has exactly these blocks before it, whatever was added later."""
    names: dict[tuple[int, ...], int] = {}
    added = []
    tree = BlockTree()
    for number, word in enumerate(words):
        ids = [names.setdefault(tuple(word[: n + 1]), len(names)) for n in range(len(word))]
        call = TraceCall("c", (), 1, len(ids), hash_ids=array("q", ids))
        (end,) = tree.add(TraceProgram(f"P{number}", (call,), block_tokens=1))
        added.append((ids, end))
    for ids, end in added:
        path = [*end.path()][::-1]
        assert list(itertools.chain.from_iterable(node.ids for node in path)) == ids
        assert end.end == len(ids)
        assert all(node.begin == before for node, before in zip(path, [0, *(each.end for each in path)], strict=False))


def test_blocks_are_common_once_two_programs_have_used_them() -> None:
    """A node knows it, and so do the nodes before it."""
    tree = BlockTree()
    (first,), (second,) = tree.add(turns("A", (1, 2, 3))), tree.add(turns("B", (1, 2, 4)))
    first.use("A")
    assert not any(node.is_common for node in first.path())
    second.use("B")
    assert [node.is_common for node in first.path()] == [False, True]


def test_a_copy_concerns_the_programs_that_share_its_blocks() -> None:
    """A copy of what A computed changes what host memory has for A and for B, which begins with the same blocks. It
    changes nothing for C, whose context is not looked up again."""
    specs = [turns(name, ids) for name, ids in (("A", (1, 2, 3)), ("B", (1, 2, 4)), ("C", (5, 6, 7)))]
    host, calls = HostMemory(1000), []
    for number, (spec, ends) in enumerate(zip(specs, block_ends(specs), strict=True)):
        owner = SimProgram(spec, number, end_nodes=ends)
        view, call = owner.view, spec.calls[0]
        ends[0].use(number)
        calls.append(
            SimCall(
                "0",
                view,
                call.prompt_tokens,
                spec=call,
                owner=owner,
                index=0,
                inherited=view.attained,
                end_node=ends[0],
            )
        )
    before = [host.changes_of(call) for call in calls]
    assert host.keep(calls[0], 0, 3 * BLOCK) == 3 * BLOCK
    assert [host.held(call) for call in calls] == [3 * BLOCK, 2 * BLOCK, 0]
    assert [host.changes_of(call) > was for call, was in zip(calls, before, strict=True)] == [True, True, False]


def test_block_hashes_agree_with_the_tree() -> None:
    """`block_hashes` gives the same ids as the path in the tree."""
    program = turns("A", (1, 2, 3), (1, 7), (1, 2, 3, 8))
    ends = BlockTree().add(program)
    for end, ids in zip(ends, block_hashes(program).values(), strict=True):
        assert array("q", itertools.chain.from_iterable(node.ids for node in [*end.path()][::-1])) == ids


@given(programs(most=4), st.sampled_from([16, 32, 64]))
def test_a_replay_finds_the_same_blocks(drawn: list[TraceProgram], block_tokens: int) -> None:
    """In a replay with room for everything, a call finds the whole blocks of 16 tokens that another one has had."""
    grown = [
        replace(
            program,
            calls=tuple(
                replace(
                    call,
                    prompt_tokens=call.prompt_tokens * block_tokens,
                    output_tokens=call.output_tokens * block_tokens,
                    hash_ids=call.hash_ids,
                    shared_prefix_tokens=call.shared_prefix_tokens * block_tokens,
                )
                for call in program.calls
            ),
            block_tokens=block_tokens,
        )
        for program in with_hashes(drawn)
    ]
    setting = SimSettings(PolicyConfig("fcfs"), 1, kv_tokens=10**9, step_time=EXACT)
    results = replay_all(grown, setting)
    assert len({row.hit_tokens for row in results}) == 1
    simulated = simulate(grown, replace(setting, kv_tokens=float("inf"))).counts.prefix_hits
    prompts = sum(call.prompt_tokens for program in grown for call in program.calls)
    assert results[0].prompt_tokens == prompts
    assert results[0].hit_tokens == simulated


# -- a closed loop


@given(programs(most=8), st.integers(1, 3))
def test_in_a_closed_loop_a_program_arrives_when_another_ends(drawn: list[TraceProgram], concurrency: int) -> None:
    """The first programs arrive at 0, and each further one at the end of one before it, in their order."""
    result = simulate(drawn, SimSettings(step_time=EXACT, concurrency=concurrency))
    rows = [result.programs[program.program] for program in drawn]
    ends = sorted(row.finish for row in rows)
    assert [row.arrival for row in rows] == [0.0] * min(concurrency, len(rows)) + ends[
        : max(0, len(rows) - concurrency)
    ]


def test_a_closed_loop_has_at_least_one_program() -> None:
    """A bad number is refused."""
    with pytest.raises(SimulationError, match="concurrency must be at least 1, not 0"):
        SimSettings(concurrency=0)


# -- ends that nobody tells


def told(monkeypatch: pytest.MonkeyPatch, drawn: list[TraceProgram]) -> list[tuple[str, float]]:
    """The programs that the engine was told to have ended, and when."""
    ends: list[tuple[str, float]] = []
    end_program = SimReplica.end_program

    def spy(replica: SimReplica, program: SimProgram, now_s: float) -> bool:
        ends.append((program.view.program_id, now_s))
        return end_program(replica, program, now_s)

    monkeypatch.setattr(SimReplica, "end_program", spy)
    simulate(drawn, SimSettings(PolicyConfig("auto"), unit_steps=True))
    return ends


def test_a_program_that_nobody_ends_ends_by_its_idle_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one whose end is known ends with its last call, the other one 600 s later."""
    drawn = [chain("A", (2, 3)), replace(chain("B", (2, 3)), end_known=False)]
    assert told(monkeypatch, drawn) == [("A", 5.0), ("B", 605.0)]


def test_after_a_long_gap_the_next_call_begins_another_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gap of 1000 s is longer than the time-out, so the policy sees two programs."""
    first, second = chain("A", (2, 3)).calls
    program = TraceProgram("A", (first, replace(second, gap_s=1000.0)), end_known=False)
    assert told(monkeypatch, [program]) == [("A", 602.0), ("A#1", 1605.0)]


def test_the_idle_timeout_follows_the_gaps_of_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """After eight gaps of 20 s, a program of this name is given four times as long."""
    calls = tuple(replace(call, gap_s=20.0) for call in chain("A", (1,) * 9).calls)
    teacher = TraceProgram("A", calls, name="n", end_known=False)
    pupil = replace(chain("B", (1,), 1000.0), name="n", end_known=False)
    assert told(monkeypatch, [teacher, pupil])[1] == ("B", 1001.0 + 80.0)
