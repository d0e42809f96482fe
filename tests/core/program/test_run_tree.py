"""The run tree: which calls a call comes after, how sure that is, and which thread it continues."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Generator, Hashable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.core.ids import CallId, ThreadId
from weft.core.program.lineage import NOTHING, Content, Given
from weft.core.program.run_tree import ROOT, RunKind, RunTree


class Runs:
    """A run tree with readable names: threads are t0, t1, ... and a call is named as its run."""

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
        place: RunKind = RunKind.CODE,
        stage: Hashable = None,
    ) -> None:
        self.tree.start(run, parent, anchor, place, stage)

    def end(self, *runs: Hashable) -> None:
        for run in runs:
            self.tree.end(run)

    def begin(
        self,
        call: str,
        parent: Hashable | None = None,
        anchor: Hashable = ROOT,
        given: Given = NOTHING,
        *,
        place: RunKind = RunKind.CODE,
        stage: Hashable = None,
    ) -> None:
        """A run that is a call begins."""
        self.tree.start(call, parent, anchor, place, stage)
        self.open(call, call, anchor, given)

    def open(self, run: Hashable, call: str, anchor: Hashable = ROOT, given: Given = NOTHING) -> None:
        """A run begins a call."""
        opened = self.tree.start_call(run, CallId(call), anchor, given)
        assert len(set(opened.parents)) == len(opened.parents)
        assert set(opened.inexact) <= set(opened.parents)
        self.threads[call], self.parents[call] = opened.thread_id, set(opened.parents)
        self.inexact[call], self.tools[call] = set(opened.inexact), opened.tools

    def finish(self, *calls: str) -> None:
        """Runs that are calls end well; what each gives is named as it is."""
        for call in calls:
            self.tree.end_call(CallId(call), gave(call))
            self.tree.end(call)

    def call(
        self, call: str, parent: Hashable | None = None, anchor: Hashable = ROOT, given: Given = NOTHING
    ) -> set[CallId]:
        """A whole call; gives its parents."""
        self.begin(call, parent, anchor, given)
        self.finish(call)
        return self.parents[call]


def gave(*calls: str) -> Content:
    """What calls gave, or what one is given that comes from them."""
    return Content(ids=calls)


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
        runs.open("model", attempt)
        assert runs.parents[attempt] == {"a"}
    runs.tree.end_call(CallId("second"))
    runs.end("model")
    assert runs.call("b") == {"second"}


def test_two_calls_of_one_run_are_a_chain(runs: Runs) -> None:
    """What follows a finished call inside its own run comes after it, as `end_call` says."""
    runs.start("client")
    runs.open("client", "first")
    runs.tree.end_call(CallId("first"))
    runs.open("client", "second")
    assert runs.parents["second"] == {"first"}
    assert runs.inexact["second"] == set()
    assert runs.threads["first"] == runs.threads["second"]


def test_ending_twice_or_an_unknown_run_is_harmless(runs: Runs) -> None:
    """Ends without a start, and second ends, change nothing."""
    runs.end("nobody")
    runs.tree.end_call(CallId("x"))
    runs.tree.fail_call(CallId("x"))
    runs.tree.drop_call(CallId("x"))
    runs.tree.note_tool("nobody", "search")
    runs.call("a")
    runs.end("a", "a")
    assert runs.call("b") == {"a"}


def test_a_run_that_outlives_its_parent_counts_at_the_top(runs: Runs) -> None:
    """A call whose enclosing run ended first is still a parent of what comes after."""
    runs.start("chain")
    runs.begin("late", "chain")
    runs.end("chain")
    assert runs.call("background") == set()
    runs.finish("late")
    assert runs.call("after") == {"background", "late"}


# -- anchors and unknown parents


@pytest.mark.parametrize("parent", [None, "never reported"])
def test_an_unknown_parent_means_the_anchor(runs: Runs, parent: str | None) -> None:
    """A run whose parent was not reported is inside the branch it was handed to."""
    runs.call("a")
    runs.start("branch")
    assert runs.call("b", parent, anchor="branch") == {"a"}
    assert runs.call("c", parent, anchor="branch") == {"b"}
    assert runs.call("background", parent) == {"a"}, "not before the branch has ended"
    runs.end("branch")
    assert runs.call("join") == {"c", "background"}


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
    runs.open("unreported", "x")
    assert (runs.threads["x"], runs.parents["x"]) == ("t0", {"a"})
    runs.tree.end_call(CallId("x"))
    assert runs.call("b") == {"x"}, "nobody need end a run that nobody reported"
    runs.end("unreported")
    assert runs.call("c") == {"b"}


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


# -- failed calls


@pytest.mark.parametrize("before", [[], ["a"]])
def test_a_retry_continues_the_thread_of_the_failed_call(runs: Runs, before: list[str]) -> None:
    """A call that failed gives its thread back, also one that it had begun itself."""
    for name in before:
        runs.call(name)
    runs.begin("failed")
    runs.tree.fail_call(CallId("failed"))
    runs.end("failed")
    assert runs.call("retry") == set(before)
    assert set(runs.threads.values()) == {"t0"}


def test_a_retry_beside_others_continues_the_failed_calls_thread(runs: Runs) -> None:
    """Among branches too, and each thread that failed calls leave is continued once."""
    runs.call("a")
    for name in ("x", "y", "z"):
        runs.begin(name)
    for name in ("y", "z"):
        runs.tree.fail_call(CallId(name))
        runs.end(name)
    for name in ("again", "once more", "new"):
        runs.begin(name)
        assert runs.parents[name] == {"a"}
    assert [runs.threads[name] for name in ("x", "y", "z")] == ["t0", "t1", "t2"]
    assert {runs.threads["again"], runs.threads["once more"]} == {"t1", "t2"}
    assert runs.threads["new"] == "t3"


def test_a_call_that_was_given_up_keeps_its_thread(runs: Runs) -> None:
    """What follows a cancelled call is no second try at it, so it begins a thread of its own."""
    runs.begin("cancelled")
    runs.tree.drop_call(CallId("cancelled"))
    runs.end("cancelled")
    assert runs.call("next") == set()
    assert runs.threads["next"] != runs.threads["cancelled"]


def test_a_failed_call_leaves_no_doubt(runs: Runs) -> None:
    """A call that failed does not run beside what follows, even while its run goes on."""
    runs.start("client")
    runs.open("client", "failed")
    runs.tree.fail_call(CallId("failed"))
    runs.open("client", "retry")
    runs.tree.end_call(CallId("retry"))
    runs.open("client", "next")
    assert (runs.parents["next"], runs.inexact["next"]) == ({"retry"}, set())


# -- how sure


def test_what_ran_one_by_one_is_exact(runs: Runs) -> None:
    """Calls that never overlap are a chain without a doubt."""
    for name in "abc":
        runs.call(name)
    assert not any(runs.inexact.values())


def test_a_join_in_code_is_a_guess(runs: Runs) -> None:
    """After calls that overlapped in one run, the next may be the join or one strand's next step."""
    runs.call("a")
    runs.begin("x")
    runs.begin("y")
    assert runs.inexact["y"] == set(), "a fork is none"
    runs.finish("x", "y")
    assert runs.call("join") == {"x", "y"}
    assert runs.inexact["join"] == {"x", "y"}


