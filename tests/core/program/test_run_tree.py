"""The run tree: the parents of a call, how certain they are, and the thread that the call continues."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable

import pytest
from named_runs import Runs

from weft.core.ids import CallId, ThreadId
from weft.core.program.structure.run_tree import RunTree

# -- parents


def test_one_after_another_is_a_chain(runs: Runs) -> None:
    """Each call comes after the call before it, on one thread; the first call has no parent."""
    assert [runs.call(name) for name in ("a", "b", "c")] == [set(), {"a"}, {"b"}]
    assert set(runs.threads.values()) == {"t0"}


def test_overlapping_siblings_are_branches(runs: Runs) -> None:
    """Calls that overlap have the same parent, and each has its own thread."""
    runs.call("a")
    runs.begin("x")
    runs.begin("y")
    assert runs.parents["x"] == runs.parents["y"] == {"a"}
    assert (runs.threads["x"], runs.threads["y"]) == ("t0", "t1")


@pytest.mark.parametrize("order", list(itertools.permutations("xyz")))
def test_a_call_after_branches_joins_them(runs: Runs, order: tuple[str, ...]) -> None:
    """Its parents are all branches, in any order in which they finished, and no older call."""
    runs.call("a")
    for name in "xyz":
        runs.begin(name)
    runs.finish(*order)
    assert runs.call("join") == {"x", "y", "z"}
    assert runs.call("after") == {"join"}


def test_a_call_between_two_finishes_waits_for_one(runs: Runs) -> None:
    """A call that starts while a branch still runs comes only after the branch that has finished."""
    runs.begin("slow")
    runs.call("quick")
    assert runs.call("next") == {"quick"}
    runs.finish("slow")
    assert runs.call("join") == {"next", "slow"}


def test_a_call_after_a_run_comes_after_the_last_call_of_the_run(runs: Runs) -> None:
    """The earlier calls inside the run are not parents."""
    runs.start("chain")
    assert runs.call("a", "chain") == set()
    assert runs.call("b", "chain") == {"a"}
    runs.end("chain")
    assert runs.call("c") == {"b"}


def test_runs_nest_to_any_depth(runs: Runs) -> None:
    """A call deep inside runs is the parent of the call after the outermost run."""
    runs.call("before")
    parent: Hashable = None
    for depth in range(20):
        runs.start(depth, parent)
        parent = depth
    assert runs.call("deep", parent) == {"before"}
    runs.end(*reversed(range(20)))
    assert runs.call("after") == {"deep"}


def test_overlapping_runs_branch_as_their_calls_do(runs: Runs) -> None:
    """Two runs that overlap are branches, each a chain inside; the next call joins their last calls."""
    runs.call("a")
    runs.start("left")
    runs.start("right")
    assert runs.call("l1", "left") == {"a"}
    assert runs.call("r1", "right") == {"a"}
    assert runs.call("l2", "left") == {"l1"}
    runs.end("right", "left")
    assert runs.call("join") == {"r1", "l2"}


def test_a_run_without_calls_changes_nothing(runs: Runs) -> None:
    """Tools and chains that call no model leave the graph as it was, alone or concurrent with others."""
    runs.call("a")
    runs.start("short tool")
    runs.start("long tool")
    runs.begin("b")
    runs.end("short tool")
    runs.finish("b")
    runs.end("long tool")
    assert runs.call("c") == {"b"}


def test_a_retry_has_the_parents_of_the_failed_call(runs: Runs) -> None:
    """A call without a result is not a parent."""
    runs.call("a")
    runs.begin("failed")
    runs.end("failed")
    assert runs.call("retry") == {"a"}
    assert runs.call("b") == {"retry"}


def test_a_failed_branch_does_not_affect_the_others(runs: Runs) -> None:
    """Neither a branch without a result nor its parent is a parent of the next call."""
    runs.call("a")
    runs.begin("b")
    runs.begin("failed")
    runs.finish("b")
    runs.end("failed")
    assert runs.call("c") == {"b"}


def test_a_retry_inside_the_same_run(runs: Runs) -> None:
    """A run may retry its call: the second attempt has the parents of the first."""
    runs.call("a")
    runs.start("model")
    for attempt in ("first", "second"):
        runs.open("model", attempt)
        assert runs.parents[attempt] == {"a"}
    runs.tree.end_call(CallId("second"))
    runs.end("model")
    assert runs.call("b") == {"second"}


def test_two_calls_of_one_run_are_a_chain(runs: Runs) -> None:
    """A call comes after a finished call of the same run, as `end_call` says."""
    runs.start("client")
    runs.open("client", "first")
    runs.tree.end_call(CallId("first"))
    runs.open("client", "second")
    assert runs.parents["second"] == {"first"}
    assert runs.inexact["second"] == set()
    assert runs.threads["first"] == runs.threads["second"]


def test_ending_twice_or_an_unknown_run_is_harmless(runs: Runs) -> None:
    """Ends without a start, and second ends, change nothing."""
    runs.end("unknown")
    runs.tree.end_call(CallId("x"))
    runs.tree.drop_call(CallId("x"))
    runs.tree.drop_call(CallId("x"))
    runs.tree.note_tool("unknown", "search")
    runs.call("a")
    runs.end("a", "a")
    assert runs.call("b") == {"a"}


def test_the_call_of_a_run_that_outlives_its_parent_counts_at_the_top(runs: Runs) -> None:
    """A call whose enclosing run ended first is still a parent of the next call."""
    runs.start("chain")
    runs.begin("late", "chain")
    runs.end("chain")
    assert runs.call("background") == set()
    runs.finish("late")
    assert runs.call("after") == {"background", "late"}


# -- anchors and unknown parents


@pytest.mark.parametrize("parent", [None, "never reported"])
def test_an_unknown_parent_means_the_anchor(runs: Runs, parent: str | None) -> None:
    """A run whose parent was not reported is inside the branch that it was passed to."""
    runs.call("a")
    runs.start("branch")
    assert runs.call("b", parent, anchor="branch") == {"a"}
    assert runs.call("c", parent, anchor="branch") == {"b"}
    assert runs.call("background", parent) == {"a"}, "the branch has not ended"
    runs.end("branch")
    assert runs.call("join") == {"c", "background"}


def test_an_ended_anchor_means_the_top(runs: Runs) -> None:
    """A handle that is used after its branch ended continues at the top of the program."""
    runs.start("branch")
    runs.call("a", anchor="branch")
    runs.end("branch")
    assert runs.call("b", anchor="branch") == {"a"}
    assert runs.call("c") == {"b"}


def test_a_call_of_a_run_that_was_not_reported(runs: Runs) -> None:
    """A call may start in a run that was not reported."""
    runs.call("a")
    runs.open("unreported", "x")
    assert (runs.threads["x"], runs.parents["x"]) == ("t0", {"a"})
    runs.tree.end_call(CallId("x"))
    assert runs.call("b") == {"x"}, "an unreported run ends with its call"
    runs.end("unreported")
    assert runs.call("c") == {"b"}


def test_branches_inside_a_branch(runs: Runs) -> None:
    """A branch of a branch joins the outer branch, and the outer branch joins the top."""
    runs.start("outer")
    runs.call("o1", anchor="outer")
    runs.start("inner", None, anchor="outer")
    assert runs.call("i1", anchor="inner") == {"o1"}
    runs.end("inner")
    assert runs.call("o2", anchor="outer") == {"i1"}
    runs.end("outer")
    assert runs.call("after") == {"o2"}


# -- threads


@pytest.mark.parametrize("order", ["xy", "yx"])
def test_a_join_continues_the_oldest_thread(runs: Runs, order: str) -> None:
    """The call after branches continues the thread of the branch that started first; the other thread ends."""
    runs.call("a")
    runs.begin("x")
    runs.begin("y")
    runs.finish(*order)
    runs.call("join")
    runs.call("after")
    assert runs.threads == {"a": "t0", "x": "t0", "y": "t1", "join": "t0", "after": "t0"}


def test_a_branch_is_one_thread(runs: Runs) -> None:
    """A chain inside a branch stays on the branch's thread while other branches run."""
    runs.start("left")
    runs.start("right")
    for name in ("l1", "r1", "l2", "r2"):
        runs.call(name, "left" if name[0] == "l" else "right")
    assert runs.threads == {"l1": "t0", "l2": "t0", "r1": "t1", "r2": "t1"}


