"""Every Python snippet of docs/ runs, page by page, on a real engine."""

from __future__ import annotations

import ast
import asyncio
import inspect
import re
from pathlib import Path
from types import CodeType
from typing import Any

import pytest

import weft

DOCS = Path(__file__).parent.parent / "docs"
ELSEWHERE = {"scheduler.md"}  # in tests/engine/test_standalone.py, against vLLM's server


def snippets(page: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL)


PAGES = [page.name for page in sorted(DOCS.glob("*.md")) if snippets(page) and page.name not in ELSEWHERE]


@pytest.mark.engine
@pytest.mark.parametrize("name", PAGES)
def test_the_snippets_of_a_page_run(
    name: str, engine: weft.Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the order they are written, each seeing the names of those before; `engine` is given."""
    monkeypatch.chdir(tmp_path)  # some write files
    seen: dict[str, Any] = {"engine": engine, "__name__": "__main__"}

    async def run(code: CodeType) -> None:
        result = eval(code, seen)  # noqa: S307  the documents' own code
        if inspect.iscoroutine(result):
            await result

    async def run_page() -> None:
        for number, source in enumerate(snippets(DOCS / name), start=1):
            where = f"{name}, snippet {number}"
            await run(compile(source, where, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT))

    asyncio.run(run_page())


def test_there_are_snippets() -> None:
    """The pattern finds them."""
    assert "langchain.md" in PAGES
