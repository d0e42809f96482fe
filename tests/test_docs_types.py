"""The Python blocks of the documents pass mypy --strict and basedpyright."""

from __future__ import annotations

from pathlib import Path

import snippets
from background import ROOT, CommandResult
from type_checks import CASES, DOCUMENTS, WRONG, by_both_checkers, errors, refused


@by_both_checkers
def test_the_blocks_of_the_documents_have_the_right_types(command_result: CommandResult) -> None:
    """The only errors are those that a page has on purpose, on its lines; a fragment is not read."""
    found = {(name, line) for name, line in errors(command_result) if name != CASES.stem}
    assert {name for name, _ in found} == {"wrong", "wrong_1", "whole"}, command_result
    assert {line for _, line in found} == refused(WRONG), command_result


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
