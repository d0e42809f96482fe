"""The run tree: which parents of a call are certain, and which are guesses."""

from __future__ import annotations

import pytest
from named_runs import Runs, content_of

from weft.core.ids import CallId
from weft.core.program.structure.lineage import Content
from weft.core.program.structure.runs import RunKind

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


def test_a_text_of_two_calls_proves_neither(runs: Runs) -> None:
    """A join whose input has the text of x, and a text of both y and z, comes after x, and perhaps after the others."""
    same, other = Content(texts=("two of them say just this",)), Content(texts=("and one says that",))
    for call in "wxyz":
        runs.begin(call)
    for call, content in (("w", Content(texts=("a fourth thing altogether",))), ("x", other), ("y", same), ("z", same)):
        runs.tree.end_call(CallId(call), content)
        runs.tree.end(call)
    assert runs.call("join", inputs=Content(texts=("and one says that; two of them say just this",))) == set("wxyz")
    assert runs.inexact["join"] == {"w", "y", "z"}


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


def test_a_call_at_a_place_that_is_not_certain_may_be_between_others(runs: Runs) -> None:
    """Lineage proves one of its parents. The other one stays a guess, and so does the call for the next one."""
    for name in "xy":
        runs.start(f"part {name}", kind=RunKind.STAGE, stage="map")
        runs.begin(name, f"part {name}")
    runs.finish("x", "y")
    runs.end("part x", "part y")
    runs.tree.start("lost", None, is_certain=False)
    assert (runs.call("between", "lost", inputs=content_of("x")), runs.inexact["between"]) == ({"x", "y"}, {"y"})
    runs.end("lost")
    assert (runs.call("next"), runs.inexact["next"]) == ({"between"}, {"between"})


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
