"""What the tests share: one real engine on a tiny random Llama, since it takes half a minute to start."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from background import Background, Done

if TYPE_CHECKING:
    import weft

# Before anything imports vLLM or torch: their own output has no place in a test report.
os.environ.setdefault("TORCH_LOGS", "-torch._library")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
os.environ.setdefault("PYTHONWARNINGS", "ignore")  # of the engine's processes; this one's are errors


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """vLLM, LangGraph and AutoGen run on asyncio only."""
    return "asyncio"


@pytest.fixture(name="weft")
def weft_command(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """The command in this process: its exit code, and what it and its children print on both outputs."""
    from weft.commands import cli

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["weft", *map(str, arguments)])
        code = cli.main()
        return code, *capfd.readouterr()

    return run


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny random Llama with a chat template."""
    from tiny_engine import make_tiny_llama

    return make_tiny_llama(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session", autouse=True)
def _background(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Background]:
    """The commands of all tests that are to be run, begun."""
    background = Background(
        lambda: tmp_path_factory.mktemp("background"), lambda: request.getfixturevalue("tiny_model")
    )
    for item in request.session.items:
        for mark in item.iter_markers("background"):
            background.begin(mark.args)
    yield background
    background.end()


@pytest.fixture
def done(request: pytest.FixtureRequest, _background: Background) -> Done:
    """The test's command, run as a user would run it: `@pytest.mark.background(*arguments of python)`."""
    return _background.done(request.node.get_closest_marker("background").args)


@pytest.fixture(scope="session")
def engine(tiny_model: Path) -> Iterator[weft.Engine]:
    """The session's engine. Its table must be empty again after each test that uses it."""
    from tiny_engine import ENGINE_ARGS

    import weft

    with weft.Engine(tiny_model, **ENGINE_ARGS) as engine:
        yield engine


@pytest.fixture(autouse=True)
def _table_is_left_empty(request: pytest.FixtureRequest) -> Iterator[None]:
    """A program that outlives its test is a leak."""
    yield
    if "engine" in request.fixturenames:
        engine = request.getfixturevalue("engine")
        if engine.is_alive:
            engine.table.check_integrity()
            assert len(engine.table) == 0
            assert engine.sessions == {}
