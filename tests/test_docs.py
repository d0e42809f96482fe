"""The documents: their snippets run, their links lead somewhere, and they name code and commands that exist."""

from __future__ import annotations

import ast
import asyncio
import importlib
import inspect
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from types import CodeType
from typing import Any

import pytest
import typer.main
from background import ROOT, CommandResult
from scripts_on_one_engine import on_one_engine, printed_by
from snippets import whole_files

import weft
from weft.commands.cli import app
from weft.engine.vllm_compat.known_names import VllmArgs

DOCS = ROOT / "docs"
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted(DOCS.rglob("*.md"))]
# In tests/engine/http/test_standalone.py, against vLLM's server, and in tests/engine/serve/test_connect.py.
RUN_ELSEWHERE = {"how-to/vllm-server.md", "how-to/connect.md"}


def named(document: Path) -> str:
    return document.relative_to(ROOT).as_posix()


def blocks(document: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", document.read_text(), flags=re.DOTALL)


def prose(document: Path) -> str:
    """A document without its code blocks."""
    return re.sub(r"```.*?```", "", document.read_text(), flags=re.DOTALL)


# -- snippets

PAGES = [
    page
    for page in (path.relative_to(DOCS).as_posix() for path in sorted(DOCS.rglob("*.md")))
    if blocks(DOCS / page, "python") and page not in RUN_ELSEWHERE
]


@pytest.mark.engine
@pytest.mark.parametrize("page", PAGES)
def test_the_snippets_of_a_page_run(
    page: str, engine: weft.Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The snippets of a page run in their order, each with the names of those before; `engine` is given."""
    monkeypatch.chdir(tmp_path)  # some write files
    names: dict[str, Any] = {"engine": engine, "__name__": "__main__"}

    async def run(code: CodeType) -> None:
        result = eval(code, names)  # noqa: S307  the documents' own code
        if inspect.iscoroutine(result):
            await result

    async def run_page() -> None:
        for number, source in enumerate(blocks(DOCS / page, "python"), start=1):
            where = f"{page}, snippet {number}"
            await run(compile(source, where, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT))

    asyncio.run(run_page())


def test_the_pages_with_snippets_are_found() -> None:
    """Pages in subfolders are found, and the pages whose snippets run elsewhere exist."""
    assert "how-to/langchain.md" in PAGES
    assert all(blocks(DOCS / page, "python") for page in RUN_ELSEWHERE)


@pytest.mark.engine
@on_one_engine
def test_the_tutorials_first_program_runs(command_result: CommandResult) -> None:
    """The tutorial's first file prints the row of its program."""
    assert "talk finished 2 calls" in printed_by(command_result, "first").text


@pytest.mark.engine
@on_one_engine
def test_the_tutorials_comparison_runs(command_result: CommandResult) -> None:
    """The tutorial's second file prints the process table and the mean time of short and long programs."""
    printed = printed_by(command_result, "compare")
    assert len(printed.finished("long ", "short ")) == 10
    assert re.search(r"short programs took [\d.]+ s on average\nlong programs took [\d.]+ s on average", printed.text)


@pytest.mark.parametrize("page", ["how-to/add-a-policy.md", "how-to/add-a-balancer.md"])
def test_the_files_of_an_extension_guide_work(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The line that the page adds imports the page's module, and the page's tests pass."""
    (module, source), (package_file, line), (test_file, tests) = whole_files(DOCS / page).items()
    package = importlib.import_module("weft." + package_file.removesuffix("/__init__.py").replace("/", "."))
    (tmp_path / Path(module).name).write_text(source)
    monkeypatch.setattr(package, "__path__", [*package.__path__, str(tmp_path)])
    registry = package.register.__self__
    monkeypatch.setattr(registry, "entries", dict(registry.entries))
    name = f"{package.__name__}.{Path(module).stem}"
    try:
        exec(line, {})  # noqa: S102  the documents' own code
        names: dict[str, Any] = {"__name__": "tests"}
        exec(compile(tests, test_file, "exec"), names)  # noqa: S102  likewise
    finally:
        sys.modules.pop(name, None)
    found = [each for each in names if each.startswith("test_")]
    assert len(found) == 3
    for each in found:
        names[each]()


# -- links


def anchors(document: Path) -> set[str]:
    """The anchors of a page's headings, as Python-Markdown makes them."""
    headings = re.findall(r"^#+ (.+)$", prose(document), flags=re.MULTILINE)
    plain = (re.sub(r"[^\w\s-]", "", heading).strip().lower() for heading in headings)
    return {re.sub(r"[\s-]+", "-", heading) for heading in plain}


@pytest.mark.parametrize("document", DOCUMENTS, ids=named)
def test_every_link_of_a_document_leads_somewhere(document: Path) -> None:
    """Relative links name a file that is there, and an anchor of it. `make docs` checks those inside docs/ again."""
    for target in re.findall(r"\]\((?!https?:)([^)]+)\)", prose(document)):
        path, _, anchor = target.partition("#")
        page = (document.parent / path).resolve() if path else document
        assert page.exists(), target
        is_generated = page.name in {"cli.md", "policies.md", "balancers.md"}
        assert not anchor or is_generated or anchor in anchors(page), target


# -- code that the documents name


def paths_named(text: str) -> Iterator[str]:
    """The files and folders of this repository that a text names. NAME stands for a name to be chosen."""
    found = re.findall(r"`((?:core|engine|integrations|csrc|src|tests|benchmarks|examples|docs)/[\w./]*\w)/?`", text)
    yield from (path for path in found if "NAME" not in path)


@pytest.mark.parametrize("document", [d for d in DOCUMENTS if d.name != "CHANGELOG.md"], ids=named)
def test_every_file_that_a_document_names_exists(document: Path) -> None:
    """A page that names a file of this repository follows the file when it moves."""
    missing = [path for path in paths_named(document.read_text()) if not (ROOT / path).exists()]
    assert missing == []


def test_the_design_page_names_every_folder() -> None:
    """A new folder of core/, engine/ or integrations/ gets its line under "Rooms"."""
    (rooms,) = re.findall(r"## Rooms\n\n```text\n(.*?)```", (DOCS / "explanation/design.md").read_text(), re.DOTALL)
    folders = {
        path.parent.relative_to(ROOT)
        for top in ("core", "engine", "integrations")
        for path in (ROOT / top).glob("*/*.py")
    }
    assert [str(each) for each in sorted(folders) if f"{each.name}" not in rooms] == []


def test_every_name_of_the_glossary_is_in_its_file() -> None:
    """A row's last column names identifiers and their file; the identifiers occur there."""
    rows = [line for line in (DOCS / "reference/glossary.md").read_text().splitlines() if line.startswith("| **")]
    assert len(rows) > 40
    for row in rows:
        *_, where = row.strip("| ").split(" | ")
        names = [name for name in re.findall(r"`([^`]+)`", where) if "/" not in name]
        sources = [(ROOT / path).read_text() for path in paths_named(where) if (ROOT / path).is_file()]
        assert all(any(name in source for source in sources) for name in names), row


SUFFIXES = {".py", ".cpp", ".cu", ".h"}
SOURCES = [
    ROOT / "pyproject.toml",
    *(
        path
        for folder in ("core", "engine", "integrations", "examples", "src/weft", "csrc", "benchmarks")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in SUFFIXES
    ),
]


def test_every_page_that_the_code_names_exists() -> None:
    """A docstring or a message that points to a page of docs/ follows the page when it moves."""
    named_pages = {page for path in SOURCES for page in re.findall(r"docs/[\w./-]+\.md", path.read_text())}
    assert named_pages
    assert [page for page in sorted(named_pages) if not (ROOT / page).exists()] == []


# -- commands that the documents name


def command_lines() -> Iterator[tuple[str, list[str]]]:
    """Every `weft …` line of the documents' console blocks, as words, with its document."""
    for document in DOCUMENTS:
        for block in blocks(document, "console"):
            for line in block.replace("\\\n", " ").splitlines():
                words = shlex.split(line, comments=True)[1:] if line.startswith("$ ") else []
                if words and words[0].removeprefix(".venv/bin/") == "weft":
                    yield named(document), words[1:]


@pytest.mark.parametrize(
    ("document", "words"), list(command_lines()), ids=lambda value: value if isinstance(value, str) else " ".join(value)
)
def test_every_command_of_the_documents_exists(document: str, words: list[str]) -> None:
    """Commands and options that a page shows are those of `weft --help`."""
    command: Any = typer.main.get_command(app)
    while words and words[0] in getattr(command, "commands", {}):
        command = command.commands[words.pop(0)]
    assert not getattr(command, "commands", {}), document
    if "--" in words:  # what follows is another command
        words = words[: words.index("--")]
    known = {option for each in command.params for option in (*each.opts, *each.secondary_opts)}
    if command.context_settings.get("ignore_unknown_options"):  # the others are vLLM's
        known |= {
            f"--{name.replace('_', '-')}"
            for name in (*VllmArgs.__annotations__, "host", "port", "ssl_certfile", "ssl_keyfile")
        }
    assert [word for word in words if word.startswith("--") and word.split("=")[0] not in known] == []


@pytest.mark.parametrize(
    "target", sorted({t for d in DOCUMENTS for t in re.findall(r"\$ make ([\w-]+)", d.read_text())})
)
def test_every_make_target_of_the_documents_exists(target: str) -> None:
    """A page that shows `make TARGET` names a target of the Makefile."""
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