def test_a_text_that_two_gave_rules_nobody_out(runs: Runs) -> None:
    """A join that is given x's text, and one that both y and z gave, may come after all three; w's it was not given."""
    same, other = Content(texts=("two of them say just this",)), Content(texts=("and one says that",))
    for call in "wxyz":
        runs.begin(call)
    for call, content in (("w", Content(texts=("a fourth thing altogether",))), ("x", other), ("y", same), ("z", same)):
        runs.tree.end_call(CallId(call), content)
        runs.tree.end(call)
    assert runs.call("join", given=Content(texts=("and one says that; two of them say just this",))) == {"x", "y", "z"}
    assert runs.inexact["join"] == {"y", "z"}


def test_a_doubt_goes_on_until_something_settles_it(runs: Runs) -> None:
    """After a guess, what follows may still be of another strand; the end of the run, or lineage, makes it certain."""
    runs.start("node", place=RunKind.STAGE)
    runs.begin("x", "node")
    runs.begin("y", "node")
    runs.finish("x", "y")
    runs.call("join", "node")
    assert runs.call("after", "node") == {"join"}
    assert runs.inexact["after"] == {"join"}
    assert runs.call("told", "node", given=gave("after")) == {"after"}
    assert runs.inexact["told"] == set()
    assert runs.call("next", "node") == {"told"}
    assert runs.inexact["next"] == set()
    runs.end("node")
    runs.call("last")
    assert runs.inexact["last"] == set()


