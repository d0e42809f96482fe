"""Ids: their source, and which strings may travel as ids."""

from __future__ import annotations

import random
import re
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.core.errors import InvalidIdError
from weft.core.ids import MAX_ID_LENGTH, IdSource, check_id

KINDS: list[tuple[str, Callable[[IdSource], str]]] = [
    ("sess", IdSource.session),
    ("prog", IdSource.program),
    ("thr", IdSource.thread),
    ("call", IdSource.call),
]


@pytest.mark.parametrize(("prefix", "make"), KINDS)
def test_an_id_is_its_kind_and_64_bits(prefix: str, make: Callable[[IdSource], str]) -> None:
    """An id is its kind and sixteen hexadecimal digits, and passes `check_id`."""
    made = make(IdSource())
    assert re.fullmatch(rf"{prefix}-[0-9a-f]{{16}}", made)
    assert check_id(made, "id") == made


def test_a_seeded_source_repeats() -> None:
    """Two sources with the same seed make the same ids in the same order; another seed makes other ids."""

    def sequence(seed: int) -> list[str]:
        source = IdSource(random.Random(seed))
        return [make(source) for _, make in KINDS * 5]

    assert sequence(7) == sequence(7)
    assert not set(sequence(7)) & set(sequence(8))


def test_ids_are_unique() -> None:
    """Ten thousand ids of each kind, each from a new source, are all different."""
    made = [make(IdSource()) for _, make in KINDS for _ in range(10_000)]
    assert len(set(made)) == len(made)


def test_unseeded_sources_do_not_follow_the_global_seed() -> None:
    """Ids do not repeat when a user seeds the `random` module."""
    random.seed(1)
    first = IdSource().program()
    random.seed(1)
    assert IdSource().program() != first


@pytest.mark.parametrize("value", ["a", "user 1", "né-日本", "x" * MAX_ID_LENGTH])
def test_good_ids_come_back_unchanged(value: str) -> None:
    """Printable strings of 1 to 256 characters are returned as they are."""
    assert check_id(value, "session_id") is value


@pytest.mark.parametrize(
    ("value", "length"),
    [("", "not 0"), ("x" * (MAX_ID_LENGTH + 1), "not 257"), ("a\nb", "not 3"), ("a\x00", "not 2"), ("\u200b", "not 1")],
)
def test_bad_strings_are_refused(value: str, length: str) -> None:
    """The error for an empty, too long or unprintable string states the rule and the string's length."""
    with pytest.raises(InvalidIdError, match=rf"^tenant must be 1 to 256 printable characters, {length}: ") as caught:
        check_id(value, "tenant")
    assert len(str(caught.value)) < 200, "the message shows a long value only in part"


@pytest.mark.parametrize("value", [None, 3, b"user", ["user"], object()])
def test_other_types_are_refused(value: object) -> None:
    """A value that is not a string is refused with its type, not converted."""
    with pytest.raises(InvalidIdError, match=rf"^session_id must be a string, not {type(value).__name__} \("):
        check_id(value, "session_id")


@given(st.text(st.characters(), max_size=MAX_ID_LENGTH + 20))
def test_check_id_accepts_exactly_what_it_says(value: str) -> None:
    """A string passes if and only if it is printable and has 1 to 256 characters; it can then be encoded."""
    if 1 <= len(value) <= MAX_ID_LENGTH and value.isprintable():
        assert check_id(value, "id").encode().decode() == value
    else:
        with pytest.raises(InvalidIdError):
            check_id(value, "id")
