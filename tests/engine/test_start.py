"""What is checked before an engine starts. Needs no engine."""

from __future__ import annotations

import pytest

from weft.core.errors import UnsupportedVllmError, VllmUnavailableError
from weft.engine.frontend import start
from weft.engine.vllm_compat import version as compat


@pytest.mark.parametrize(("version", "error"), [("0.31.0", UnsupportedVllmError), (None, VllmUnavailableError)])
def test_no_model_is_fetched_for_a_vllm_that_cannot_run_it(
    version: str | None, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a supported vLLM, the error says what to install, and comes before the model's download of 93 MB."""
    monkeypatch.setattr(compat, "installed_vllm", lambda: version)
    monkeypatch.setattr(start, "embedded_model", lambda: pytest.fail("the model was fetched"))
    with pytest.raises(error, match=r"weft\[cpu\]|vllm==0\.32"):
        start.resolve_model(None)
