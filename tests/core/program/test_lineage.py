"""Evidence of where inputs come from, and which calls came before which."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.core.ids import CallId, ThreadId
from weft.core.program.lineage import NOTHING, Ancestry, Content, Lineage

A, B, C = map(CallId, "abc")
LONG = "The harbour is full of herring."
OTHER = "Nobody rang the bell this morning."


@pytest.fixture
def lineage() -> Lineage:
    return Lineage()


# -- what counts


def test_ids_are_proof(lineage: Lineage) -> None:
    """A call is named by the id of its message or of a tool call that it made."""
    lineage.gave(A, Content(ids=("message", "tool call")))
    for name in ("message", "tool call"):
        assert lineage.certain(Content(ids=("other", name))) == lineage.origins(Content(ids=(name,))) == (A,)
    assert lineage.origins(Content(ids=("other",))) == ()


@pytest.mark.parametrize("text", [LONG, f"  {LONG}\n"])
def test_a_whole_text_counts(lineage: Lineage, text: str) -> None:
    """A text that is given on as it was, but for blanks around it, names the call that gave it."""
    lineage.gave(A, Content((f"{LONG} ",)))
    assert lineage.certain(Content((OTHER, text))) == lineage.origins(Content((OTHER, text))) == (A,)


def test_a_short_text_is_not_certain(lineage: Lineage) -> None:
    """One word may be the same by chance: it counts only where nothing better is known."""
    lineage.gave(A, Content(("Paris",)))
    assert lineage.certain(Content(("Paris",))) == ()
    assert lineage.origins(Content(("Paris",))) == (A,)


@pytest.mark.parametrize(("given", "counts"), [("x" * 16, True), ("x" * 15, False)])
def test_a_quoted_text_counts_from_16_characters(lineage: Lineage, given: str, counts: bool) -> None:
    """A text inside a longer one is evidence when it is long enough, and never certain."""
    lineage.gave(A, Content((given,)))
    assert lineage.origins(Content((f"Improve: {given}.",))) == ((A,) if counts else ())
    assert lineage.certain(Content((f"Improve: {given}.",))) == ()


def test_quotes_are_looked_for_where_asked(lineage: Lineage) -> None:
    """A search may be limited to the outputs of some calls, known or not; look-ups are not."""
    lineage.gave(A, Content((LONG,)))
    lineage.gave(B, Content((OTHER,)))
    lineage.gave(C, Content(("short",)))
    content = Content((f"{LONG} {OTHER}", "short"))
    assert lineage.origins(content, quoted_from=[B, CallId("unknown")]) == (B, C)
    assert lineage.origins(content) == (A, B, C)


def test_the_oldest_comes_first(lineage: Lineage) -> None:
    """Calls are told in the order in which they gave their outputs."""
    for call in (C, A, B):
        lineage.gave(call, Content(ids=(call,)))
    assert lineage.certain(Content(ids=(A, B, C))) == (C, A, B)


# -- what does not


def test_what_several_calls_gave_is_evidence_for_none(lineage: Lineage) -> None:
    """A text or an id that two calls gave tells neither, whole or quoted."""
    lineage.gave(A, Content((LONG,), ("same",)))
    lineage.gave(B, Content((LONG,), ("same",)))
    for given_ in (Content((LONG,)), Content((f"Improve: {LONG}",)), Content(ids=("same",))):
        assert lineage.origins(given_) == lineage.certain(given_) == ()


def test_a_call_may_repeat_itself(lineage: Lineage) -> None:
    """A text that one call gave twice is still its own."""
    lineage.gave(A, Content((LONG, LONG), ("a", "a")))
    assert lineage.origins(Content((LONG,))) == (A,)


def test_a_part_of_another_output_is_that_ones(lineage: Lineage) -> None:
    """When an output that quotes another occurs, the quoted one is no further evidence."""
    lineage.gave(A, Content((LONG,)))
    lineage.gave(B, Content((f"{LONG} {OTHER}",)))
    assert lineage.origins(Content((f"Improve: {LONG} {OTHER}",))) == (B,)
    assert lineage.origins(Content((f"{LONG} {OTHER}",))) == (B,)
    assert lineage.origins(Content((f"Improve: {LONG}",))) == (A,)


@pytest.mark.parametrize("content", [NOTHING, Content(("", "  \n"))])
def test_nothing_is_nothing(lineage: Lineage, content: Content) -> None:
    """Empty texts come from nobody and prove nothing."""
    lineage.gave(A, content)
    assert lineage.origins(content) == lineage.certain(content) == ()


def test_a_call_gives_once(lineage: Lineage) -> None:
    """A second output of the same call is ignored."""
    lineage.gave(A, Content((LONG,)))
    lineage.gave(A, Content((OTHER,)))
    assert lineage.origins(Content((OTHER,))) == ()


# -- memory


def test_old_outputs_are_forgotten() -> None:
    """Only the newest outputs count; what an old one had in common with a newer one is the newer one's."""
    lineage = Lineage(keep=2)
    lineage.gave(A, Content((LONG,), ("a",)))
    lineage.gave(B, Content((LONG,), ("b",)))
    lineage.gave(C, Content(("short",), ("c",)))
    assert lineage.origins(Content(ids=("a", "b", "c"))) == (B, C)
    assert lineage.origins(Content((LONG,))) == lineage.origins(Content((f"{LONG}!",))) == (B,)


