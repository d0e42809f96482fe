"""The README's example runs as it stands."""

from __future__ import annotations

import re

import pytest
from background import ROOT, CommandResult, script

TEN_LINES = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.background.with_args(script("".join(TEN_LINES)))  # a mark that is called with a function decorates it
def test_the_readmes_ten_lines_run(command_result: CommandResult) -> None:
    """Copied into a file, on the embedded model: two answers, and the process table with the two programs."""
    assert len(TEN_LINES) == 1
    printed = command_result.printed()
    assert "process table" in printed
    assert len(re.findall(r"^answer +1 +1 .* finished$", printed, flags=re.MULTILINE)) == 2
