"""The run tree: the parents of a call, how certain they are, and the thread that the call continues."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Generator, Hashable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.core.ids import CallId, ThreadId
from weft.core.program.lineage import NOTHING, Content, Inputs
from weft.core.program.run_tree import ROOT, RunTree
from weft.core.program.runs import RunKind


class Runs:
    """A run tree with readable names: threads are t0, t1, ..., and a call has the name of its run."""

    def __init__(self) -> None:
        count = itertools.count()
        self.tree = RunTree(lambda: ThreadId(f"t{next(count)}"))
        self.threads: dict[str, ThreadId] = {}
        self.parents: dict[str, set[CallId]] = {}
        self.inexact: dict[str, set[CallId]] = {}
        self.tools: dict[str, tuple[str, ...]] = {}

    def start(
        self,
        run: Hashable,
        parent: Hashable | None = None,
        anchor: Hashable = ROOT,
        kind: RunKind = RunKind.CODE,
        stage: Hashable = None,
    ) -> None:
        self.tree.start(run, parent, anchor, kind, stage=stage)

    def end(self, *runs: Hashable) -> None:
        for run in runs:
            self.tree.end(run)

    def begin(
        self,
        call: str,
        parent: Hashable | None = None,
        anchor: Hashable = ROOT,
        inputs: Inputs = NOTHING,
        *,
        kind: RunKind = RunKind.CODE,
        stage: Hashable = None,
    ) -> None:
        """Start a run that is a call."""
        self.tree.start(call, parent, anchor, kind, stage=stage)
        self.open(call, call, anchor, inputs)

    def open(self, run: Hashable, call: str, anchor: Hashable = ROOT, inputs: Inputs = NOTHING) -> None:
        """Start a call of a run."""
        opened = self.tree.start_call(run, CallId(call), anchor, inputs)
        assert len(set(opened.parents)) == len(opened.parents)
        assert set(opened.inexact) <= set(opened.parents)
        self.threads[call], self.parents[call] = opened.thread_id, set(opened.parents)
        self.inexact[call], self.tools[call] = set(opened.inexact), opened.tools

    def finish(self, *calls: str) -> None:
        """End runs that are calls with success; the output of each has the id of the call."""
        for call in calls:
            self.tree.end_call(CallId(call), content_of(call))
            self.tree.end(call)

    def call(
        self, call: str, parent: Hashable | None = None, anchor: Hashable = ROOT, inputs: Inputs = NOTHING
    ) -> set[CallId]:
        """Make a whole call and return its parents."""
        self.begin(call, parent, anchor, inputs)
        self.finish(call)
        return self.parents[call]


def content_of(*calls: str) -> Content:
    """Return the outputs of some calls, or an input that contains them."""
    return Content(ids=calls)


@pytest.fixture
def runs() -> Runs:
    return Runs()


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


# -- certainty


def test_calls_that_do_not_overlap_are_exact(runs: Runs) -> None:
    """They are a chain without guesses."""
    for name in "abc":
        runs.call(name)
    assert not any(runs.inexact.values())


def test_a_join_in_code_is_a_guess(runs: Runs) -> None:
    """After calls that overlapped in one run, the next call may be their join or the next step of one strand."""
    runs.call("a")
    runs.begin("x")
    runs.begin("y")
    assert runs.inexact["y"] == set(), "a fork is exact"
    runs.finish("x", "y")
    assert runs.call("join") == {"x", "y"}
    assert runs.inexact["join"] == {"x", "y"}


def test_a_text_of_two_calls_excludes_neither(runs: Runs) -> None:
    """A join whose input has the text of x, and a text of both y and z, may come after these three, not after w."""
    same, other = Content(texts=("two of them say just this",)), Content(texts=("and one says that",))
    for call in "wxyz":
        runs.begin(call)
    for call, content in (("w", Content(texts=("a fourth thing altogether",))), ("x", other), ("y", same), ("z", same)):
        runs.tree.end_call(CallId(call), content)
        runs.tree.end(call)
    assert runs.call("join", inputs=Content(texts=("and one says that; two of them say just this",))) == {"x", "y", "z"}
    assert runs.inexact["join"] == {"y", "z"}


def test_guesses_continue_until_lineage_or_the_end_of_the_run(runs: Runs) -> None:
    """After a guess, the next calls are guesses as well, until the run ends or lineage proves a parent."""
    runs.start("node", kind=RunKind.STAGE)
    runs.begin("x", "node")
    runs.begin("y", "node")
    runs.finish("x", "y")
    runs.call("join", "node")
    assert runs.call("after", "node") == {"join"}
    assert runs.inexact["after"] == {"join"}
    assert runs.call("proven", "node", inputs=content_of("after")) == {"after"}
    assert runs.inexact["proven"] == set()
    assert runs.call("next", "node") == {"proven"}
    assert runs.inexact["next"] == set()
    runs.end("node")
    runs.call("last")
    assert runs.inexact["last"] == set()


def test_a_join_after_a_run_is_exact(runs: Runs) -> None:
    """Calls that overlapped inside a run have all ended when the run has ended."""
    runs.start("node")
    runs.begin("x", "node")
    runs.begin("y", "node")
    runs.finish("x", "y")
    runs.end("node")
    assert runs.call("join") == {"x", "y"}
    assert runs.inexact["join"] == set()


@pytest.mark.parametrize("kind", [RunKind.STAGE, RunKind.BRANCH])
def test_stages_are_exact(runs: Runs, kind: RunKind) -> None:
    """If a framework starts runs concurrently, each waits for all stages before, and the next stage waits for all.

    That holds for branches as well, if only branches overlap.
    """
    for stage in ("ab", "cd", "e"):
        for name in stage:
            runs.begin(name, kind=kind)
        runs.finish(*stage)
    assert runs.parents == {"a": set(), "b": set(), "c": {"a", "b"}, "d": {"a", "b"}, "e": {"c", "d"}}
    assert not any(runs.inexact.values())


def test_runs_of_one_stage_do_not_wait_for_each_other(runs: Runs) -> None:
    """If only one of them can run at a time, they run one after another, and are still branches."""
    runs.call("before")
    for number, stage in enumerate(("ab", "cd", "e")):
        for name in stage:
            runs.begin(name, kind=RunKind.STAGE, stage=number)
            runs.finish(name)
    assert {name: runs.parents[name] for name in "abcde"} == {
        "a": {"before"},
        "b": {"before"},
        "c": {"a", "b"},
        "d": {"a", "b"},
        "e": {"c", "d"},
    }
    assert not any(runs.inexact.values())


def test_a_stage_that_overlaps_user_code(runs: Runs) -> None:
    """A call that a framework waits for stays certain while user code runs a concurrent call."""
    runs.begin("stage", kind=RunKind.STAGE)
    runs.begin("code")
    runs.finish("stage", "code")
    assert runs.call("join") == {"stage", "code"}
    assert runs.inexact["join"] == {"code"}


@pytest.mark.parametrize("last", ["branch", "strand"])
def test_a_branch_that_overlaps_other_code(runs: Runs, last: str) -> None:
    """The other code may go on without waiting for the branch, so the edges after both are guesses."""
    runs.call("before")
    runs.start("branch", kind=RunKind.BRANCH)
    runs.begin("inside", "branch")
    runs.begin("strand")
    if last == "strand":
        runs.finish("inside")
        runs.end("branch")
    runs.finish("strand")
    if last == "branch":
        runs.finish("inside")
        runs.end("branch")
    assert runs.parents["strand"] == runs.parents["inside"] == {"before"}
    assert runs.call("next") == {"inside", "strand"}
    assert runs.inexact["next"] == {"inside", "strand"}


def test_other_code_that_overlapped_branches(runs: Runs) -> None:
    """Branches next to each other are exact. Code that overlapped with them, and ends later, makes them guesses."""
    runs.start("code")
    for name in "xy":
        runs.start(f"branch {name}", kind=RunKind.BRANCH)
        runs.begin(name, f"branch {name}")
    runs.finish("x", "y")
    runs.end("branch x", "branch y")
    assert runs.call("join") == {"x", "y"}
    assert runs.inexact["join"] == set()
    runs.call("slow", "code")
    runs.end("code")
    assert runs.call("next") == {"join", "slow"}
    assert runs.inexact["next"] == {"join", "slow"}


def test_a_guess_stays_a_guess_inside_the_next_run(runs: Runs) -> None:
    """The first call of the run comes after guesses; the next call inside is certain, the call after the run is not."""
    runs.begin("x")
    runs.begin("y")
    runs.finish("x", "y")
    runs.start("chain")
    runs.start("step", "chain", kind=RunKind.STEP)
    runs.call("first", "step")
    runs.end("step")
    assert runs.inexact["first"] == {"x", "y"}
    runs.call("second", "chain")
    assert (runs.parents["second"], runs.inexact["second"]) == ({"first"}, set())
    runs.end("chain")
    runs.call("after")
    assert (runs.parents["after"], runs.inexact["after"]) == ({"second"}, {"second"})


def test_a_tool_without_calls_causes_no_guesses(runs: Runs) -> None:
    """Only a run with calls can be a strand."""
    runs.start("tool")
    for name in "ab":
        runs.call(name)
    runs.end("tool")
    runs.call("c")
    assert not any(runs.inexact.values())


def test_calls_of_one_run_at_once(runs: Runs) -> None:
    """Each concurrent call of a run is a branch, and the next call joins all of them."""
    runs.start("node")
    for name in "xyz":
        runs.open("node", name)
        assert runs.parents[name] == set()
    for name in "zxy":
        runs.tree.end_call(CallId(name))
    runs.open("node", "join")
    assert runs.parents["join"] == {"x", "y", "z"}


def test_calls_of_an_unreported_run_at_once(runs: Runs) -> None:
    """The same holds for a run that was not reported; it ends with its last call."""
    runs.open("client", "x")
    runs.open("client", "y")
    runs.tree.end_call(CallId("x"))
    assert runs.call("background") == set()
    runs.tree.end_call(CallId("y"))
    assert runs.call("join") == {"x", "y", "background"}


# -- steps of a stream


def test_a_step_that_was_opened_early(runs: Runs) -> None:
    """A sequence that streams opens all steps at once; each step still comes after the calls of the step before it."""
    runs.call("a")
    runs.start("sequence")
    for step in ("one", "two", "three"):
        runs.start(step, "sequence", kind=RunKind.STEP)
    for step in ("one", "two", "three"):
        runs.call(f"call of {step}", step)
        runs.end(step)
    assert [runs.parents[f"call of {step}"] for step in ("one", "two", "three")] == [
        {"a"},
        {"call of one"},
        {"call of two"},
    ]
    assert set(runs.threads.values()) == {"t0"}


def test_a_step_that_streams_before_the_one_before_it_ends(runs: Runs) -> None:
    """A step that calls before the previous step has ended overlaps it; the next call waits for both."""
    runs.start("sequence")
    runs.begin("one", "sequence", kind=RunKind.STEP)
    runs.start("two", "sequence", kind=RunKind.STEP)
    assert runs.call("early", "two") == set()
    runs.finish("one")
    assert runs.call("late", "two") == {"early"}
    runs.end("two", "sequence")
    assert runs.call("join") == {"one", "late"}


def test_branches_in_a_step_that_was_opened_early(runs: Runs) -> None:
    """Branches that were opened with their step have the step's parents; the slow branch does not come after the quick
    one."""
    runs.start("sequence")
    runs.begin("one", "sequence", kind=RunKind.STEP)
    runs.start("fork", "sequence", kind=RunKind.STEP)
    runs.start("left", "fork", kind=RunKind.STAGE)
    runs.start("right", "fork", kind=RunKind.STAGE)
    runs.finish("one")
    assert runs.call("l", "left") == {"one"}
    runs.end("left")
    assert runs.call("r", "right") == {"one"}
    runs.end("right", "fork", "sequence")
    assert runs.call("join") == {"l", "r"}
    assert not any(runs.inexact.values())


# -- runs that outlive their enclosing runs


def test_a_run_that_outlives_its_parent_joins_the_nearest_enclosing_run(runs: Runs) -> None:
    """Its call counts in the run that encloses its parent, not at the top."""
    runs.start("outer")
    runs.start("inner", "outer")
    runs.begin("late", "inner")
    runs.end("inner")
    runs.finish("late")
    assert runs.call("background") == set(), "the top has not waited for it"
    assert runs.call("in outer", "outer") == {"late"}
    runs.end("outer")
    assert runs.call("after") == {"background", "in outer"}


def test_a_run_that_starts_in_one_that_has_ended(runs: Runs) -> None:
    """The new run is inside the nearest enclosing run that is open."""
    runs.start("outer")
    runs.start("inner", "outer")
    runs.call("a", "inner")
    runs.end("inner")
    assert runs.call("b", "inner") == {"a"}
    assert runs.call("background") == set()
    assert runs.call("c", "outer") == {"b"}


def test_a_call_that_outlives_its_parent_run_is_a_guess(runs: Runs) -> None:
    """It is not known whether the next call waits for it."""
    runs.start("inner")
    runs.begin("late", "inner")
    runs.end("inner")
    runs.begin("background")
    runs.finish("late", "background")
    runs.call("join")
    assert runs.inexact["join"] == {"late", "background"}


def test_a_call_that_outlives_its_parent_run_overlaps_the_next_calls(runs: Runs) -> None:
    """While it runs, the calls of the enclosing run may be an independent strand."""
    runs.start("inner")
    runs.begin("late", "inner")
    runs.end("inner")
    runs.call("a")
    assert runs.call("b") == runs.inexact["b"] == {"a"}


# -- lineage


def two_strands(runs: Runs) -> None:
    """Make two concurrent calls in one run, and end both."""
    runs.call("plan")
    runs.begin("a1")
    runs.begin("b1")
    runs.finish("a1", "b1")


def test_lineage_tells_strands_apart(runs: Runs) -> None:
    """When helpers of several steps run concurrently in one run, the input of a call tells which helper made it."""
    two_strands(runs)
    runs.begin("a2", inputs=content_of("plan", "a1"))
    runs.begin("b2", inputs=content_of("plan", "b1"))
    runs.finish("a2", "b2")
    runs.call("join", inputs=content_of("a2", "b2"))
    assert runs.parents == {
        "plan": set(),
        "a1": {"plan"},
        "b1": {"plan"},
        "a2": {"a1"},
        "b2": {"b1"},
        "join": {"a2", "b2"},
    }
    assert not any(runs.inexact.values())
    assert runs.threads["a2"] == runs.threads["a1"]
    assert runs.threads["b2"] == runs.threads["b1"]


def test_without_lineage_all_ended_calls_are_guesses(runs: Runs) -> None:
    """If nothing tells the strands apart, a call comes after both, as a guess."""
    two_strands(runs)
    for name in ("a2", "b2"):
        runs.begin(name, inputs=content_of("plan"))
        assert runs.parents[name] == runs.inexact[name] == {"a1", "b1"}


def test_a_strand_that_continues_alone(runs: Runs) -> None:
    """The next steps of one strand do not hide that another strand may continue later."""
    two_strands(runs)
    runs.call("a2", inputs=content_of("a1"))
    runs.call("a3", inputs=content_of("a2"))
    assert runs.call("b2", inputs=content_of("b1")) == {"b1"}
    assert runs.call("join") == {"a3", "b2"}
    assert runs.inexact["join"] == {"a3", "b2"}


def test_lineage_adds_parents_that_the_runs_do_not_show(runs: Runs) -> None:
    """A result that is passed in another way, such as a queue, is a dependency as well."""
    runs.start("producer")
    runs.call("made", "producer")
    assert runs.call("unaware") == set()
    assert runs.call("taker", inputs=content_of("made")) == {"unaware", "made"}
    assert runs.inexact["taker"] == {"unaware"}, "the producer still runs"


def test_a_proven_parent_replaces_its_ancestors(runs: Runs) -> None:
    """A call of the frontier that is an ancestor of a proven call is not a parent."""
    runs.call("a")
    runs.start("producer")
    runs.call("made", "producer")
    assert runs.call("taker", inputs=content_of("a", "made")) == {"made"}


def test_lineage_ignores_calls_that_have_not_ended(runs: Runs) -> None:
    """A parent has finished; chunks of a running call are not evidence."""
    runs.begin("running")
    runs.call("background")
    assert runs.call("next", inputs=content_of("running", "background", "unknown")) == {"background"}


def test_a_join_continues_the_thread_that_lineage_proves(runs: Runs) -> None:
    """A join continues the branch whose answer is in its input; without such a branch, the oldest."""
    for name in ("x", "y"):
        runs.begin(name, kind=RunKind.STAGE)
    runs.finish("x", "y")
    assert runs.call("join", inputs=content_of("y")) == {"x", "y"}
    assert runs.threads["join"] == runs.threads["y"]
    assert runs.inexact["join"] == set(), "a stage is waited for even if its answer is not used"


def test_a_quoted_text_settles_guesses(runs: Runs) -> None:
    """Outputs of the guesses are searched for inside longer texts."""
    answers = {name: Content((f"the answer that {name} gave",)) for name in ("x", "y", "z")}
    for name in answers:
        runs.begin(name)
    for name, answer in answers.items():
        runs.tree.end_call(CallId(name), answer)
        runs.end(name)
    runs.call("next", inputs=Content(("Improve: the answer that y gave!",)))
    assert (runs.parents["next"], runs.inexact["next"]) == ({"y"}, set())


def test_a_quoted_text_adds_nothing_to_certain_parents(runs: Runs) -> None:
    """If the runs leave no guess, only ids and whole texts add parents."""
    runs.start("producer")
    runs.open("producer", "made")
    runs.tree.end_call(CallId("made"), Content(("a text of some length",)))
    runs.call("known")
    assert runs.call("quoting", inputs=Content(("Improve: a text of some length",))) == {"known"}
    assert runs.call("given", inputs=Content(("a text of some length",))) == {"quoting", "made"}


def test_inputs_are_read_only_in_doubt(runs: Runs) -> None:
    """In a program of one thread, messages are never read."""

    def read() -> Content:
        raise AssertionError("read")

    for name in "abc":
        runs.call(name, inputs=read)
    runs.begin("x", inputs=read)
    runs.begin("y", inputs=read)
    runs.finish("x", "y")
    with pytest.raises(AssertionError, match="read"):
        runs.call("join", inputs=read)


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


# -- any program of branches and sequences


class Plan:
    """A program of branches in sequences in branches, which runs in any order that it allows."""

    def __init__(self, seed: random.Random) -> None:
        self.seed = seed
        self.runs = Runs()
        self.expected: dict[str, set[str]] = {}
        self.names = (f"n{number}" for number in itertools.count())

    def make(self, depth: int) -> Any:
        """Make a call (a name), or a tuple of kind, name and parts."""
        kind = self.seed.choice(["call", "sequence", "stream", "fork"]) if depth else "call"
        if kind == "call":
            return next(self.names)
        return kind, next(self.names), [self.make(depth - 1) for _ in range(self.seed.randint(1, 3))]

    def open(self, part: Any, parent: Hashable, kind: RunKind) -> None:
        """Start the run of a part; a stream also starts the runs of all its parts."""
        name = part if isinstance(part, str) else part[1]
        self.runs.start(name, parent, kind=kind, stage="fork" if kind is RunKind.STAGE else None)
        if not isinstance(part, str) and part[0] == "stream":
            for each in part[2]:
                self.open(each, name, RunKind.STEP)

    def branch(self, part: Any, parent: Hashable, entry: set[str]) -> Generator[None, None, set[str]]:
        """Run a branch of a fork."""
        self.open(part, parent, RunKind.STAGE)
        return (yield from self.run(part, entry))

    def run(self, part: Any, entry: set[str]) -> Generator[None, None, set[str]]:
        """Run a part and yield wherever another part may continue. Return the calls that the next part waits for."""
        if isinstance(part, str):
            self.runs.open(part, part)
            self.expected[part] = entry
            yield
            self.runs.finish(part)
            return {part}
        kind, name, parts = part
        if kind == "fork":
            exits: set[str] = set()
            waiting = [self.branch(each, name, entry) for each in parts]
            running: list[Generator[None, None, set[str]]] = []
            most = self.seed.randint(1, 3)
            while waiting or running:
                while waiting and len(running) < most:
                    running.append(waiting.pop())
                branch = self.seed.choice(running)
                try:
                    next(branch)
                except StopIteration as stop:
                    running.remove(branch)
                    exits |= stop.value
                yield
        else:
            exits = entry
            for each in parts:
                if kind == "sequence":
                    self.open(each, name, self.seed.choice([RunKind.CODE, RunKind.STEP]))
                exits = yield from self.run(each, exits)
        self.runs.end(name)
        return exits


@given(st.randoms(use_true_random=False))
def test_the_graph_of_a_structured_program_is_exact(seed: random.Random) -> None:
    """For sequences and branches nested to any depth, in any interleaving, the edges are exactly the expected ones,
    without guesses, and the threads are chains."""
    plan = Plan(seed)
    top = ("sequence", "top", [plan.make(4) for _ in range(3)])
    plan.open(top, None, RunKind.CODE)
    for _ in plan.run(top, set()):
        pass
    assert plan.runs.parents == plan.expected
    assert not any(plan.runs.inexact.values())
    check_threads(plan.runs)


def check_threads(runs: Runs) -> None:
    """Assert that threads are chains, and that a call which can continue a thread does not begin a new one."""
    tails: dict[ThreadId, str] = {}
    for call, parents in runs.parents.items():  # in the order they started
        thread = runs.threads[call]
        if thread in tails:
            assert tails[thread] in parents
        else:
            assert not parents & set(tails.values())
        tails[thread] = call


@given(st.randoms(use_true_random=False), st.booleans())
def test_strands_in_one_run(seed: random.Random, with_lineage: bool) -> None:
    """Chains of calls run concurrently in one run, which does not report them. If the inputs show the chains, the edges
    are exactly those of the chains. If not, each call comes after all possible parents, as guesses."""
    runs = Runs()
    runs.start("node")
    strands = [[f"{letter}{number}" for number in range(seed.randint(1, 4))] for letter in "abcd"[: seed.randint(2, 4)]]
    truth = {call: set(strand[max(0, n - 1) : n]) for strand in strands for n, call in enumerate(strand)}
    for first, *_ in strands:
        runs.open("node", first)
    in_flight = {strand[0]: strand[1:] for strand in strands}
    waiting: list[tuple[str, list[str]]] = []
    while in_flight or waiting:
        if waiting and (not in_flight or seed.random() < 0.5):
            before, (call, *rest) = waiting.pop(seed.randrange(len(waiting)))
            runs.open("node", call, inputs=content_of(before) if with_lineage else NOTHING)
            in_flight[call] = rest
        else:
            call = seed.choice(list(in_flight))
            rest = in_flight.pop(call)
            runs.tree.end_call(CallId(call), content_of(call))
            if rest:
                waiting.append((call, rest))
    above = ancestors(runs)
    if with_lineage:
        assert runs.parents == truth
        assert not any(runs.inexact.values())
    for call, parents in truth.items():
        assert parents <= above[call], "no true edge is lost"
        assert runs.parents[call] - runs.inexact[call] <= parents, "an exact edge is a true edge"
    runs.end("node")
    runs.call("join")
    assert {last for *_, last in strands} <= above.setdefault("join", ancestors(runs)["join"])
    assert runs.inexact["join"] == set()
    check_threads(runs)


def ancestors(runs: Runs) -> dict[str, set[str]]:
    """Return the ancestors of each call."""
    above: dict[str, set[str]] = {}
    for call, parents in runs.parents.items():
        above[call] = set(parents).union(*(above[parent] for parent in parents))
    return above


step = st.tuples(st.sampled_from(["start", "begin", "open", "finish", "fail", "end"]), st.integers(0, 1_000_000))


@given(st.lists(step, min_size=10, max_size=80), st.sampled_from([1, 1000]))
def test_any_tree_of_runs_gives_a_dag_in_order(steps: list[tuple[str, int]], keep: int) -> None:
    """Runs nest, overlap, outlive each other and fail at random, with random inputs and with little or much memory. The
    parents of a call had finished before it, none is an ancestor of another, and each thread is a chain."""
    runs = Runs()
    runs.tree._ancestry._keep = runs.tree._ancestry._limit = keep
    containers: list[Hashable] = [ROOT, "never reported"]
    in_flight: list[str] = []
    finished: list[str] = []
    names = itertools.count()
    for action, number in steps:
        parent = containers[number % len(containers)]
        kind = list(RunKind)[number % 3]
        if action == "start":
            fresh = next(names)
            runs.start(fresh, parent, kind=kind)
            containers.append(fresh)
        elif action in ("begin", "open"):
            call = f"c{next(names)}"
            known = content_of(*(each for each in finished if (number >> finished.index(each) % 20) & 1), *in_flight)
            if action == "begin":
                runs.begin(call, parent, inputs=known, kind=kind)
            else:
                runs.open(parent, call, inputs=known)
            assert runs.parents[call] <= set(finished)
            in_flight.append(call)
        elif action in ("finish", "fail") and in_flight:
            call = in_flight.pop(number % len(in_flight))
            if action == "finish":
                was_open = CallId(call) in runs.tree._calls  # its run may have ended
                runs.finish(call)
                finished += [call] if was_open else []
            else:
                runs.tree.drop_call(CallId(call))
                runs.end(call)
        elif action == "end" and parent != ROOT:
            runs.end(parent)
            containers.remove(parent)

    above = ancestors(runs)
    for parents in runs.parents.values():
        assert not any(parent in above[other] for parent in parents for other in parents), (
            "a parent is an ancestor of another parent"
        )
    last: dict[ThreadId, str] = {}
    for call, parents in runs.parents.items():
        before = last.get(runs.threads[call])
        assert before is None or before in parents or before not in finished, (
            "a thread is a chain, except for failed attempts"
        )
        if call in finished:
            last[runs.threads[call]] = call


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


def test_lineage_drops_no_guess_that_it_cannot_recognize(runs: Runs) -> None:
    """An output of a few letters, without an id, may be in any text, so its call remains a guess."""
    outputs = {"long": Content(("an output that is long enough",)), "short": Content(("ok",))}
    for name in outputs:
        runs.begin(name)
    for name, output in outputs.items():
        runs.tree.end_call(CallId(name), output)
        runs.end(name)
    assert runs.call("next", inputs=Content(("see: an output that is long enough, ok",))) == {"long", "short"}
    assert runs.inexact["next"] == {"short"}


def test_calls_of_one_run_are_dropped_together(runs: Runs) -> None:
    """If lineage names one of the calls with which a run ended, the others stay: the next call waited for the run."""
    runs.start("parallel")
    for name in "xy":
        runs.start(f"part {name}", "parallel", kind=RunKind.STAGE, stage="map")
        runs.begin(name, f"part {name}")
    runs.begin("other")
    runs.finish("x", "y")
    runs.end("part x", "part y", "parallel")
    runs.finish("other")
    runs.begin("join", inputs=content_of("x"))
    assert (runs.parents["join"], runs.inexact["join"]) == ({"x", "y"}, {"y"})
    runs.begin("strand", inputs=content_of("other"))
    assert (runs.parents["strand"], runs.inexact["strand"]) == ({"other"}, set())


def test_a_call_at_a_place_that_is_not_certain_may_be_between_others(runs: Runs) -> None:
    """Lineage drops one of its parents, which is nevertheless no certain parent of the call after it."""
    for name in "xy":
        runs.start(f"part {name}", kind=RunKind.STAGE, stage="map")
        runs.begin(name, f"part {name}")
    runs.finish("x", "y")
    runs.end("part x", "part y")
    runs.tree.start("lost", None, is_certain=False)
    assert runs.call("between", "lost", inputs=content_of("x")) == {"x"}
    runs.end("lost")
    assert (runs.call("next"), runs.inexact["next"]) == ({"between", "y"}, {"between", "y"})


def test_a_run_at_a_place_that_is_not_certain_makes_guesses(runs: Runs) -> None:
    """A run that is somewhere inside another one has guesses as parents, and so have the calls after it inside."""
    runs.call("a")
    for run in ("around", "item"):
        runs.start(run, "around" if run == "item" else None)
    runs.call("x", "item")
    runs.tree.start("lost", "around", is_certain=False)
    assert (runs.call("y", "lost"), runs.inexact["y"]) == ({"x"}, {"x"})
    assert (runs.call("z", "item"), runs.inexact["z"]) == ({"y"}, {"y"})
    runs.end("lost", "item", "around")
    assert runs.call("b") == {"z"}