def test_a_continued_thread_cannot_be_continued_again(runs: Runs) -> None:
    """Only one of the calls after a call continues its thread; the others begin new threads."""
    runs.call("a")
    for name in "xyz":
        runs.begin(name)
    assert [runs.threads[name] for name in "axyz"] == ["t0", "t0", "t1", "t2"]


def test_react(runs: Runs) -> None:
    """A model, two concurrent tools with a call each, and the model again: one fork, one join, two threads."""
    runs.start("agent")
    runs.start("model node", "agent")
    runs.call("think", "model node")
    runs.end("model node")
    runs.start("tools node", "agent")
    runs.start("search", "tools node")
    runs.start("calculator", "tools node")
    runs.begin("summarise", "search")
    runs.begin("compute", "calculator")
    runs.finish("compute")
    runs.end("calculator")
    runs.finish("summarise")
    runs.end("search", "tools node")
    runs.start("model node 2", "agent")
    runs.call("answer", "model node 2")
    runs.end("model node 2", "agent")
    assert runs.parents == {
        "think": set(),
        "summarise": {"think"},
        "compute": {"think"},
        "answer": {"summarise", "compute"},
    }
    assert runs.threads == {"think": "t0", "summarise": "t0", "compute": "t1", "answer": "t0"}


# -- failed calls


@pytest.mark.parametrize("before", [[], ["a"]])
def test_a_retry_continues_the_thread_of_the_failed_call(runs: Runs, before: list[str]) -> None:
    """A call that failed releases its thread, also a thread that it had begun itself."""
    for name in before:
        runs.call(name)
    runs.begin("failed")
    runs.tree.drop_call(CallId("failed"))
    runs.end("failed")
    assert runs.call("retry") == set(before)
    assert set(runs.threads.values()) == {"t0"}