def test_a_join_after_a_run_is_exact(runs: Runs) -> None:
    """Whatever overlapped inside a run, it has ended with the run."""
    runs.start("node")
    runs.begin("x", "node")
    runs.begin("y", "node")
    runs.finish("x", "y")
    runs.end("node")
    assert runs.call("join") == {"x", "y"}
    assert runs.inexact["join"] == set()


def test_stages_are_exact(runs: Runs) -> None:
    """Where a framework starts runs side by side, each waited for all before, and all are waited for."""
    for stage in ("ab", "cd", "e"):
        for name in stage:
            runs.begin(name, place=RunKind.STAGE)
        runs.finish(*stage)
    assert runs.parents == {"a": set(), "b": set(), "c": {"a", "b"}, "d": {"a", "b"}, "e": {"c", "d"}}
    assert not any(runs.inexact.values())


def test_runs_of_one_stage_do_not_wait_for_each_other(runs: Runs) -> None:
    """With room for one at a time they run one by one, and are branches all the same."""
    runs.call("before")
    for number, stage in enumerate(("ab", "cd", "e")):
        for name in stage:
            runs.begin(name, place=RunKind.STAGE, stage=number)
            runs.finish(name)
    assert {name: runs.parents[name] for name in "abcde"} == {
        "a": {"before"},
        "b": {"before"},
        "c": {"a", "b"},
        "d": {"a", "b"},
        "e": {"c", "d"},
    }
    assert not any(runs.inexact.values())


def test_a_stage_beside_code(runs: Runs) -> None:
    """What a framework waits for stays certain beside what code runs at the same time."""
    runs.begin("stage", place=RunKind.STAGE)
    runs.begin("code")
    runs.finish("stage", "code")
    assert runs.call("join") == {"stage", "code"}
    assert runs.inexact["join"] == {"code"}


def test_a_guess_is_one_inside_the_next_run_too(runs: Runs) -> None:
    """A run that starts after guesses comes after guesses; what follows inside is certain, what follows it is not."""
    runs.begin("x")
    runs.begin("y")
    runs.finish("x", "y")
    runs.start("chain")
    runs.start("step", "chain", place=RunKind.STEP)
    runs.call("first", "step")
    runs.end("step")
    assert runs.inexact["first"] == {"x", "y"}
    runs.call("second", "chain")
    assert (runs.parents["second"], runs.inexact["second"]) == ({"first"}, set())
    runs.end("chain")
    runs.call("after")
    assert (runs.parents["after"], runs.inexact["after"]) == ({"second"}, {"second"})


def test_a_tool_without_calls_raises_no_doubt(runs: Runs) -> None:
    """Only what calls can be a strand."""
    runs.start("tool")
    for name in "ab":
        runs.call(name)
    runs.end("tool")
    runs.call("c")
    assert not any(runs.inexact.values())


def test_calls_of_one_run_at_once(runs: Runs) -> None:
    """Each call of a run is a branch of its own: none forgets the other."""
    runs.start("node")
    for name in "xyz":
        runs.open("node", name)
        assert runs.parents[name] == set()
    for name in "zxy":
        runs.tree.end_call(CallId(name))
    runs.open("node", "join")
    assert runs.parents["join"] == {"x", "y", "z"}


