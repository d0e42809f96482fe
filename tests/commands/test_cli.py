"""The `weft` command: it starts quickly, and every failure is one message and an exit code."""

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
from weft.commands import cli, demo, doctor
from weft.commands import demo as model
from weft.commands.doctor import Check
from weft.core.errors import ModelPrepareError, pip_install
from weft.core.policies import DEFAULT_POLICY, POLICIES, SIMULATED_POLICIES
from weft.engine.models.embedded import ProgressCallback
from weft.engine.vllm_compat.versions import version


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
    """A function that takes any arguments and raises `error`."""

    def fail(*_: object) -> NoReturn:
        raise error

    return fail


def test_version() -> None:
    """`weft --version` prints the package's version."""
    completed = run("--version")
    assert (completed.returncode, completed.stdout, completed.stderr) == (0, f"weft {weft.__version__}\n", "")


@pytest.mark.parametrize(
    ("arguments", "same_as"),
    [
        (["-V"], ["--version"]),
        (["-h"], ["--help"]),
        (["top", "-h"], ["top", "--help"]),
        (["trace", "-h"], ["trace", "--help"]),
        (["model", "prepare", "-h"], ["model", "prepare", "--help"]),
        (["serve", "some/model", "-h"], ["serve", "--help"]),
    ],
)
def test_help_and_version_have_short_forms(
    main: Callable[..., int], arguments: list[str], same_as: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """In every command."""
    codes, outputs = [], []
    for line in (arguments, same_as):
        codes.append(main(*line))
        outputs.append(capsys.readouterr().out.strip())
    assert codes == [0, 0]
    assert outputs[0] == outputs[1] != ""


def test_help_shows_no_type_of_an_option_without_a_value(
    main: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    """`--json <bool>` would ask for a value that the option does not take."""
    traces = ("trace make", "trace import", "trace export")
    for command in ("", "graph", "bench", "serve", "sim", "top", *traces, "model prepare"):
        main(*command.split(), "--help")
    shown = capsys.readouterr().out
    assert "--stealing" in shown
    assert "<bool>" not in shown


def test_a_mistyped_option_of_serve_is_refused_before_vllm_is_imported() -> None:
    """At once, with the nearest name; its value is not taken for the model. One process is asked for all of them."""
    advice = {
        "--prot 8000": "has no option --prot. Did you mean --port?",
        "some/model --prot=8000": "has no option --prot. Did you mean --port?",
        "some/model --replica 2": "has no option --replica. Did you mean --replicas?",
        "some/model --kv_polcy ttl": "has no option --kv-polcy. Did you mean --kv-policy?",
        "some/model -xp 2": "has no option -xp. Did you mean -",
        "some/model --xyzzyxyzzy": "has no option --xyzzyxyzzy. `weft serve --help` and `vllm serve --help=all`",
    }
    code = (
        "import sys; from weft.commands.cli import main\n"
        "for line in sys.argv[1:]:\n"
        "    sys.argv = ['weft', 'serve', *line.split()]\n"
        "    print(main(), 'vllm' in sys.modules, 'torch' in sys.modules)"
    )
    completed = subprocess.run(
        [sys.executable, "-c", code, *advice], capture_output=True, text=True, timeout=60, check=False
    )
    assert completed.stdout.splitlines() == ["2 False False"] * len(advice), completed.stderr
    said = completed.stderr.split("error: weft serve ")
    assert said[0] == ""
    for each, expected in zip(said[1:], advice.values(), strict=True):
        assert each.startswith(expected)


def test_help() -> None:
    """`weft --help` names every command."""
    completed = run("--help")
    assert completed.returncode == 0
    commands = ("demo", "graph", "sim", "trace", "bench", "record", "doctor", "model")
    assert all(command in completed.stdout for command in commands)


def test_command_line_imports_nothing_heavy() -> None:
    """The command line starts without vLLM, torch, transformers, a framework and matplotlib."""
    heavy = {"vllm", "torch", "transformers", "langchain_core", "autogen_core", "matplotlib"}
    code = f"import sys, weft.commands.cli; print({heavy} & set(sys.modules))"
    completed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (completed.stdout, completed.stderr) == ("set()\n", "")


def test_unknown_command() -> None:
    """A mistyped command is a usage error, with exit code 2."""
    completed = run("modle")
    assert completed.returncode == 2
    assert "No such command 'modle'" in completed.stderr


def test_error_form(tmp_path: Path) -> None:
    """An error of Weft is `error: message` on standard error, with exit code 1 and no traceback."""
    (tmp_path / "file").touch()
    completed = run("model", "prepare", WEFT_CACHE_DIR=str(tmp_path / "file"))
    assert completed.returncode == 1
    assert completed.stdout == ""
    assert "error: the embedded model cannot be prepared in" in completed.stderr
    assert "Traceback" not in completed.stderr


def test_unexpected_error(
    main: Callable[..., int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An unexpected error is one line that says how to see the traceback."""
    monkeypatch.delenv("WEFT_DEBUG", raising=False)
    monkeypatch.setattr(model, "is_embedded_model_ready", raising(ValueError("two\nlines")))
    assert main("model", "prepare") == 1
    assert capsys.readouterr().err == "error: ValueError: two lines (set WEFT_DEBUG=1 for the traceback)\n"


def test_debug_shows_the_traceback(
    main: Callable[..., int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """WEFT_DEBUG=1 puts the traceback before the message."""
    monkeypatch.setenv("WEFT_DEBUG", "1")
    monkeypatch.setattr(model, "is_embedded_model_ready", raising(ModelPrepareError("no")))
    assert main("model", "prepare") == 1
    error = capsys.readouterr().err
    assert error.startswith("Traceback (most recent call last):\n")
    assert error.endswith("\nerror: no\n")


def test_a_replay_without_vllm_says_what_to_install(
    main: Callable[..., int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It needs vLLM's scheduler, which a client's environment does not have."""
    monkeypatch.setattr(version, "installed_vllm", lambda: None)
    assert main("replay", "journals/a.journal") == 1
    assert capsys.readouterr().err.startswith("error: vLLM cannot be imported (it is not installed). Install it with")


def test_interrupt(
    main: Callable[..., int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ctrl-C ends a command with one line and exit code 130."""
    monkeypatch.setattr(model, "is_embedded_model_ready", raising(KeyboardInterrupt()))
    assert main("model", "prepare") == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_prepare_shows_progress_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`weft model prepare` prints only the folder on standard output. Bars and remarks go to standard error."""
    ready: list[bool] = []

    def prepare(report: ProgressCallback | None = None) -> Path:
        if report:
            report("download", 0.5)
            report("convert", None)
        ready.append(True)
        return tmp_path

    monkeypatch.setattr(model, "is_embedded_model_ready", lambda: bool(ready))
    monkeypatch.setattr(model, "embedded_model", prepare)
    first = CliRunner().invoke(cli.app, ["model", "prepare"])
    assert first.stdout == f"{tmp_path}\n"
    assert "downloading" in first.stderr
    assert "converting" in first.stderr
    second = CliRunner().invoke(cli.app, ["model", "prepare"])
    assert second.stdout == f"{tmp_path}\n"
    assert second.stderr == "already prepared\n"


@pytest.mark.parametrize("ok", [True, False])
def test_doctor(ok: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """`weft doctor` shows every check with what to do about it, and exits with 1 if a check failed."""
    broken = Check("vLLM", ok, "vllm [9.9]", "" if ok else "pip install it")
    monkeypatch.setattr(doctor, "run_checks", lambda: [Check("Python", True, "3.11.7"), broken])
    result = CliRunner().invoke(cli.app, ["doctor"])
    assert result.exit_code == int(not ok)
    lines = [line.split() for line in result.stdout.splitlines()]
    advice = [] if ok else ["pip", "install", "it"]
    assert ["ok", "Python", "3.11.7"] in lines
    assert ["ok" if ok else "no", "vLLM", "vllm", "[9.9]", *advice] in lines


def test_demo_passes_its_options_on(main: Callable[..., int], monkeypatch: pytest.MonkeyPatch) -> None:
    """`weft demo` passes its options to the example, whose result is the exit code."""
    calls: list[tuple[str | None, str, int | None]] = []

    def run_demo(model: str | None, policy: str, programs: int | None) -> int:
        calls.append((model, policy, programs))
        return 3

    example = types.ModuleType("weft.examples.react_langchain")
    example.run_demo = run_demo  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, example.__name__, example)
    monkeypatch.setattr(demo, "is_embedded_model_ready", lambda: True)
    assert main("demo") == 3
    assert main("demo", "--model", "folder", "--policy", "fcfs", "--programs", "5") == 3
    assert calls == [(None, DEFAULT_POLICY, None), ("folder", "fcfs", 5)]


@pytest.mark.parametrize(("command", "names"), [("demo", POLICIES), ("sim", SIMULATED_POLICIES)])
def test_policies_are_listed(command: str, names: tuple[str, ...]) -> None:
    """The help of `--policy` lists the registered policies, and so does the usage error for another name."""
    help_text = CliRunner().invoke(cli.app, [command, "--help"], env={"COLUMNS": "400", "TERMINAL_WIDTH": "400"})
    assert f"<{'|'.join(names)}>" in help_text.stdout
    wrong = CliRunner().invoke(cli.app, [command, *(["trace"] if command == "sim" else []), "--policy", "lifo"])
    assert wrong.exit_code == 2
    assert "'lifo' is not one of" in wrong.stderr
    assert all(f"'{name}'" in wrong.stderr for name in names)


def test_bench_reads_the_trace_first(
    main: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A trace that cannot be read starts no engine, and leaves no folder that refuses the right trace afterwards."""
    (tmp_path / "bad.jsonl").write_text("no json\n")
    assert main("bench", str(tmp_path / "bad.jsonl"), "--out", str(tmp_path / "out")) == 1
    assert "bad.jsonl, line 1: not JSON" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("options", [["--policy", "lifo"], ["--programs", "0"]])
def test_demo_refuses_bad_options(options: list[str]) -> None:
    """An unknown policy or a number of programs below one is a usage error."""
    assert CliRunner().invoke(cli.app, ["demo", *options]).exit_code == 2


def test_demo_without_langchain(
    main: Callable[..., int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without LangChain, the demo says how to install it."""

    class NoLangChain(importlib.abc.MetaPathFinder):
        def find_spec(self, name: str, *_: object) -> None:
            if name == "weft.examples.react_langchain":
                raise ModuleNotFoundError("No module named 'langchain_core'", name="langchain_core.messages")

    monkeypatch.delitem(sys.modules, "weft.examples.react_langchain", raising=False)
    monkeypatch.setattr(sys, "meta_path", [NoLangChain(), *sys.meta_path])
    assert main("demo") == 1
    command = pip_install("langchain", "langchain-core", "langgraph")
    assert capsys.readouterr().err == f"error: the demo needs LangChain: {command}\n"
