"""Words that the glossary (docs/reference/glossary.md) has replaced appear nowhere in the tree."""

from __future__ import annotations

import re
import subprocess

import pytest
from background import ROOT

# A word in any case, or the name of a class. Each pattern has a bracket, so that it does not find itself.
RETIRED_WORDS = {
    "riva[l]s?": "baseline",
    "besid[e]": "next to, in addition to, or background",
    "leas[h]": "cancellation handle",
    "witnes[s]": "harness",
    "whoeve[r]": "the noun",
    "ane[w]": "again",
}
RETIRED_CLASSES = {
    r"\w*Make[r]": "launcher",
    "Famil[y]": "process tree",
    "_?[P]laces?": "assignment",
    "_?Stretc[h]": "segment",
}
ALLOWED = '"--riva' + 'ls"'  # the former spelling of an option, which still works


def tracked() -> list[str]:
    """The text files of the tree."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("this is not a git checkout")
    return [name for name in listed.stdout.splitlines() if not name.endswith((".svg", ".png", "LICENSE"))]


def found(pattern: re.Pattern[str], names: list[str]) -> list[str]:
    """Where a pattern is found: file, line and text."""
    return [
        f"{name}:{number}: {line.strip()[:100]}"
        for name in names
        if (ROOT / name).is_file()
        for number, line in enumerate((ROOT / name).read_text().splitlines(), 1)
        if pattern.search(line) and ALLOWED not in line
    ]


@pytest.mark.parametrize(("word", "instead"), RETIRED_WORDS.items())
def test_a_retired_word_is_gone(word: str, instead: str) -> None:
    """Names, comments and pages use the glossary's word."""
    places = found(re.compile(rf"(?<![A-Za-z]){word}(?![A-Za-z])", re.IGNORECASE), tracked())
    assert not places, f"say {instead}:\n" + "\n".join(places)


@pytest.mark.parametrize(("name", "instead"), RETIRED_CLASSES.items())
def test_a_retired_class_is_gone(name: str, instead: str) -> None:
    """No class has a name that the glossary has replaced."""
    places = found(re.compile(rf"\bclass (?:{name})\b"), [name for name in tracked() if name.endswith(".py")])
    assert not places, f"call it {instead}:\n" + "\n".join(places)


def test_a_retired_word_would_be_found() -> None:
    """The search sees a word in a comment, in any case, and as a part of a name."""
    word = re.compile(rf"(?<![A-Za-z]){next(iter(RETIRED_WORDS))}(?![A-Za-z])", re.IGNORECASE)
    for line in ("# the Riva" + "ls", "riva" + "l_count = 3", "a riva" + "l"):
        assert word.search(line), line
    assert not word.search("arrival")
