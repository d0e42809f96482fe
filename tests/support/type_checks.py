"""mypy and basedpyright over all that tests have for them: one run of each, because it loads the types of vLLM."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import snippets
from _pytest.mark import ParameterSet
from background import ROOT, CommandResult

CASES = ROOT / "tests" / "core" / "program" / "typing_cases.py"
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
# A page of which only the lines that end in "# refused" may be errors.
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


def _in_background(module: str, start: str, options: list[str]) -> ParameterSet:
    """A checker of the pages and of the cases, with the folder where it starts."""
    lines = ["import os, runpy, sys", "pages = sys.argv.pop()", f"os.chdir({start})"]
    lines += [f"sys.argv = [{module!r}, *{options}, pages, {str(CASES)!r}]"]
    lines += [f"runpy.run_module({module!r}, run_name='__main__')"]
    return pytest.param(marks=pytest.mark.background("-c", "\n".join(lines), written), id=module)


# mypy begins with the settings of the repository. Its cache is one of its own, because another mypy may run at the same
# time. basedpyright resolves what pages import of each other from where it starts.
_CACHE = ROOT / ".mypy_cache" / "documents"
by_both_checkers = pytest.mark.parametrize(
    (),
    [
        _in_background("mypy", repr(str(ROOT)), ["--no-error-summary", "--cache-dir", str(_CACHE)]),
        _in_background("basedpyright", "pages", ["--level", "error", "--pythonpath", sys.executable]),
    ],
)


def errors(result: CommandResult) -> set[tuple[str, int]]:
    """The module and the line of each error that a checker found."""
    return {(name, int(line)) for name, line in re.findall(r"(\w+)\.py:(\d+):.* error\b", result.stdout)}


def refused(text: str) -> set[int]:
    """The lines of a text in which a checker must find an error."""
    return {number for number, line in enumerate(text.splitlines(), 1) if "  # refused" in line}
