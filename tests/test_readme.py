"""The README's example runs as it stands."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.engine
def test_the_readmes_ten_lines_run(tmp_path: Path) -> None:
    """Copied into a file, on the embedded model: two answers, and the two programs' rows."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    assert len(blocks) == 1
    script = tmp_path / "ten_lines.py"
    script.write_text(blocks[0])
    quick = {**os.environ, "TORCH_COMPILE_DISABLE": "1"}  # it takes a minute or more the first time
    done = subprocess.run(
        [sys.executable, str(script)], env=quick, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("ProgramRow(") == 2
    assert "finished" in done.stdout


def test_every_link_of_the_documents_leads_somewhere() -> None:
    """Relative links in the top-level documents and docs/."""
    for document in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)\)", document.read_text()):
            assert (document.parent / target).exists(), f"{document.name}: {target}"
