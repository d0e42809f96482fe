"""Lineage: which outputs of earlier calls occur in an input."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.core.ids import CallId
from weft.core.program.structure.lineage import NOTHING, Content, TextLineage

A, B, C = map(CallId, "abc")
LONG = "The harbour is full of herring."
OTHER = "Nobody rang the bell this morning."


@pytest.fixture
def lineage() -> TextLineage:
    return TextLineage()


# -- evidence


def test_ids_are_proof(lineage: TextLineage) -> None:
    """The id of a call's message, or of a tool call in it, proves the call."""
    lineage.add_output(A, Content(ids=("message", "tool call")))
    for name in ("message", "tool call"):
        assert lineage.certain(Content(ids=("other", name))) == lineage.origins(Content(ids=(name,))) == (A,)
    assert lineage.origins(Content(ids=("other",))) == ()


@pytest.mark.parametrize("text", [LONG, f"  {LONG}\n"])
def test_a_whole_text_counts(lineage: TextLineage, text: str) -> None:
    """A whole text, apart from whitespace around it, proves the call that gave it."""
    lineage.add_output(A, Content((f"{LONG} ",)))
    assert lineage.certain(Content((OTHER, text))) == lineage.origins(Content((OTHER, text))) == (A,)


def test_a_short_text_is_not_certain(lineage: TextLineage) -> None:
    """One word may be the same by chance, so it counts only as an origin."""
    lineage.add_output(A, Content(("Paris",)))
    assert lineage.certain(Content(("Paris",))) == ()
    assert lineage.origins(Content(("Paris",))) == (A,)


@pytest.mark.parametrize(("text", "counts"), [("x" * 16, True), ("x" * 15, False)])
def test_a_quoted_text_counts_from_16_characters(lineage: TextLineage, text: str, counts: bool) -> None:
    """A text inside a longer text is evidence if it is long enough, but never certain."""
    lineage.add_output(A, Content((text,)))
    assert lineage.origins(Content((f"Improve: {text}.",))) == ((A,) if counts else ())
    assert lineage.certain(Content((f"Improve: {text}.",))) == ()


def test_the_search_for_quotations_may_be_limited(lineage: TextLineage) -> None:
    """`quoted_from` limits the search inside longer texts, and may name unknown calls; look-ups are not limited."""
    lineage.add_output(A, Content((LONG,)))
    lineage.add_output(B, Content((OTHER,)))
    lineage.add_output(C, Content(("short",)))
    content = Content((f"{LONG} {OTHER}", "short"))
    assert lineage.origins(content, quoted_from=[B, CallId("unknown")]) == (B, C)
    assert lineage.origins(content) == (A, B, C)


def test_a_quotation_is_certain_where_it_is_asked_for(lineage: TextLineage) -> None:
    """The calls are named whose outputs are searched for. An output of any call that holds the other explains it."""
    lineage.add_output(A, Content((LONG,)))
    lineage.add_output(B, Content((f"{LONG} {OTHER}",)))
    assert lineage.certain(Content((f"Improve: {LONG}",)), [A, CallId("unknown")]) == (A,)
    assert lineage.certain(Content((f"Improve: {LONG} {OTHER}",)), [A]) == ()
    assert lineage.certain(Content((f"Improve: {LONG} {OTHER}",)), [A, B]) == (B,)


def test_the_oldest_comes_first(lineage: TextLineage) -> None:
    """Calls are in the order in which their outputs were added."""
    for call in (C, A, B):
        lineage.add_output(call, Content(ids=(call,)))
    assert lineage.certain(Content(ids=(A, B, C))) == (C, A, B)


# -- no evidence


def test_an_output_of_several_calls_is_evidence_for_none(lineage: TextLineage) -> None:
    """A text or an id that two calls gave proves neither, whole or quoted."""
    lineage.add_output(A, Content((LONG,), ("same",)))
    lineage.add_output(B, Content((LONG,), ("same",)))
    for content in (Content((LONG,)), Content((f"Improve: {LONG}",)), Content(ids=("same",))):
        assert lineage.origins(content) == lineage.certain(content) == ()


def test_a_call_may_repeat_itself(lineage: TextLineage) -> None:
    """A text that one call gave twice is still evidence for this call."""
    lineage.add_output(A, Content((LONG, LONG), ("a", "a")))
    assert lineage.origins(Content((LONG,))) == (A,)


