"""What `weft serve` refuses before it starts anything."""

from __future__ import annotations

from pathlib import Path

import pytest

from weft.core.errors import EngineStartError
from weft.engine.serve.options import parse_options


def test_files_of_metrics_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With the variable, vLLM's route would serve the files in that folder, and nothing of Weft."""
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    with pytest.raises(EngineStartError, match="unset"):
        parse_options([])