def test_only_so_much_text_is_kept() -> None:
    """Texts that no longer fit are known whole, but not found inside others."""
    lineage = Lineage(keep_chars=len(OTHER))
    lineage.gave(A, Content((LONG,)))
    lineage.gave(B, Content((OTHER,)))
    assert lineage.origins(Content((LONG, OTHER))) == (A, B)
    assert lineage.origins(Content((f"{LONG} {OTHER}",))) == (B,)
    lineage.gave(C, Content(("x" * 1000,)))
    assert lineage.origins(Content((f"{OTHER} {'x' * 1001}",))) == ()
    assert lineage.certain(Content(("x" * 1000,))) == (C,)


def test_what_is_forgotten_leaves_nothing_behind() -> None:
    """After many outputs the books are as small as after few."""
    lineage = Lineage(keep=10, keep_chars=200)
    for number in range(500):
        text = f"answer number {number % 100:04}"
        lineage.gave(CallId(str(number)), Content((text,), (str(number % 7), f"id {number}")))
    assert len(lineage._outputs) == 10
    assert len(lineage._whole._calls) == 10
    assert len(lineage._ids._calls) == 10 + 7
    assert lineage._chars == sum(len(text) for output in lineage._outputs.values() for text in output.quotable) <= 200


words = st.text("ab ", min_size=0, max_size=40)


@given(st.lists(st.lists(words, max_size=2), max_size=8), st.lists(words, max_size=3))
def test_origins_agrees_with_a_plain_search(outputs: list[list[str]], given_: list[str]) -> None:
    """Every origin's text occurs in the input, and a text that occurs, and is nobody else's nor part of another that
    occurs, names its call."""
    lineage = Lineage()
    for number, texts in enumerate(outputs):
        lineage.gave(CallId(str(number)), Content(tuple(texts)))
    found = lineage.origins(Content(tuple(given_)))
    inputs = [text.strip() for text in given_]
    givers: dict[str, set[str]] = {}
    for number, texts in enumerate(outputs):
        for text in texts:
            givers.setdefault(text.strip(), set()).add(str(number))
    for call in found:
        assert any(call in givers[text] and any(text in each for each in inputs) for text in givers if text)
    for text, calls in givers.items():
        if text and len(calls) == 1 and text in inputs:
            assert calls <= set(found)
    assert set(lineage.certain(Content(tuple(given_)))) <= set(found)


# -- which call came before which


def ancestry(keep: int = 1000) -> Ancestry:
    count = itertools.count()
    return Ancestry(lambda: ThreadId(f"t{next(count)}"), keep)


def test_sets_of_calls() -> None:
    """A diamond: what came before, up to, and what has finished."""
    past = ancestry()
    past.add(A, ())
    past.add(B, (A,))
    past.add(C, (A,))
    past.add(CallId("d"), (B, C))
    assert [past.contains(past.before(["d"]), call) for call in ("a", "b", "c", "d")] == [True, True, True, False]  # type: ignore[list-item]
    assert [past.contains(past.up_to([B]), call) for call in (A, B, C)] == [True, True, False]
    assert past.in_order([C, A, B]) == (A, B, C)
    past.finish(B)
    assert [past.has_finished(call) for call in (A, B, CallId("unknown"))] == [False, True, False]


def test_threads_prefer_what_they_are_told_to() -> None:
    """A join continues the thread of a preferred parent that is still its thread's last call, else of its first."""
    for preferred, expected in (((), "t0"), ((B,), "t1"), ((A, B), "t0"), ((CallId("unknown"),), "t0")):
        past = ancestry()
        past.add(A, ())
        past.add(B, ())
        assert past.add(C, (A, B), preferred) == expected


def test_old_calls_are_forgotten_but_those_in_use() -> None:
    """The newest stay, and those that somebody asks to keep."""
    past = ancestry(keep=2)
    for number in range(5):
        past.add(CallId(str(number)), ())
    past.forget(lambda: [CallId("0")])
    assert list(past._calls) == ["0", "3", "4"]
    past.forget(list)
    assert len(past._calls) == 3, "now and then"
