"""What is shown while an engine starts: nothing, a line on a terminal, or a line in a notebook."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import rich.console

from weft.engine.vllm.start_progress import StartProgress, host_memory


def start(log: Path) -> None:
    """A start, as an engine reports it."""
    with StartProgress() as progress:
        progress.stage("looking up the model")
        progress.log = log
        progress.stage("starting the engine")
        progress.ready("tiny", 1.5)


def test_a_script_whose_standard_error_is_no_terminal_sees_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The output of a script in a pipe or under a service manager stays the script's own, with colours in it or not."""
    start(tmp_path / "vllm.log")
    monkeypatch.setenv("FORCE_COLOR", "1")
    start(tmp_path / "vllm.log")
    assert capfd.readouterr() == ("", "")


def test_a_terminal_shows_the_stages_and_keeps_where_the_log_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stages are removed at the end."""

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    start(tmp_path / "vllm.log")
    shown = terminal.getvalue()
    assert "starting the engine" in shown
    ready, memory = shown.splitlines()[-2:]
    assert "weft: tiny was ready after" in ready
    assert ready.endswith(f"vLLM's log is {tmp_path / 'vllm.log'}")
    assert memory.startswith("weft: 1.5 GiB of host memory for KV in each worker (swap=weft.SwapConfig(space_gib=...)")
    assert memory.endswith("swap=None or --host-kv-gib 0: none)")


def test_host_memory_in_words() -> None:
    """Less than a GiB is in MiB, and none says how to have some."""
    assert host_memory(0.25).startswith("256 MiB of host memory for KV")
    assert host_memory(0.0).startswith("no host memory for KV (swap=weft.SwapConfig")


def test_a_notebook_shows_one_line_that_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """IPython's handle of the output replaces the line."""
    shown: list[str] = []

    def show(data: dict[str, str], **_: Any) -> Any:
        shown.append(data["text/plain"])
        return SimpleNamespace(update=show)

    monkeypatch.setattr(rich.console, "_is_jupyter", lambda: True)
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(display=show))
    start(tmp_path / "vllm.log")
    assert shown[:2] == ["looking up the model ...", "starting the engine ..."]
    assert str(tmp_path / "vllm.log") in shown[2]
