"""Ids: where they come from, and which ones may travel."""

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
    """An id reads as its kind and sixteen hexadecimal digits, and may itself travel."""
    made = make(IdSource())
    assert re.fullmatch(rf"{prefix}-[0-9a-f]{{16}}", made)
    assert check_id(made, "id") == made


def test_a_seeded_source_repeats() -> None:
    """Two sources with the same seed give the same ids in the same order, and another seed gives others."""

    def sequence(seed: int) -> list[str]:
        source = IdSource(random.Random(seed))
        return [make(source) for _, make in KINDS * 5]

    assert sequence(7) == sequence(7)
    assert not set(sequence(7)) & set(sequence(8))


def test_ids_are_unique() -> None:
    """Ten thousand ids of each kind, from sources of their own, are all different."""
    made = [make(IdSource()) for _, make in KINDS for _ in range(10_000)]
    assert len(set(made)) == len(made)


def test_unseeded_sources_do_not_follow_the_global_seed() -> None:
    """Seeding the `random` module, as users do for their own sake, does not make ids repeat."""
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
    """Empty, too long and unprintable strings are refused with what is asked for and the length found."""
    with pytest.raises(InvalidIdError, match=rf"^tenant must be 1 to 256 printable characters, {length}: ") as caught:
        check_id(value, "tenant")
    assert len(str(caught.value)) < 200, "a long value is cut short in the message"


@pytest.mark.parametrize("value", [None, 3, b"user", ["user"], object()])
def test_other_types_are_refused(value: object) -> None:
    """What is not a string is refused with its type, not converted."""
    with pytest.raises(InvalidIdError, match=rf"^session_id must be a string, not {type(value).__name__} \("):
        check_id(value, "session_id")


@given(st.text(st.characters(), max_size=MAX_ID_LENGTH + 20))
def test_check_id_accepts_exactly_what_it_says(value: str) -> None:
    """A string passes if and only if it is printable and of 1 to 256 characters; what passes can be encoded."""
    if 1 <= len(value) <= MAX_ID_LENGTH and value.isprintable():
        assert check_id(value, "id").encode().decode() == value
    else:
        with pytest.raises(InvalidIdError):
            check_id(value, "id")
