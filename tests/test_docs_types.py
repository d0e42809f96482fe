"""The Python blocks of the documents pass mypy --strict and basedpyright."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import snippets
from _pytest.mark import ParameterSet
from background import ROOT, CommandResult

DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
# Both checkers read it as well. Only its lines that end in "# refused" may be errors.
WRONG = """# A page

<!-- fragment -->
```python
not_defined + 1
```

```python
with weft.Program() as program:
    program.bransh()  # refused
    answer = await nothing()  # refused
```

Text between two blocks, of which the second one knows the names of the first.

```python
answer: int = program.name  # refused
print(program.config())
```

```python title="whole.py"
number: int = "one"  # refused
```

```python title="core/__init__.py"
from weft.whole import number, letter  # refused
```
"""


def written(folder: Path) -> Path:
    """The folder with the blocks of all documents, and those of the page above."""
    source, pages = folder / "source", folder / "pages"
    source.mkdir()
    pages.mkdir()
    (source / "wrong.md").write_text(WRONG)
    snippets.write(DOCUMENTS, ROOT, pages)
    snippets.write([source / "wrong.md"], source, pages)
    return pages


def in_background(module: str, start: str, options: list[str]) -> ParameterSet:
    """A checker of the folder of the pages, with the folder where it starts."""
    lines = ["import os, runpy, sys", "pages = sys.argv.pop()", f"os.chdir({start})"]
    lines += [f"sys.argv = [{module!r}, *{options}, pages]", f"runpy.run_module({module!r}, run_name='__main__')"]
    return pytest.param(marks=pytest.mark.background("-c", "\n".join(lines), written), id=module)


# mypy begins with the settings of the repository. Its cache is one of its own, because another mypy may run at the same
# time. basedpyright resolves what pages import of each other from where it starts.
CACHE = ROOT / ".mypy_cache" / "documents"


@pytest.mark.parametrize(
    (),
    [
        in_background("mypy", repr(str(ROOT)), ["--no-error-summary", "--cache-dir", str(CACHE)]),
        in_background("basedpyright", "pages", ["--level", "error", "--pythonpath", sys.executable]),
    ],
)
def test_the_blocks_of_the_documents_have_the_right_types(command_result: CommandResult) -> None:
    """The only errors are those that the page above has on purpose, on its lines; a fragment is not read."""
    found = re.findall(r"(\w+)\.py:(\d+):.*error\b", command_result.stdout)
    lines = {number for number, line in enumerate(WRONG.splitlines(), 1) if line.endswith("# refused")}
    assert {int(line) for name, line in found if name in ("wrong", "wrong_1", "whole")} == lines, command_result
    assert {name for name, _ in found} == {"wrong", "wrong_1", "whole"}, command_result.stdout


def test_every_document_with_blocks_is_read(tmp_path: Path) -> None:
    """README, tutorial and how-to pages are among the files, each block with its line of the document."""
    pages = snippets.write(DOCUMENTS, ROOT, tmp_path)
    assert {"README.py", "first.py", "compare.py", "docs_how_to_langchain.py", "shortest_prompt.py"} <= {*pages}
    assert {document for document in DOCUMENTS if "```python" in document.read_text()} == {*pages.values()}
    for name, document in pages.items():
        lines = document.read_text().splitlines()
        for number, line in enumerate((tmp_path / name).read_text().splitlines()[1:], 1):
            if line and "async def snippet_" not in line and " import " not in line:
                assert line.strip() == lines[number].strip()