def test_calls_of_an_unreported_run_at_once(runs: Runs) -> None:
    """So it is where the run was never reported; it ends with the last of them."""
    runs.open("client", "x")
    runs.open("client", "y")
    runs.tree.end_call(CallId("x"))
    assert runs.call("background") == set()
    runs.tree.end_call(CallId("y"))
    assert runs.call("join") == {"x", "y", "background"}


# -- steps of a stream


def test_a_step_that_was_opened_early(runs: Runs) -> None:
    """A sequence that streams opens its steps at once; each begins after what the steps before it have come to."""
    runs.call("a")
    runs.start("sequence")
    for step in ("one", "two", "three"):
        runs.start(step, "sequence", place=RunKind.STEP)
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
    """A step that calls while the one before it is still at it runs beside it; what follows waits for both."""
    runs.start("sequence")
    runs.begin("one", "sequence", place=RunKind.STEP)
    runs.start("two", "sequence", place=RunKind.STEP)
    assert runs.call("early", "two") == set()
    runs.finish("one")
    assert runs.call("late", "two") == {"early"}
    runs.end("two", "sequence")
    assert runs.call("join") == {"one", "late"}


def test_branches_in_a_step_that_was_opened_early(runs: Runs) -> None:
    """Branches that were opened with their step come after what the step comes after, the slow one not after the
    quick one."""
    runs.start("sequence")
    runs.begin("one", "sequence", place=RunKind.STEP)
    runs.start("fork", "sequence", place=RunKind.STEP)
    runs.start("left", "fork", place=RunKind.STAGE)
    runs.start("right", "fork", place=RunKind.STAGE)
    runs.finish("one")
    assert runs.call("l", "left") == {"one"}
    runs.end("left")
    assert runs.call("r", "right") == {"one"}
    runs.end("right", "fork", "sequence")
    assert runs.call("join") == {"l", "r"}
    assert not any(runs.inexact.values())


# -- runs that outlive those around them


def test_a_run_that_outlives_its_parent_joins_the_nearest_run_around(runs: Runs) -> None:
    """It counts where its parent would have, not at the top."""
    runs.start("outer")
    runs.start("inner", "outer")
    runs.begin("late", "inner")
    runs.end("inner")
    runs.finish("late")
    assert runs.call("background") == set(), "the top has not waited"
    assert runs.call("in outer", "outer") == {"late"}
    runs.end("outer")
    assert runs.call("after") == {"background", "in outer"}


def test_a_run_that_starts_in_one_that_has_ended(runs: Runs) -> None:
    """It belongs to the nearest run around that goes on."""
    runs.start("outer")
    runs.start("inner", "outer")
    runs.call("a", "inner")
    runs.end("inner")
    assert runs.call("b", "inner") == {"a"}
    assert runs.call("background") == set()
    assert runs.call("c", "outer") == {"b"}


def test_what_outlives_its_parent_leaves_a_doubt(runs: Runs) -> None:
    """Whether anybody waits for it is not known."""
    runs.start("inner")
    runs.begin("late", "inner")
    runs.end("inner")
    runs.begin("background")
    runs.finish("late", "background")
    runs.call("join")
    assert runs.inexact["join"] == {"late", "background"}


def test_what_outlives_its_parent_runs_beside_what_follows(runs: Runs) -> None:
    """While it goes on, calls around it may be strands of their own."""
    runs.start("inner")
    runs.begin("late", "inner")
    runs.end("inner")
    runs.call("a")
    assert runs.call("b") == runs.inexact["b"] == {"a"}


# -- lineage


def two_strands(runs: Runs) -> None:
    """Two calls at once in one run, both over."""
    runs.call("plan")
    runs.begin("a1")
    runs.begin("b1")
    runs.finish("a1", "b1")


def test_lineage_tells_strands_apart(runs: Runs) -> None:
    """Helpers of several steps that run at once under one run: what a call is given says whose next step it is."""
    two_strands(runs)
    runs.begin("a2", given=gave("plan", "a1"))
    runs.begin("b2", given=gave("plan", "b1"))
    runs.finish("a2", "b2")
    runs.call("join", given=gave("a2", "b2"))
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


