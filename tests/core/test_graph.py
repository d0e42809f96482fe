"""The run tree: which calls a call comes after, and which thread it continues."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.core.graph import ROOT, RunTree
from weft.core.ids import CallId, ThreadId


class Runs:
    """A run tree with readable names: threads are t0, t1, ... and a call is named as its run."""

    def __init__(self) -> None:
        count = itertools.count()
        self.tree = RunTree(lambda: ThreadId(f"t{next(count)}"))
        self.threads: dict[str, ThreadId] = {}
        self.parents: dict[str, set[CallId]] = {}

    def start(self, run: Hashable, parent: Hashable | None = None, anchor: Hashable = ROOT) -> None:
        self.tree.start(run, parent, anchor)

    def end(self, *runs: Hashable) -> None:
        for run in runs:
            self.tree.end(run)

    def begin(self, call: str, parent: Hashable | None = None, anchor: Hashable = ROOT) -> None:
        """A run that is a call begins."""
        self.tree.start(call, parent, anchor)
        thread, parents = self.tree.start_call(call, CallId(call), anchor)
        assert len(set(parents)) == len(parents)
        self.threads[call], self.parents[call] = thread, set(parents)

    def finish(self, *calls: str) -> None:
        """Runs that are calls end well."""
        for call in calls:
            self.tree.end_call(call, CallId(call))
            self.tree.end(call)

    def call(self, call: str, parent: Hashable | None = None, anchor: Hashable = ROOT) -> set[CallId]:
        """A whole call; gives its parents."""
        self.begin(call, parent, anchor)
        self.finish(call)
        return self.parents[call]


@pytest.fixture
def runs() -> Runs:
    return Runs()


# -- parents


def test_one_after_another_is_a_chain(runs: Runs) -> None:
    """Each call comes after the one before it, on one thread; the first comes after none."""
    assert [runs.call(name) for name in ("a", "b", "c")] == [set(), {"a"}, {"b"}]
    assert set(runs.threads.values()) == {"t0"}


def test_overlapping_siblings_are_branches(runs: Runs) -> None:
    """Calls that overlap come after the same call, each on a thread of its own."""
    runs.call("a")
    runs.begin("x")
    runs.begin("y")
    assert runs.parents["x"] == runs.parents["y"] == {"a"}
    assert (runs.threads["x"], runs.threads["y"]) == ("t0", "t1")


@pytest.mark.parametrize("order", list(itertools.permutations("xyz")))
def test_what_follows_branches_joins_them(runs: Runs, order: tuple[str, ...]) -> None:
    """A call after branches comes after all of them, in whatever order they finished, and of nothing older."""
    runs.call("a")
    for name in "xyz":
        runs.begin(name)
    runs.finish(*order)
    assert runs.call("join") == {"x", "y", "z"}
    assert runs.call("after") == {"join"}


def test_a_call_between_two_finishes_waits_for_one(runs: Runs) -> None:
    """A call that starts while a branch still runs comes only after what has finished."""
    runs.begin("slow")
    runs.call("quick")
    assert runs.call("next") == {"quick"}
    runs.finish("slow")
    assert runs.call("join") == {"next", "slow"}


def test_a_run_is_as_its_last_call(runs: Runs) -> None:
    """What follows a run comes after the run's last call, not after those inside it."""
    runs.start("chain")
    assert runs.call("a", "chain") == set()
    assert runs.call("b", "chain") == {"a"}
    runs.end("chain")
    assert runs.call("c") == {"b"}


def test_runs_nest_to_any_depth(runs: Runs) -> None:
    """Calls deep inside runs are parents of what comes after the outermost one."""
    runs.call("before")
    parent: Hashable = None
    for depth in range(20):
        runs.start(depth, parent)
        parent = depth
    assert runs.call("deep", parent) == {"before"}
    runs.end(*reversed(range(20)))
    assert runs.call("after") == {"deep"}


