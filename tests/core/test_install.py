"""The commands that Weft's messages name: they install what is missing, and no other project."""

from __future__ import annotations

import importlib.metadata
import re
import shlex
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from weft.core.errors import _requirements, pip_install

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
OF_MESSAGES = ("langchain", "autogen", "openai", "ray", "top", "cpu", "gpu")  # the extras that messages name parts of
SOURCES = [path for folder in ("core", "engine", "integrations", "src") for path in (ROOT / folder).rglob("*.py")]


@pytest.mark.parametrize(
    "wanted", [each for extra in OF_MESSAGES for each in PROJECT["optional-dependencies"][extra]], ids=str
)
def test_the_command_has_the_versions_of_pyproject(wanted: str) -> None:
    """A shell passes each requirement to pip as one argument."""
    words = shlex.split(pip_install(Requirement(wanted).name))
    assert words[:2] == ["pip", "install"]
    (found,) = map(Requirement, words[2:])
    assert (found.name, found.specifier) == (Requirement(wanted).name, Requirement(wanted).specifier)


def test_other_distributions_are_named_without_a_version() -> None:
    """Weft requires no version of what vLLM brings along."""
    assert pip_install("uvicorn", "starlette") == "pip install uvicorn starlette"


def test_the_command_is_there_without_metadata(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of Weft's folder need not be installed, and the error that names the command must not be lost."""

    def fail(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "requires", fail)
    _requirements.cache_clear()
    try:
        assert pip_install("ray") == "pip install ray"
    finally:
        _requirements.cache_clear()


def test_no_message_installs_weft_by_its_name() -> None:
    """The project of that name on PyPI is another one."""
    by_name = re.compile(r"pip install [^\n`]*(?<![\w.-])weft\b(?![./-])")
    assert [str(path) for path in SOURCES if by_name.search(path.read_text(encoding="utf-8"))] == []