def test_without_lineage_all_that_had_ended_stays(runs: Runs) -> None:
    """Where nothing tells strands apart, a call comes after both, as a guess."""
    two_strands(runs)
    for name in ("a2", "b2"):
        runs.begin(name, given=gave("plan"))
        assert runs.parents[name] == runs.inexact[name] == {"a1", "b1"}


def test_a_strand_that_goes_on_alone(runs: Runs) -> None:
    """A strand's next steps do not hide that another strand may go on later."""
    two_strands(runs)
    runs.call("a2", given=gave("a1"))
    runs.call("a3", given=gave("a2"))
    assert runs.call("b2", given=gave("b1")) == {"b1"}
    assert runs.call("join") == {"a3", "b2"}
    assert runs.inexact["join"] == {"a3", "b2"}


def test_lineage_adds_what_the_runs_do_not_know(runs: Runs) -> None:
    """A result that comes by another way, such as a queue, is a dependency all the same."""
    runs.start("producer")
    runs.call("made", "producer")
    assert runs.call("unaware") == set()
    assert runs.call("taker", given=gave("made")) == {"unaware", "made"}
    assert runs.inexact["taker"] == {"unaware"}, "the producer still runs beside it"


def test_lineage_takes_the_place_of_what_it_implies(runs: Runs) -> None:
    """A call of the frontier that came before a proven one is no parent beside it."""
    runs.call("a")
    runs.start("producer")
    runs.call("made", "producer")
    assert runs.call("taker", given=gave("a", "made")) == {"made"}


def test_lineage_cannot_name_what_has_not_ended(runs: Runs) -> None:
    """Parents have finished; chunks of a running call prove nothing."""
    runs.begin("running")
    runs.call("background")
    assert runs.call("next", given=gave("running", "background", "nobody")) == {"background"}


def test_a_join_continues_the_thread_that_lineage_proves(runs: Runs) -> None:
    """Of the branches that end in a join, the one whose answer it is given goes on; else the oldest."""
    for name in ("x", "y"):
        runs.begin(name, place=RunKind.STAGE)
    runs.finish("x", "y")
    assert runs.call("join", given=gave("y")) == {"x", "y"}
    assert runs.threads["join"] == runs.threads["y"]
    assert runs.inexact["join"] == set(), "stages are waited for, used or not"


def test_a_quoted_text_settles_guesses(runs: Runs) -> None:
    """A text inside a longer one is looked for among the guesses, and where nothing else is known."""
    answers = {name: Content((f"the answer that {name} gave",)) for name in ("x", "y", "z")}
    for name in answers:
        runs.begin(name)
    for name, answer in answers.items():
        runs.tree.end_call(CallId(name), answer)
        runs.end(name)
    runs.call("next", given=Content(("Improve: the answer that y gave!",)))
    assert (runs.parents["next"], runs.inexact["next"]) == ({"y"}, set())


def test_a_quoted_text_adds_nothing_to_certain_parents(runs: Runs) -> None:
    """Where the runs leave no guess, only ids and whole texts add parents."""
    runs.start("producer")
    runs.open("producer", "made")
    runs.tree.end_call(CallId("made"), Content(("a text of some length",)))
    runs.call("known")
    assert runs.call("quoting", given=Content(("Improve: a text of some length",))) == {"known"}
    assert runs.call("given", given=Content(("a text of some length",))) == {"quoting", "made"}


def test_what_a_call_is_given_is_read_only_in_doubt(runs: Runs) -> None:
    """A program of one thread never looks at its messages."""

    def read() -> Content:
        raise AssertionError("read")

    for name in "abc":
        runs.call(name, given=read)
    runs.begin("x", given=read)
    runs.begin("y", given=read)
    runs.finish("x", "y")
    with pytest.raises(AssertionError, match="read"):
        runs.call("join", given=read)