def test_overlapping_runs_branch_as_their_calls_do(runs: Runs) -> None:
    """Two runs that overlap are branches, each a chain inside; what follows joins their last calls."""
    runs.call("a")
    runs.start("left")
    runs.start("right")
    assert runs.call("l1", "left") == {"a"}
    assert runs.call("r1", "right") == {"a"}
    assert runs.call("l2", "left") == {"l1"}
    runs.end("right", "left")
    assert runs.call("join") == {"r1", "l2"}


def test_a_run_without_calls_changes_nothing(runs: Runs) -> None:
    """Tools and chains that call no model leave the graph as it was, alone or beside others."""
    runs.call("a")
    runs.start("short tool")
    runs.start("long tool")
    runs.begin("b")
    runs.end("short tool")
    runs.finish("b")
    runs.end("long tool")
    assert runs.call("c") == {"b"}


def test_a_retry_comes_after_what_the_failed_call_came_after(runs: Runs) -> None:
    """A call that gave no result is nobody's parent."""
    runs.call("a")
    runs.begin("failed")
    runs.end("failed")
    assert runs.call("retry") == {"a"}
    assert runs.call("b") == {"retry"}


def test_a_call_that_failed_beside_others_leaves_them_alone(runs: Runs) -> None:
    """A branch that gave no result is not waited for, nor is what it came after."""
    runs.call("a")
    runs.begin("b")
    runs.begin("failed")
    runs.finish("b")
    runs.end("failed")
    assert runs.call("c") == {"b"}


def test_a_retry_inside_the_same_run(runs: Runs) -> None:
    """A run may try its call again: the second try comes after what the first came after."""
    runs.call("a")
    runs.start("model")
    for attempt in ("first", "second"):
        assert runs.tree.start_call("model", CallId(attempt))[1] == ("a",)
    runs.tree.end_call("model", CallId("second"))
    runs.end("model")
    assert runs.call("b") == {"second"}


def test_two_calls_of_one_run_are_a_chain(runs: Runs) -> None:
    """What follows a finished call inside its own run comes after it, as `end_call` says."""
    runs.start("client")
    first, _ = runs.tree.start_call("client", CallId("first"))
    runs.tree.end_call("client", CallId("first"))
    assert runs.tree.start_call("client", CallId("second")) == (first, ("first",))


def test_ending_twice_or_an_unknown_run_is_harmless(runs: Runs) -> None:
    """Ends without a start, and second ends, change nothing."""
    runs.end("nobody")
    runs.tree.end_call("nobody", CallId("x"))
    runs.call("a")
    runs.end("a", "a")
    assert runs.call("b") == {"a"}


def test_a_run_that_outlives_its_parent_counts_at_the_top(runs: Runs) -> None:
    """A call whose enclosing run ended first is still a parent of what comes after."""
    runs.start("chain")
    runs.begin("late", "chain")
    runs.end("chain")
    assert runs.call("beside") == set()
    runs.finish("late")
    assert runs.call("after") == {"beside", "late"}


# -- anchors and unknown parents


@pytest.mark.parametrize("parent", [None, "never reported"])
def test_an_unknown_parent_means_the_anchor(runs: Runs, parent: str | None) -> None:
    """A run whose parent was not reported is inside the branch it was handed to."""
    runs.call("a")
    runs.start("branch")
    assert runs.call("b", parent, anchor="branch") == {"a"}
    assert runs.call("c", parent, anchor="branch") == {"b"}
    assert runs.call("beside", parent) == {"a"}, "not before the branch has ended"
    runs.end("branch")
    assert runs.call("join") == {"c", "beside"}


def test_an_ended_anchor_means_the_top(runs: Runs) -> None:
    """A handle that is used after its branch ended goes on at the program's top."""
    runs.start("branch")
    runs.call("a", anchor="branch")
    runs.end("branch")
    assert runs.call("b", anchor="branch") == {"a"}
    assert runs.call("c") == {"b"}


def test_a_call_of_a_run_that_was_not_reported(runs: Runs) -> None:
    """A call need not have been started as a run first."""
    runs.call("a")
    assert runs.tree.start_call("unreported", CallId("x")) == ("t0", ("a",))
    runs.finish("unreported")
    assert runs.call("b") == {"unreported"}