def test_a_retry_among_branches_continues_the_failed_calls_thread(runs: Runs) -> None:
    """Each thread that a failed call releases is continued once."""
    runs.call("a")
    for name in ("x", "y", "z"):
        runs.begin(name)
    for name in ("y", "z"):
        runs.tree.drop_call(CallId(name))
        runs.end(name)
    for name in ("again", "once more", "new"):
        runs.begin(name)
        assert runs.parents[name] == {"a"}
    assert [runs.threads[name] for name in ("x", "y", "z")] == ["t0", "t1", "t2"]
    assert {runs.threads["again"], runs.threads["once more"]} == {"t1", "t2"}
    assert runs.threads["new"] == "t3"


def test_a_cancelled_call_gives_its_thread_to_the_next(runs: Runs) -> None:
    """A call that a time-out cancelled is often made again, as a failed one is."""
    runs.begin("cancelled")
    runs.tree.drop_call(CallId("cancelled"))
    runs.end("cancelled")
    assert runs.call("next") == set()
    assert runs.threads["next"] == runs.threads["cancelled"]


def test_a_failed_call_leaves_no_doubt(runs: Runs) -> None:
    """A failed call does not overlap the next call, even while its run continues."""
    runs.start("client")
    runs.open("client", "failed")
    runs.tree.drop_call(CallId("failed"))
    runs.open("client", "retry")
    runs.tree.end_call(CallId("retry"))
    runs.open("client", "next")
    assert (runs.parents["next"], runs.inexact["next"]) == ({"retry"}, set())


# -- tools


def test_a_call_names_the_tools_before_it(runs: Runs) -> None:
    """Tools that ran after a call's parents are noted with the call, each once."""
    runs.call("think")
    for tool in ("search", "calculator"):
        runs.start(tool)
        runs.tree.note_tool(tool, tool)
    runs.end("search", "calculator")
    runs.start("again")
    runs.tree.note_tool("again", "search")
    runs.end("again")
    runs.call("answer")
    assert runs.tools == {"think": (), "answer": ("search", "calculator")}
    runs.call("more")
    assert runs.tools["more"] == ()


def test_a_call_inside_a_tool_names_the_tool(runs: Runs) -> None:
    """The enclosing tool is noted with the first call inside it, and with the call after it."""
    runs.call("think")
    runs.start("expert")
    runs.tree.note_tool("expert", "expert")
    runs.call("inner", "expert")
    runs.call("second", "expert")
    runs.end("expert")
    runs.call("answer")
    assert runs.tools == {"think": (), "inner": ("expert",), "second": (), "answer": ("expert",)}


def test_a_tool_that_was_not_ended_ends_with_the_run_around_it(runs: Runs) -> None:
    """A framework may not report that tools were cancelled. What follows the run around them follows their calls."""
    runs.start("node")
    for tool, parent in (("slow", "node"), ("inner", "slow")):
        runs.start(tool, parent)
        runs.tree.note_tool(tool, tool)
        runs.call(f"in {tool}", tool)
    assert set(runs.tree.end("node")) == {"node", "slow", "inner"}
    assert runs.call("answer") == {"in inner"}
    assert runs.inexact["answer"] == set()
    assert not runs.tree.is_open("slow")
    assert runs.tree.end("slow") == ("slow",)


def test_tools_that_have_ended_are_forgotten(runs: Runs) -> None:
    """A run around many tools keeps none of them, even if two handles of the program report each."""
    runs.start("node")
    for number in range(3):
        runs.start(f"tool {number}")
        runs.tree.note_tool(f"tool {number}", "search")
        runs.start(f"tool {number}", "node")
        runs.tree.note_tool(f"tool {number}", "search")
        runs.end(f"tool {number}")
    assert [each.tools for each in runs.tree._runs.values()] == [{}, {}]
    assert runs.tree.end("node") == ("node",)


# -- memory


def test_a_long_program_forgets_old_calls() -> None:
    """Old calls are forgotten, except those that an open run still needs."""
    runs = Runs()
    runs.call("first")
    runs.start("slow")
    runs.start("other")
    for number in range(5000):
        runs.call(f"c{number}", "other")
    assert len(runs.tree._ancestry._calls) < 2500
    assert len(runs.tree._ended) <= 1000
    assert runs.call("late", "slow") == {"first"}
    runs.end("slow", "other")
    assert runs.call("join") == {"late", "c4999"}


def test_thread_ids_come_from_the_source_that_was_passed_in() -> None:
    """The tree makes no ids itself, and requests only the ids that it uses."""
    made: list[str] = []

    def make() -> ThreadId:
        made.append(f"mine-{len(made)}")
        return ThreadId(made[-1])

    source: Callable[[], ThreadId] = make
    tree = RunTree(source)
    assert made == []
    assert tree.start_call("run", CallId("c")) == ("mine-0", (), (), ())
