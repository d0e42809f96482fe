"""Rules for the whole source tree: the imports that are allowed, and how little `import weft` imports."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import weft

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("core", "engine", "integrations", "examples", "src/weft")
HEAVY = (
    "vllm",
    "torch",
    "transformers",
    "langchain",
    "langchain_core",
    "langgraph",
    "autogen_core",
    "autogen_agentchat",
)
IMPLICIT = ("contextvars", "structlog.contextvars", "structlog.threadlocal")


def sources(*folders: str) -> list[Path]:
    """The Python files of some folders. A file that is also reached through a link in src/weft is returned once."""
    found = {path.resolve() for folder in folders for path in (ROOT / folder).rglob("*.py")}
    return sorted(path for path in found if "__pycache__" not in path.parts)


def relative_name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def imports(source: str) -> Iterator[str]:
    """Yield every module, and every name in a module, that a source imports at its top or inside a function."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.module is not None, "imports are absolute here"
            assert node.level == 0, "imports are absolute here"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def uses(source: str) -> Iterator[str]:
    """Yield the imports of a source, every `package.attribute` that it reads, and every module that it imports by a
    call."""
    yield from imports(source)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            yield f"{node.value.id}.{node.attr}"
        elif isinstance(node, ast.Call):
            called = getattr(node.func, "attr", getattr(node.func, "id", None))
            if called in ("import_module", "__import__"):
                yield from (str(each.value) for each in node.args if isinstance(each, ast.Constant))


def among(source: str, modules: tuple[str, ...]) -> set[str]:
    """The `modules` of which a source uses the module itself or a name in it."""
    return {module for used in uses(source) for module in modules if used == module or used.startswith(f"{module}.")}


def users_of(modules: tuple[str, ...], *folders: str) -> dict[str, set[str]]:
    """The files of some folders that use one of the modules, each with those that it uses."""
    found = {relative_name(path): among(path.read_text(), modules) for path in sources(*folders)}
    return {name: used for name, used in found.items() if used}


def in_a_fresh_process(code: str) -> str:
    """Run `code` in a new Python process, with warnings as errors, and return what it prints."""
    completed = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert completed.returncode == 0, completed.stderr
    return completed.stdout


@pytest.mark.parametrize(
    "source",
    [
        "import contextvars",
        "import contextvars as c",
        "import os, contextvars",
        "from contextvars import ContextVar",
        "def f():\n    from contextvars import copy_context",
        "import structlog.contextvars",
        "from structlog import contextvars",
        "from structlog.contextvars import bind_contextvars",
        "import structlog\nstructlog.contextvars.bind_contextvars(a=1)",
        "import structlog\nstructlog.threadlocal.bind_threadlocal(a=1)",
        "import importlib\nimportlib.import_module('contextvars')",
        "__import__('contextvars')",
    ],
)
def test_the_check_finds_every_use_of_ambient_context(source: str) -> None:
    """The check below finds each of these ways to read ambient context."""
    assert among(source, IMPLICIT)


@pytest.mark.parametrize(
    "source", ["import structlog", "'contextvars'", "import contextvars_like", "x = 1 # contextvars"]
)
def test_the_check_finds_nothing_else(source: str) -> None:
    """The check ignores sources that only look as if they read ambient context."""
    assert among(source, IMPLICIT) == set()


def test_the_checks_read_the_whole_tree() -> None:
    """Every installed file is checked, including files that are installed through links."""
    checked = {relative_name(path) for path in sources(*FOLDERS)}
    assert {
        "core/program/handle.py",
        "engine/scheduler/plugin.py",
        "integrations/langchain/handler.py",
        "src/weft/commands/cli.py",
    } <= checked
    installed = {path.resolve() for folder in Path(weft.__file__).parent.iterdir() for path in folder.rglob("*.py")}
    assert {relative_name(path) for path in installed if path.is_relative_to(ROOT)} <= checked


def test_identity_is_never_looked_up() -> None:
    """No module reads context variables or structlog's thread-locals, because identity is handed over explicitly."""
    assert users_of(IMPLICIT, *FOLDERS) == {}


def test_core_stands_alone() -> None:
    """Core imports only the standard library, numpy, structlog, itself, and what finds the other project `weft`."""
    assert users_of(HEAVY, "core") == {}
    for path in sources("core"):
        for imported in imports(path.read_text()):
            top = imported.split(".")[0]
            is_known = top in sys.stdlib_module_names or top in {"numpy", "structlog", "vllm_weft"}
            assert is_known or imported.startswith("weft.core."), f"{relative_name(path)} imports {imported}"


@pytest.mark.parametrize(
    "source",
    ["import vllm", "from vllm import LLM", "def f():\n    import vllm.envs as e", "import_module('vllm.config')"],
)
def test_the_check_finds_every_import_of_vllm(source: str) -> None:
    """The check below finds each of these ways to import vLLM."""
    assert among(source, ("vllm",))


def test_vllm_is_imported_in_one_place() -> None:
    """Only engine/vllm_compat imports vLLM, so it lists all names and members of vLLM that Weft uses."""
    users = users_of(("vllm",), *FOLDERS, "tests", "benchmarks")
    assert users
    assert {name for name in users if not name.startswith("engine/vllm_compat/")} == set()


def test_import_weft_is_light() -> None:
    """`import weft` imports neither vLLM nor torch nor a framework."""
    loaded = in_a_fresh_process("import sys, weft\nprint(*sys.modules)").split()
    assert "weft.core.program" in loaded
    assert set(loaded) & set(HEAVY) == set()


def test_public_names_need_no_engine() -> None:
    """Every public name that is not an engine's can be used where vLLM, torch and the frameworks cannot be imported."""
    engine_names = {"AsyncMultiLLMEngine", "Engine", "ServedModel"}
    code = f"""
import sys
sys.modules.update(dict.fromkeys({HEAVY!r}))  # importing one now fails
import weft
for name in weft.__all__:
    if name not in {engine_names!r}:
        print(name, getattr(weft, name) is not None)
import weft.core.testing
"""
    printed = in_a_fresh_process(code).splitlines()
    assert printed == [f"{name} True" for name in weft.__all__ if name not in engine_names]


def test_other_names_are_attribute_errors() -> None:
    """`weft.__all__` has no repetitions, and reading a name that is not in it raises an AttributeError."""
    assert "Engine" in weft.__all__
    assert len(set(weft.__all__)) == len(weft.__all__)
    with pytest.raises(AttributeError, match="module 'weft' has no attribute 'engin'"):
        _ = weft.engin