def test_branches_inside_a_branch(runs: Runs) -> None:
    """A branch of a branch joins into it, and both into the top."""
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
    """The call after branches goes on with the thread of the branch that started first; the other thread is over."""
    runs.call("a")
    runs.begin("x")
    runs.begin("y")
    runs.finish(*order)
    runs.call("join")
    runs.call("after")
    assert runs.threads == {"a": "t0", "x": "t0", "y": "t1", "join": "t0", "after": "t0"}


def test_a_branch_is_one_thread(runs: Runs) -> None:
    """A chain inside a branch stays on the branch's thread, whatever runs beside it."""
    runs.start("left")
    runs.start("right")
    for name in ("l1", "r1", "l2", "r2"):
        runs.call(name, "left" if name[0] == "l" else "right")
    assert runs.threads == {"l1": "t0", "l2": "t0", "r1": "t1", "r2": "t1"}


def test_a_continued_thread_cannot_be_continued_again(runs: Runs) -> None:
    """Only one of the calls that come after a call takes its thread on; the others begin new ones."""
    runs.call("a")
    for name in "xyz":
        runs.begin(name)
    assert [runs.threads[name] for name in "axyz"] == ["t0", "t0", "t1", "t2"]


def test_react(runs: Runs) -> None:
    """Model, two tools at once with a call each, model again: one fork, one join, two threads."""
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


# -- any tree

step = st.tuples(st.sampled_from(["start", "begin", "finish", "fail", "end"]), st.integers(0, 1_000_000))


@given(st.lists(step, min_size=10, max_size=60))
def test_any_tree_of_runs_gives_a_dag_in_order(steps: list[tuple[str, int]]) -> None:
    """However runs nest, overlap and fail: parents had finished before, none is an ancestor of another, and each thread
    is a chain."""
    runs = Runs()
    containers: list[Hashable] = [ROOT]
    children: dict[Hashable, set[Hashable]] = {ROOT: set()}
    above: dict[Hashable, Hashable] = {}
    in_flight: list[str] = []
    finished: set[str] = set()
    names = itertools.count()

    def pick(options: list[Hashable], number: int) -> Hashable:
        return options[number % len(options)]

    def forget(run: Hashable) -> None:
        children[above[run]].discard(run)

    for action, number in steps:
        idle = [run for run in containers if run != ROOT and not children[run]]
        if action == "start":
            fresh, parent = next(names), pick(containers, number)
            runs.start(fresh, parent)
            containers.append(fresh)
            children[fresh], above[fresh] = set(), parent
            children[parent].add(fresh)
        elif action == "begin":
            call, parent = f"c{next(names)}", pick(containers, number)
            runs.begin(call, parent)
            assert runs.parents[call] <= finished
            in_flight.append(call)
            above[call] = parent
            children[parent].add(call)
        elif action in ("finish", "fail") and in_flight:
            call = in_flight.pop(number % len(in_flight))
            if action == "finish":
                runs.finish(call)
                finished.add(call)
            else:
                runs.end(call)
            forget(call)
        elif action == "end" and idle:
            run = pick(idle, number)
            runs.end(run)
            containers.remove(run)
            forget(run)

    ancestors: dict[str, set[str]] = {}
    last: dict[ThreadId, str] = {}
    for call, parents in runs.parents.items():  # in the order of their start
        for parent in parents:
            assert not parents & ancestors[parent], "a parent that another parent implies"
        ancestors[call] = set(parents).union(*(ancestors[parent] for parent in parents))
        thread = runs.threads[call]
        if thread in last:
            assert last[thread] in parents, "a thread goes on with a call that came after its last one"
        last[thread] = call


def test_thread_ids_come_from_the_source_that_was_passed_in() -> None:
    """The tree makes no ids itself, and asks for no more than it needs."""
    made: list[str] = []

    def make() -> ThreadId:
        made.append(f"mine-{len(made)}")
        return ThreadId(made[-1])

    source: Callable[[], ThreadId] = make
    tree = RunTree(source)
    assert made == []
    assert tree.start_call("run", CallId("c")) == ("mine-0", ())
