"""The `weft` command: quick to start, and every failure is one message and an exit code."""

from __future__ import annotations

import importlib.abc
import os
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest
from typer.testing import CliRunner

import weft
from weft.commands import cli, doctor
from weft.commands.doctor import Check
from weft.core.errors import ModelPrepareError
from weft.engine.models.embedded import ProgressCallback


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `python -m weft` as a user would."""
    return subprocess.run(
        [sys.executable, "-m", "weft", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, **environment},
    )


@pytest.fixture
def main(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """`weft.commands.cli.main` with arguments, in this process."""

    def call(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["weft", *arguments])
        return cli.main()

    return call


def raising(error: BaseException) -> Callable[..., NoReturn]:
    """A function that raises `error`, whatever it is called with."""

    def fail(*_: object) -> NoReturn:
        raise error

    return fail


def test_version() -> None:
    """`weft --version` prints the package's version."""
    done = run("--version")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"weft {weft.__version__}\n", "")


def test_help() -> None:
    """`weft --help` names every command."""
    done = run("--help")
    assert done.returncode == 0
    assert all(command in done.stdout for command in ("demo", "doctor", "model"))


def test_command_line_imports_nothing_heavy() -> None:
    """Showing help needs neither vLLM, torch, transformers nor a framework."""
    heavy = {"vllm", "torch", "transformers", "langchain_core", "autogen_core"}
    code = f"import sys, weft.commands.cli; print({heavy} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout, done.stderr) == ("set()\n", "")


def test_unknown_command() -> None:
    """A mistyped command is a usage error (exit code 2)."""
    done = run("modle")
    assert done.returncode == 2
    assert "No such command 'modle'" in done.stderr


def test_error_form(tmp_path: Path) -> None:
    """An error of Weft's own is `error: message` on stderr, with exit code 1 and no traceback."""
    (tmp_path / "file").touch()
    done = run("model", "prepare", WEFT_CACHE_DIR=str(tmp_path / "file"))
    assert done.returncode == 1
    assert done.stdout == ""
    assert "error: the embedded model cannot be prepared in" in done.stderr
    assert "Traceback" not in done.stderr


def test_unexpected_error(
    main: Callable[..., int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A bug shows as one line that says how to get the traceback."""
    monkeypatch.delenv("WEFT_DEBUG", raising=False)
    monkeypatch.setattr(cli, "is_embedded_model_ready", raising(ValueError("two\nlines")))
    assert main("model", "prepare") == 1
    assert capsys.readouterr().err == "error: ValueError: two lines (set WEFT_DEBUG=1 for the traceback)\n"


def test_debug_shows_the_traceback(
    main: Callable[..., int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """WEFT_DEBUG=1 puts the traceback before the message."""
    monkeypatch.setenv("WEFT_DEBUG", "1")
    monkeypatch.setattr(cli, "is_embedded_model_ready", raising(ModelPrepareError("no")))
    assert main("model", "prepare") == 1
    error = capsys.readouterr().err
    assert error.startswith("Traceback (most recent call last):\n")
    assert error.endswith("\nerror: no\n")


def test_interrupt(
    main: Callable[..., int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ctrl-C ends a command with one line and exit code 130."""
    monkeypatch.setattr(cli, "is_embedded_model_ready", raising(KeyboardInterrupt()))
    assert main("model", "prepare") == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_prepare_shows_progress_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`weft model prepare` prints only the folder on stdout; bars and remarks go to stderr."""
    ready: list[bool] = []

    def prepare(report: ProgressCallback | None = None) -> Path:
        if report:
            report("download", 0.5)
            report("convert", None)
        ready.append(True)
        return tmp_path

    monkeypatch.setattr(cli, "is_embedded_model_ready", lambda: bool(ready))
    monkeypatch.setattr(cli, "embedded_model", prepare)
    first = CliRunner().invoke(cli.app, ["model", "prepare"])
    assert first.stdout == f"{tmp_path}\n"
    assert "downloading" in first.stderr
    assert "converting" in first.stderr
    second = CliRunner().invoke(cli.app, ["model", "prepare"])
    assert second.stdout == f"{tmp_path}\n"
    assert second.stderr == "already prepared\n"


@pytest.mark.parametrize("ok", [True, False])
def test_doctor(ok: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """`weft doctor` shows every line with what to do, and fails if one of them does."""
    broken = Check("vLLM", ok, "vllm [9.9]", "" if ok else "pip install it")
    monkeypatch.setattr(doctor, "run_checks", lambda: [Check("Python", True, "3.11.7"), broken])
    done = CliRunner().invoke(cli.app, ["doctor"])
    assert done.exit_code == int(not ok)
    lines = [line.split() for line in done.stdout.splitlines()]
    advice = [] if ok else ["pip", "install", "it"]
    assert ["ok", "Python", "3.11.7"] in lines
    assert ["ok" if ok else "no", "vLLM", "vllm", "[9.9]", *advice] in lines


def test_demo_passes_its_options_on(main: Callable[..., int], monkeypatch: pytest.MonkeyPatch) -> None:
    """`weft demo` hands its options to the example, whose result is the exit code."""
    calls: list[tuple[str | None, str, int | None]] = []

    def run_demo(model: str | None, policy: str, programs: int | None) -> int:
        calls.append((model, policy, programs))
        return 3

    example = types.ModuleType("weft.examples.react_langchain")
    example.run_demo = run_demo  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, example.__name__, example)
    monkeypatch.setattr(cli, "is_embedded_model_ready", lambda: True)
    assert main("demo") == 3
    assert main("demo", "--model", "folder", "--policy", "fcfs", "--programs", "5") == 3
    assert calls == [(None, "atlas", None), ("folder", "fcfs", 5)]


@pytest.mark.parametrize("options", [["--policy", "lifo"], ["--programs", "0"]])
def test_demo_refuses_bad_options(options: list[str]) -> None:
    """A policy that does not exist, or no program at all, is a usage error."""
    assert CliRunner().invoke(cli.app, ["demo", *options]).exit_code == 2


def test_demo_without_langchain(
    main: Callable[..., int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where LangChain is missing, the demo says how to install it."""

    class NoLangChain(importlib.abc.MetaPathFinder):
        def find_spec(self, name: str, *_: object) -> None:
            if name == "weft.examples.react_langchain":
                raise ModuleNotFoundError("No module named 'langchain_core'", name="langchain_core.messages")

    monkeypatch.delitem(sys.modules, "weft.examples.react_langchain", raising=False)
    monkeypatch.setattr(sys, "meta_path", [NoLangChain(), *sys.meta_path])
    assert main("demo") == 1
    assert capsys.readouterr().err == "error: the demo needs LangChain: pip install 'weft[langchain]'\n"
