"""The run tree with lineage: what the contents of calls prove of their parents."""

from __future__ import annotations

import pytest
from named_runs import Runs, content_of

from weft.core.ids import CallId
from weft.core.program.structure.lineage import Content
from weft.core.program.structure.runs import RunKind

# -- lineage


def two_strands(runs: Runs) -> None:
    """Make two concurrent calls in one run, and end both."""
    runs.call("plan")
    runs.begin("a1")
    runs.begin("b1")
    runs.finish("a1", "b1")


def test_lineage_tells_strands_apart(runs: Runs) -> None:
    """When helpers of several steps run concurrently in one run, the input of a call tells which helper made it. That
    the code did not wait for the other helper is not certain, so that one stays a guess."""
    two_strands(runs)
    runs.begin("a2", inputs=content_of("plan", "a1"))
    runs.begin("b2", inputs=content_of("plan", "b1"))
    runs.finish("a2", "b2")
    runs.call("join", inputs=content_of("a2", "b2"))
    assert runs.parents == {
        "plan": set(),
        "a1": {"plan"},
        "b1": {"plan"},
        "a2": {"a1", "b1"},
        "b2": {"a1", "b1"},
        "join": {"a2", "b2"},
    }
    assert {call: inexact for call, inexact in runs.inexact.items() if inexact} == {"a2": {"b1"}, "b2": {"a1"}}
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
    assert (runs.parents["a2"], runs.inexact["a2"]) == ({"a1", "b1"}, {"b1"})
    assert (runs.parents["a3"], runs.inexact["a3"]) == ({"a2"}, set()), "b1 comes before a2 already, perhaps"
    assert (runs.call("b2", inputs=content_of("b1")), runs.inexact["b2"]) == ({"b1", "a3"}, {"a3"})
    assert runs.threads["b2"] == runs.threads["b1"]
    assert (runs.call("join"), runs.inexact["join"]) == ({"b2"}, {"b2"}), "a3 comes before b2 already, perhaps"


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


def test_a_quoted_text_proves_a_guess(runs: Runs) -> None:
    """Outputs of the guesses are searched for inside longer texts. The other guesses stay: the code that picks the best
    of three has waited for all of them."""
    answers = {name: Content((f"the answer that {name} gave",)) for name in ("x", "y", "z")}
    for name in answers:
        runs.begin(name)
    for name, answer in answers.items():
        runs.tree.end_call(CallId(name), answer)
        runs.end(name)
    runs.call("next", inputs=Content(("Improve: the answer that y gave!",)))
    assert (runs.parents["next"], runs.inexact["next"]) == (set("xyz"), {"x", "z"})
    assert runs.threads["next"] == runs.threads["y"]
    assert (runs.call("after"), runs.inexact["after"]) == ({"next"}, {"next"})


def test_code_that_uses_results_one_by_one_may_have_waited_for_all(runs: Runs) -> None:
    """After a gather, one call for each result: each has its own result for certain, and the others as guesses."""
    two_strands(runs)
    runs.begin("refined a", inputs=content_of("a1"))
    runs.begin("refined b", inputs=content_of("b1"))
    for name, other in (("a", "b1"), ("b", "a1")):
        assert runs.parents[f"refined {name}"] == {"a1", "b1"}
        assert runs.inexact[f"refined {name}"] == {other}


def test_a_loop_over_calls_as_they_complete(runs: Runs) -> None:
    """Each turn of the loop uses one result. It has waited for the turn before it, which is therefore a guess."""
    for name in "abc":
        runs.begin(name)
    runs.finish("b")
    assert runs.call("use b", inputs=content_of("b")) == {"b"}
    runs.finish("c")
    assert (runs.call("use c", inputs=content_of("c")), runs.inexact["use c"]) == ({"c", "use b"}, {"use b"})
    runs.finish("a")
    assert (runs.call("use a", inputs=content_of("a")), runs.inexact["use a"]) == ({"a", "use c"}, {"use c"})


def test_a_quoted_text_of_another_strand_adds_a_parent(runs: Runs) -> None:
    """A call that quotes the output of a strand beside comes after it, once: the next call has it in its past."""
    runs.start("producer")
    runs.open("producer", "made")
    runs.tree.end_call(CallId("made"), Content(("a text of some length",)))
    runs.call("known")
    assert runs.call("quoting", inputs=Content(("Improve: a text of some length",))) == {"known", "made"}
    assert runs.call("next", inputs=Content(("Improve: a text of some length",))) == {"quoting"}


def test_a_whole_text_of_another_strand_adds_a_parent(runs: Runs) -> None:
    """A text that is the output of one call only is as good as an id."""
    runs.start("producer")
    runs.open("producer", "made")
    runs.tree.end_call(CallId("made"), Content(("a text of some length",)))
    runs.call("known")
    assert runs.call("given", inputs=Content(("a text of some length",))) == {"known", "made"}


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


def test_calls_of_one_run_stay_together(runs: Runs) -> None:
    """If lineage names one of the calls with which a run ended, the others come before the next call's successors too:
    the next call waited for the run. A call beside the run stays a guess."""
    runs.start("parallel")
    for name in "xy":
        runs.start(f"part {name}", "parallel", kind=RunKind.STAGE, stage="map")
        runs.begin(name, f"part {name}")
    runs.begin("other")
    runs.finish("x", "y")
    runs.end("part x", "part y", "parallel")
    runs.finish("other")
    runs.begin("join", inputs=content_of("x"))
    assert (runs.parents["join"], runs.inexact["join"]) == ({"x", "y", "other"}, {"y", "other"})
    runs.begin("strand", inputs=content_of("other"))
    assert (runs.parents["strand"], runs.inexact["strand"]) == ({"x", "y", "other"}, {"x", "y"})
