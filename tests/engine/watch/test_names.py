"""Names in metrics: a bounded number of them, those that are used most."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

import weft
from weft.engine.watch.metrics.counts import Histogram, ProgramCounts
from weft.engine.watch.metrics.names import MOST_LETTERS, MOST_NAMES, OTHER, ByName, shown_to_strangers
from weft.testing import ScriptedEngine


def full(uses: int = 1) -> ByName[Counter[str]]:
    """All places are taken, by names that were used so often."""
    names: ByName[Counter[str]] = ByName(Counter)
    for number in range(MOST_NAMES * uses):
        names.use(f"early-{number % MOST_NAMES}")["used"] += 1
    return names


def test_a_name_that_is_used_often_takes_the_place_of_one_that_is_not() -> None:
    """Who comes first locks nobody out."""
    names = full()
    keys = []
    for _use in range(4):
        names.use("late")["used"] += 1
        keys.append(names.key("late"))
    assert keys == [OTHER, OTHER, "late", "late"]
    assert len(names) == MOST_NAMES + 1
    assert names["late"]["used"] == names[OTHER]["used"] == 2


def test_names_without_end_push_out_none_that_is_used_again() -> None:
    """A client that makes up a name for each program changes nothing, however many it makes up."""
    names = full(2)
    before = set(names)
    for number in range(20_000):
        names.use(f"made up {number}")
        names.use(f"early-{number % MOST_NAMES}")
    assert set(names) == before | {OTHER}


def test_a_name_gets_a_place_among_names_without_end() -> None:
    """Its uses are remembered while others, each used once, come and go."""
    names = full()
    for number in range(5_000):
        names.use(f"made up {number}")
        if number % 50 == 0:
            names.use("real")
    assert names.key("real") == "real"


def test_what_was_used_long_ago_gives_way() -> None:
    """Earlier uses count half again and again."""
    names = full(500)
    for _use in range(3 * 500):
        names.use("late")
    assert names.key("late") == "late"


def test_the_name_of_all_others_is_no_name() -> None:
    """A client that names a program so is counted among the others."""
    names: ByName[Counter[str]] = ByName(Counter)
    names.use(OTHER)["used"] += 1
    for number in range(MOST_NAMES):
        names.use(f"early-{number}")
    for _use in range(10):
        names.use("late")
    assert names[OTHER]["used"] == 1
    assert len(names) == MOST_NAMES + 1


@given(st.lists(st.integers(0, 600).map(lambda number: f"{'x' * 90}{number:020}"), max_size=2_000))
def test_names_and_candidates_have_a_bound(uses: list[str]) -> None:
    """Whatever is used in whatever order, and however long it is."""
    names = ByName(Histogram)
    for name in uses:
        names.use(name)
        assert len(names) <= MOST_NAMES + 1
        assert len(names._candidates) <= 257
    assert all(len(name) <= MOST_LETTERS for name in [*names, *names._candidates])


def test_names_that_are_not_shown_count_as_others() -> None:
    """A stranger reads the tenants that the operator has named, and no name of a client's."""
    shown = shown_to_strangers({"research"})
    tenants: ByName[Counter[str]] = ByName(Counter, shown.tenants)
    assert not shown.names
    for tenant in ("research", "", "alice"):
        tenants.use(tenant)["calls"] += 1
    assert dict(tenants) == {each: {"calls": 1} for each in ("research", "", OTHER)}


def test_a_name_that_comes_back_begins_at_0_and_no_other_counter_falls_or_jumps() -> None:
    """Prometheus takes it for a new start of the process. The sum of all others takes over nothing."""
    engine, counts = ScriptedEngine(lambda _body: "answer"), ProgramCounts()
    engine.observe(counts)
    read: list[dict[str, int]] = []

    def call(name: str) -> None:
        with weft.Program(name) as program:
            body = {"messages": [{"role": "user", "content": "Hello"}]}
            engine.chat_sync(body, program, program.reports.start_call("c"))
        read.append({name: sums.calls.total() for name, sums in counts.names.items()})

    steady = [f"steady-{number}" for number in range(MOST_NAMES - 1)]
    for name in [*["seldom"] * 2, *steady * 3, *["often"] * 5, *["seldom"] * 7]:
        call(name)
    engine.shutdown()
    seldom = [each.get("seldom") for each in read]
    assert seldom[1] == 2
    assert None in seldom[2:], "it has lost its place"
    assert seldom[-1] == 1, "it has a place again"
    for before, after in pairwise(read):
        risen = {name: after[name] - before.get(name, 0) for name in after}
        assert sorted(risen.values()) == [0] * (len(risen) - 1) + [1], "each call counts once, by one name"