# -- tools


def test_a_call_names_the_tools_before_it(runs: Runs) -> None:
    """Tools that ran since a call's parents ended are noted with it, once."""
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


def test_a_call_inside_a_tool_names_it(runs: Runs) -> None:
    """So is the tool around a call, before it and after it."""
    runs.call("think")
    runs.start("expert")
    runs.tree.note_tool("expert", "expert")
    runs.call("inner", "expert")
    runs.call("second", "expert")
    runs.end("expert")
    runs.call("answer")
    assert runs.tools == {"think": (), "inner": ("expert",), "second": (), "answer": ("expert",)}


# -- memory


def test_a_long_program_is_forgotten_piece_by_piece() -> None:
    """Old calls go, those that something still stands on stay."""
    runs = Runs()
    runs.call("first")
    runs.start("slow")
    runs.start("other")
    for number in range(5000):
        runs.call(f"c{number}", "other")
    assert len(runs.tree._past._calls) < 2500
    assert len(runs.tree._ended) <= 1000
    assert runs.call("late", "slow") == {"first"}
    runs.end("slow", "other")
    assert runs.call("join") == {"late", "c4999"}


# -- any program of branches and sequences


class Plan:
    """A program of branches in sequences in branches, that is run in any order that it allows."""

    def __init__(self, seed: random.Random) -> None:
        self.seed = seed
        self.runs = Runs()
        self.expected: dict[str, set[str]] = {}
        self.names = (f"n{number}" for number in itertools.count())

    def make(self, depth: int) -> Any:
        """A call (a name), or a kind with parts."""
        kind = self.seed.choice(["call", "sequence", "stream", "fork"]) if depth else "call"
        if kind == "call":
            return next(self.names)
        return kind, next(self.names), [self.make(depth - 1) for _ in range(self.seed.randint(1, 3))]

    def open(self, part: Any, parent: Hashable, place: RunKind) -> None:
        """Start its run; a stream starts those of all its parts."""
        name = part if isinstance(part, str) else part[1]
        self.runs.start(name, parent, place=place, stage="fork" if place is RunKind.STAGE else None)
        if not isinstance(part, str) and part[0] == "stream":
            for each in part[2]:
                self.open(each, name, RunKind.STEP)

    def branch(self, part: Any, parent: Hashable, entry: set[str]) -> Generator[None, None, set[str]]:
        """Go through a branch of a fork, when there is room for it."""
        self.open(part, parent, RunKind.STAGE)
        return (yield from self.run(part, entry))

    def run(self, part: Any, entry: set[str]) -> Generator[None, None, set[str]]:
        """Go through it, with a stop wherever another part may go on; gives the calls that what follows waits for."""
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
            under_way: list[Generator[None, None, set[str]]] = []
            room = self.seed.randint(1, 3)
            while waiting or under_way:
                while waiting and len(under_way) < room:
                    under_way.append(waiting.pop())
                branch = self.seed.choice(under_way)
                try:
                    next(branch)
                except StopIteration as stop:
                    under_way.remove(branch)
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
def test_a_structured_program_comes_out_as_it_is(seed: random.Random) -> None:
    """Sequences and branches in each other to any depth, in any interleaving: exactly their edges, without a doubt, and
    threads that are chains."""
    plan = Plan(seed)
    top = ("sequence", "top", [plan.make(4) for _ in range(3)])
    plan.open(top, None, RunKind.CODE)
    for _ in plan.run(top, set()):
        pass
    assert plan.runs.parents == plan.expected
    assert not any(plan.runs.inexact.values())
    check_threads(plan.runs)


def check_threads(runs: Runs) -> None:
    """A thread is a chain, and no call begins one that could have continued one."""
    tails: dict[ThreadId, str] = {}
    for call, parents in runs.parents.items():  # in the order they started
        thread = runs.threads[call]
        if thread in tails:
            assert tails[thread] in parents
        else:
            assert not parents & set(tails.values())
        tails[thread] = call


