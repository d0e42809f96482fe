"""Each result names the commit at which it was made, and those that are older than their code are listed."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import result_ages
from result_ages import MEASURES, RESULTS, ROOT, SUMMARIES, listing, sections

PAGE = "swap-kernel.md"
CODE = MEASURES[PAGE][""][0]
FIGURES = "\n| size | ratio |\n|---|---|\n| small | 1.00 (0.98, 1.02) |\n"


def git(folder: Path, *arguments: str) -> str:
    who = ("-c", "user.name=Test", "-c", "user.email=test@example.org", "-c", "commit.gpgsign=false")
    command = ["git", *who, *arguments]
    return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout.strip()


def commit(folder: Path, path: str, text: str) -> str:
    """Write a file and commit it. Returns the commit, in seven digits."""
    (folder / path).parent.mkdir(parents=True, exist_ok=True)
    (folder / path).write_text(text)
    git(folder, "add", ".")
    git(folder, "commit", "-m", path)
    return git(folder, "rev-parse", "--short=7", "HEAD")


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A repository with code, and a page with a result that was made at its first commit."""
    folder = tmp_path / "clone"
    folder.mkdir()
    git(folder, "init", "-q")
    made = commit(folder, f"{CODE}/kernel.cpp", "1")
    commit(folder, str(RESULTS / PAGE), f"# The swap kernel\n{FIGURES}\nMade at {made}.\n")
    return folder


def test_every_section_with_figures_names_the_commit_at_which_they_were_made() -> None:
    """The sections that only sum up others need none."""
    found = list(sections(ROOT / RESULTS))
    nameless = [each for each in found if each.has_figures and not each.commits]
    assert [(each.page, each.heading) for each in nameless] == [("reproduction.md", heading) for heading in SUMMARIES]
    assert len(found) > len(nameless) + 20


def test_the_code_of_every_page_is_known_and_exists() -> None:
    """Each page of results has its code in `MEASURES`, under headings that the page has."""
    assert sorted(MEASURES) == sorted(page.name for page in (ROOT / RESULTS).glob("*.md"))
    headings = {(each.page, each.heading) for each in sections(ROOT / RESULTS)}
    for page, by_heading in MEASURES.items():
        assert all((ROOT / path).exists() for paths in by_heading.values() for path in paths)
        assert all(not heading or (page, heading) in headings for heading in by_heading)


def test_a_result_is_listed_once_its_code_has_changed(clone: Path) -> None:
    """A change of other files does not count. Two changes of the code do, as two."""
    commit(clone, "README.md", "about")
    assert listing(clone) == []
    assert [row[3] for row in listing(clone, everything=True)] == ["nothing"]
    for text in "23":
        commit(clone, f"{CODE}/kernel.cpp", text)
    ((page, heading, _, since),) = listing(clone)
    assert (page, heading, since) == (PAGE, "The swap kernel", f"{CODE} 2")


def test_a_shallow_clone_says_that_it_lacks_the_commit(clone: Path, tmp_path: Path) -> None:
    """It has the last commit only, and the listing still works."""
    git(tmp_path, "clone", "-q", "--depth", "1", clone.as_uri(), "shallow")
    assert [row[3] for row in listing(tmp_path / "shallow")] == ["unknown: this clone lacks the commit"]


def test_a_section_may_name_several_commits(tmp_path: Path) -> None:
    """Rows that were made later have their own. A commit in a block of commands is none."""
    text = f"# A\n{FIGURES}\nMade at 1234567, the last row was made at 89abcde.\n"
    text += "\n## B\n```console\nmade at 1234567\n```\n"
    (tmp_path / PAGE).write_text(text)
    first, second = sections(tmp_path)
    assert (first.commits, first.has_figures) == (("1234567", "89abcde"), True)
    assert (second.commits, second.has_figures) == ((), False)
    assert first.paths == result_ages.MEASURES[PAGE][""]
