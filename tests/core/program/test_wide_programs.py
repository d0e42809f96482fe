"""Programs of many calls: the cost of a call does not grow with the program, and what is kept is bounded."""

from __future__ import annotations

import itertools
import runpy
from pathlib import Path
from typing import Any

import pytest
from operations import growth

from weft.core.ids import CallId, ThreadId
from weft.core.program import Program
from weft.core.program.reports import MOST_PARENTS_SENT
from weft.core.program.structure.parents import FEWEST_LISTED, PARENTS_A_CALL
from weft.core.program.structure.run_tree import MOST_IN_FRONTIER, RunTree
from weft.core.program.structure.runs import RunKind

WIDE = runpy.run_path(str(Path(__file__).parents[3] / "benchmarks" / "wide_programs.py"))
SHAPES: dict[str, Any] = WIDE["SHAPES"]


@pytest.mark.parametrize("shape", SHAPES)
def test_the_cost_of_a_call_does_not_grow_with_the_program(shape: str) -> None:
    """Runs, lineage, graph and process table do as many steps for each of 500 calls as for each of 100."""
    assert growth(lambda calls: SHAPES[shape](WIDE["Bookkeeping"](), calls), small=100, factor=5) < 1.5


def join(width: int, kind: RunKind) -> tuple[RunTree, list[str], Any]:
    """Make `width` calls at once, and then a call that joins them."""
    count = itertools.count()
    tree = RunTree(lambda: ThreadId(f"t{next(count)}"))
    names = [f"c{number}" for number in range(width)]
    for name in names:
        tree.start(name, None, kind=kind)
        tree.start_call(name, CallId(name))
    for name in names:
        tree.end_call(CallId(name))
        tree.end(name)
    return tree, names, tree.start_call("join", CallId("join"))


@pytest.mark.parametrize("kind", [RunKind.STAGE, RunKind.CODE])
def test_a_join_has_ten_thousand_parents(kind: RunKind) -> None:
    """All of them are parents of the join, the oldest first, exact or guesses; the join ends all threads but one."""
    _, names, opened = join(10_000, kind)
    assert list(opened.parents) == names
    assert list(opened.inexact) == (names if kind is RunKind.CODE else [])
    assert opened.thread_id == "t0"


def test_the_newest_calls_are_the_parents_of_a_very_wide_join() -> None:
    """What a program remembers is bounded: a frontier has a limit, and drops its oldest calls beyond it."""
    _, names, opened = join(MOST_IN_FRONTIER + 1, RunKind.STAGE)
    assert list(opened.parents) == names[-MOST_IN_FRONTIER * 3 // 4 :]


def test_calls_with_the_same_parents_share_them() -> None:
    """A stage after a wide stage costs no memory by the product of their widths."""
    tree, _, _ = join(500, RunKind.STAGE)
    tree.end("join")
    for name in ("x", "y"):
        tree.start(name, None, kind=RunKind.STAGE, stage="next")
    first, second = (tree.start_call(name, CallId(name)) for name in ("x", "y"))
    assert len(first.parents) == 500
    assert first.parents is second.parents


def test_guesses_are_listed_within_a_bound() -> None:
    """If every call may come after every other, calls list the newest parents only, and certain ones before guesses.
    The program still knows the others: a call that joins all of them ends all of them."""
    count = itertools.count()
    tree = RunTree(lambda: ThreadId(f"t{next(count)}"))
    tree.start("certain", None, kind=RunKind.STAGE)
    tree.start_call("certain", CallId("certain"))
    strands = [f"s{number}" for number in range(400)]
    for name in strands:
        tree.start(name, None)
        tree.start_call(name, CallId(name))
    tree.end_call(CallId("certain"))
    tree.end("certain")
    listed = 0
    for name in strands:
        tree.end_call(CallId(name))
        tree.end(name)
        tree.start(f"{name} again", None)
        opened = tree.start_call(f"{name} again", CallId(f"{name} again"))
        listed += len(opened.parents)
        assert opened.parents[0] == "certain"
        assert opened.parents[-1] == name
    assert len(opened.parents) == FEWEST_LISTED
    assert listed <= 801 * PARENTS_A_CALL + 400 * FEWEST_LISTED
    for name in strands:
        tree.end_call(CallId(f"{name} again"))
        tree.end(f"{name} again")
    assert tree._set_in_use().bit_count() == 400


def test_a_call_takes_few_parents_along() -> None:
    """The header of a call that joins a wide program is bounded. It names the newest parents; the graph has all."""
    program = Program("wide")
    branches = [program.branch() for _ in range(100)]
    calls = [(branch, branch.reports.start_call("run")) for branch in branches]
    for branch, identity in calls:
        branch.reports.end_call("run", identity)
        branch.end()
    identity = program.reports.start_call("join")
    assert identity.parents == tuple(call.call_id for _, call in calls[-MOST_PARENTS_SENT:])
    assert len(program.graph[identity.call_id].parents) == 100


def test_what_a_run_tree_keeps_is_bounded() -> None:
    """Runs inside runs that have ended, failed calls, tools and threads leave nothing behind."""
    count = itertools.count()
    tree = RunTree(lambda: ThreadId(f"t{next(count)}"))
    before: Any = None
    for number in range(5000):
        run, call = ("run", number), CallId(f"c{number}")
        tree.start(run, before)
        tree.start_call(run, call)
        if number % 3:
            tree.end_call(call)
        else:
            tree.drop_call(call)
        tree.start(("inside", number), run, kind=RunKind.STAGE)
        tree.note_tool(("inside", number), f"tool {number}")
        tree.end(before)
        tree.end(("inside", number - 1))
        before = run
    depth, node = 0, tree._runs[before]
    while node.parent is not None:
        depth, node = depth + 1, node.parent
    assert depth < 5
    assert len(tree._runs) < 5
    ancestry = tree._ancestry
    assert len(ancestry._calls) <= ancestry._limit == 2000
    assert sum(map(len, ancestry._released.values())) <= 2000
    assert len(tree._root.frontier.tools) <= 100  # type: ignore[union-attr]
