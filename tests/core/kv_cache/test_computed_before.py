"""What programs have computed before, against sets of prefixes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.core.kv_cache import contexts as computed_before
from weft.core.kv_cache.contexts import ComputedBefore

words = st.text("ab", min_size=1, max_size=6)


def prefixes(word: str) -> list[str]:
    """A chain: each key stands for all before it."""
    return [word[: end + 1] for end in range(len(word))]


@given(st.lists(words, max_size=6), words)
def test_what_was_computed_before_is_the_longest_shared_beginning(before: list[str], word: str) -> None:
    """Calls go on, go back, and branch."""
    computed = ComputedBefore()
    for each in before:
        computed.add("p", prefixes(each))
    known = {prefix for each in before for prefix in prefixes(each)}
    assert computed.blocks("p", prefixes(word)) == sum(prefix in known for prefix in prefixes(word))
    assert computed.blocks("q", prefixes(word)) == 0
    computed.forget("p")
    assert (computed.blocks("p", prefixes(word)), computed._blocks) == (0, 0)


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program has eight chains, and all programs together so many blocks. The longest unused program goes."""
    computed = ComputedBefore()
    for number in range(100):
        computed.add("p", [f"{number}"])
    assert computed._blocks == 8
    monkeypatch.setattr(computed_before, "_MOST_BLOCKS", 10)
    computed.add("q", prefixes("abcd"))
    assert (computed.blocks("p", ["99"]), computed.blocks("q", prefixes("abcd"))) == (0, 4)