@given(st.randoms(use_true_random=False), st.booleans())
def test_strands_in_one_run(seed: random.Random, told: bool) -> None:
    """Chains of calls that start at once in one run, which says nothing of them. If what calls are given says whose
    they are, the chains come out; if not, each call comes after all that it could, as a guess."""
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
            runs.open("node", call, given=gave(before) if told else NOTHING)
            in_flight[call] = rest
        else:
            call = seed.choice(list(in_flight))
            rest = in_flight.pop(call)
            runs.tree.end_call(CallId(call), gave(call))
            if rest:
                waiting.append((call, rest))
    above = ancestors(runs)
    if told:
        assert runs.parents == truth
        assert not any(runs.inexact.values())
    for call, parents in truth.items():
        assert parents <= above[call], "no true edge is lost"
        assert runs.parents[call] - runs.inexact[call] <= parents, "what is called exact is true"
    runs.end("node")
    runs.call("join")
    assert {last for *_, last in strands} <= above.setdefault("join", ancestors(runs)["join"])
    assert runs.inexact["join"] == set()
    check_threads(runs)


def ancestors(runs: Runs) -> dict[str, set[str]]:
    """All that came before each call, by its parents."""
    above: dict[str, set[str]] = {}
    for call, parents in runs.parents.items():
        above[call] = set(parents).union(*(above[parent] for parent in parents))
    return above


step = st.tuples(st.sampled_from(["start", "begin", "open", "finish", "fail", "end"]), st.integers(0, 1_000_000))


@given(st.lists(step, min_size=10, max_size=80), st.sampled_from([1, 1000]))
def test_any_tree_of_runs_gives_a_dag_in_order(steps: list[tuple[str, int]], keep: int) -> None:
    """However runs nest, overlap, outlive each other and fail, whatever calls are given, and however little of the past
    is kept: parents had finished before, none is an ancestor of another, and each thread is a chain."""
    runs = Runs()
    runs.tree._past._keep = runs.tree._past._limit = keep
    containers: list[Hashable] = [ROOT, "never reported"]
    in_flight: list[str] = []
    finished: list[str] = []
    names = itertools.count()
    for action, number in steps:
        parent = containers[number % len(containers)]
        place = list(RunKind)[number % 3]
        if action == "start":
            fresh = next(names)
            runs.start(fresh, parent, place=place)
            containers.append(fresh)
        elif action in ("begin", "open"):
            call = f"c{next(names)}"
            known = gave(*(each for each in finished if (number >> finished.index(each) % 20) & 1), *in_flight)
            if action == "begin":
                runs.begin(call, parent, given=known, place=place)
            else:
                runs.open(parent, call, given=known)
            assert runs.parents[call] <= set(finished)
            in_flight.append(call)
        elif action in ("finish", "fail") and in_flight:
            call = in_flight.pop(number % len(in_flight))
            if action == "finish":
                was_open = CallId(call) in runs.tree._calls  # its run may have ended
                runs.finish(call)
                finished += [call] if was_open else []
            else:
                runs.tree.fail_call(CallId(call))
                runs.end(call)
        elif action == "end" and parent != ROOT:
            runs.end(parent)
            containers.remove(parent)

    above = ancestors(runs)
    for parents in runs.parents.values():
        assert not any(parent in above[other] for parent in parents for other in parents), "implied by another"
    last: dict[ThreadId, str] = {}
    for call, parents in runs.parents.items():
        before = last.get(runs.threads[call])
        assert before is None or before in parents or before not in finished, "a chain, but for failed tries"
        if call in finished:
            last[runs.threads[call]] = call


def test_thread_ids_come_from_the_source_that_was_passed_in() -> None:
    """The tree makes no ids itself, and asks for no more than it needs."""
    made: list[str] = []

    def make() -> ThreadId:
        made.append(f"mine-{len(made)}")
        return ThreadId(made[-1])

    source: Callable[[], ThreadId] = make
    tree = RunTree(source)
    assert made == []
    assert tree.start_call("run", CallId("c")) == ("mine-0", (), (), ())