def test_an_output_inside_another_output_does_not_count(lineage: TextLineage) -> None:
    """If an output that quotes another one occurs, the quoted output is not evidence as well."""
    lineage.add_output(A, Content((LONG,)))
    lineage.add_output(B, Content((f"{LONG} {OTHER}",)))
    assert lineage.origins(Content((f"Improve: {LONG} {OTHER}",))) == (B,)
    assert lineage.origins(Content((f"{LONG} {OTHER}",))) == (B,)
    assert lineage.origins(Content((f"Improve: {LONG}",))) == (A,)


@pytest.mark.parametrize("content", [NOTHING, Content(("", "  \n"))])
def test_empty_texts_are_ignored(lineage: TextLineage, content: Content) -> None:
    """They are neither outputs nor evidence."""
    lineage.add_output(A, content)
    assert lineage.origins(content) == lineage.certain(content) == ()


def test_a_call_has_one_output(lineage: TextLineage) -> None:
    """A second output of the same call is ignored."""
    lineage.add_output(A, Content((LONG,)))
    lineage.add_output(A, Content((OTHER,)))
    assert lineage.origins(Content((OTHER,))) == ()


# -- memory


def test_old_outputs_are_forgotten() -> None:
    """Only the newest outputs count; a text of a forgotten and a newer output then belongs to the newer one."""
    lineage = TextLineage(keep=2)
    lineage.add_output(A, Content((LONG,), ("a",)))
    lineage.add_output(B, Content((LONG,), ("b",)))
    lineage.add_output(C, Content(("short",), ("c",)))
    assert lineage.origins(Content(ids=("a", "b", "c"))) == (B, C)
    assert lineage.origins(Content((LONG,))) == lineage.origins(Content((f"{LONG}!",))) == (B,)


def test_the_kept_text_is_limited() -> None:
    """Texts beyond the limit are found as whole texts, but not inside other texts."""
    lineage = TextLineage(keep_chars=len(OTHER))
    lineage.add_output(A, Content((LONG,)))
    lineage.add_output(B, Content((OTHER,)))
    assert lineage.origins(Content((LONG, OTHER))) == (A, B)
    assert lineage.origins(Content((f"{LONG} {OTHER}",))) == (B,)
    lineage.add_output(C, Content(("x" * 1000,)))
    assert lineage.origins(Content((f"{OTHER} {'x' * 1001}",))) == ()
    assert lineage.certain(Content(("x" * 1000,))) == (C,)


def test_a_forgotten_output_is_removed_everywhere() -> None:
    """After many outputs, the dictionaries are as small as after few."""
    lineage = TextLineage(keep=10, keep_chars=200)
    for number in range(500):
        text = f"answer number {number % 100:04}"
        lineage.add_output(CallId(str(number)), Content((text,), (str(number % 7), f"id {number}")))
    assert len(lineage._outputs) == 10
    assert len(lineage._whole._calls) == 10
    assert len(lineage._ids._calls) == 10 + 7
    assert lineage._chars == sum(len(text) for output in lineage._outputs.values() for text in output.quotable) <= 200


words = st.text("ab ", min_size=0, max_size=40)


@given(st.lists(st.lists(words, max_size=2), max_size=8), st.lists(words, max_size=3))
def test_origins_agrees_with_a_plain_search(outputs: list[list[str]], inputs: list[str]) -> None:
    """The text of every origin occurs in the input. A whole text of one call that occurs proves this call."""
    lineage = TextLineage()
    for number, texts in enumerate(outputs):
        lineage.add_output(CallId(str(number)), Content(tuple(texts)))
    found = lineage.origins(Content(tuple(inputs)))
    stripped = [text.strip() for text in inputs]
    producers: dict[str, set[str]] = {}
    for number, texts in enumerate(outputs):
        for text in texts:
            producers.setdefault(text.strip(), set()).add(str(number))
    for call in found:
        assert any(call in producers[text] and any(text in each for each in stripped) for text in producers if text)
    for text, calls in producers.items():
        if text and len(calls) == 1 and text in stripped:
            assert calls <= set(found)
    assert set(lineage.certain(Content(tuple(inputs)))) <= set(found)
