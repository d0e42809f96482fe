"""The Python blocks of the documents as files for type checkers.

A line of a file has the number that it has in its document. The blocks of a document are one file: each is a function
inside that of the block before, so it sees the names of those before, may `await`, and may define a name again. A block
with a title is a whole file of its own. A block after `<!-- fragment -->` is left out.
"""

from __future__ import annotations

import re
from pathlib import Path

GIVEN = "import weft; engine = weft.Engine()"  # as for the snippets that `test_docs.py` runs
FENCE = re.compile(r'^```python(?: title="(?P<title>.+)")?$')


def whole_files(document: Path) -> dict[str, str]:
    """The blocks of a document that are whole files, by path."""
    return dict(re.findall(r'```python title="(.+?)"\n(.*?)```', document.read_text(), flags=re.DOTALL))


def write(documents: list[Path], root: Path, folder: Path) -> dict[str, Path]:
    """Write the files into `folder`.

    Args:
        documents: Markdown.
        root: The folder that the names of the files begin at.
        folder: The target.

    Returns:
        The document of each file, by the file's name.
    """
    written = {}
    for document in documents:
        stem = re.sub(r"\W", "_", document.relative_to(root).with_suffix("").as_posix())
        for name, source in _files(document.read_text().splitlines(), stem).items():
            (folder / name).write_text(source)
            written[name] = document
    return written


def _files(lines: list[str], stem: str) -> dict[str, str]:
    page, whole = [GIVEN], dict[str, list[str]]()
    modules = {}  # of whole files, by the name under which the document imports them
    depth, target, is_open = 0, None, False
    for number, line in enumerate(lines[1:], 1):
        fence = FENCE.match(line)
        page.append("")
        if fence is not None:
            is_open, target = lines[number - 1] != "<!-- fragment -->", None
            if fence["title"] is not None:
                name = f"{stem}_{len(whole)}" if fence["title"].endswith("__init__.py") else Path(fence["title"]).stem
                modules["weft." + fence["title"].removesuffix(".py").replace("/", ".")] = name
                target = whole[f"{name}.py"] = [""] * (number + 1)
            elif is_open:
                page[-1] = f"{'    ' * depth}async def snippet_{depth}() -> None:"
                depth += 1
        elif line == "```":
            is_open = False
        elif is_open and target is not None:
            target.append(line)
        elif is_open and line:
            page[-1] = "    " * depth + line
    files = {name: "\n".join(text) + "\n" for name, text in {f"{stem}.py": page, **whole}.items()}
    for imported, name in modules.items():
        files = {each: re.sub(rf"\b{re.escape(imported)}\b", name, text) for each, text in files.items()}
    return {name: text for name, text in files.items() if depth > 0 or name != f"{stem}.py"}
