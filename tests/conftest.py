"""Fixtures of all tests: one real engine on a tiny random Llama, which takes half a minute to start."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING
from unittest import mock

import hypothesis
import pytest
from background import BackgroundCommands, CommandResult

if TYPE_CHECKING:
    import weft

# Set before vLLM or torch is imported, because their log output would clutter the test report.
os.environ.setdefault("TORCH_LOGS", "-torch._library")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
os.environ.setdefault("PYTHONWARNINGS", "ignore")  # for the engine's processes; in this process, warnings are errors

# No example has a deadline, because its time depends on the load of the machine.
hypothesis.settings.register_profile("weft", deadline=None)
hypothesis.settings.load_profile("weft")


# Next to nothing that is imported and collected becomes garbage, and looking for it takes a third of that time.
gc.disable()


def pytest_collection_finish() -> None:
    """Look for garbage from now on, but not among what is there for the whole session."""
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Move the tests of background commands to the end, so that few of them have to wait for their command."""
    items.sort(key=lambda item: item.get_closest_marker("background") is not None)


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """vLLM, LangGraph and AutoGen run on asyncio only."""
    return "asyncio"


@pytest.fixture(name="weft")
def weft_command(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """Runs the command in this process. Gives its exit code, and all that it and its children print on both outputs."""
    from weft.commands import cli

    monkeypatch.delenv("WEFT_DEBUG", raising=False)  # which prints tracebacks

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["weft", *map(str, arguments)])
        code = cli.main()
        return code, *capfd.readouterr()

    return run


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny random Llama with a chat template."""
    from tiny_engine import make_tiny_llama

    return make_tiny_llama(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session", autouse=True)
def _background(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[BackgroundCommands]:
    """Starts the background commands of all selected tests."""
    commands = BackgroundCommands(
        lambda: tmp_path_factory.mktemp("background"), lambda: request.getfixturevalue("tiny_model")
    )
    for item in request.session.items:
        for mark in item.iter_markers("background"):
            commands.start(mark.args)
    yield commands
    commands.stop()


@pytest.fixture
def command_result(request: pytest.FixtureRequest, _background: BackgroundCommands) -> CommandResult:
    """The result of the test's command, which `@pytest.mark.background(*arguments of python)` names."""
    return _background.wait(request.node.get_closest_marker("background").args)


@pytest.fixture(scope="session")
def vllm_engine(tiny_model: Path) -> Iterator[weft.Engine]:
    """The engine of the session. The server of tests/engine/serve is one that compiles."""
    from threads import one_thread
    from tiny_engine import ENGINE_ARGS

    import weft

    with one_thread(), mock.patch.dict(os.environ, {"TORCH_COMPILE_DISABLE": "1"}):  # for one call with logprobs
        engine = weft.Engine(tiny_model, **ENGINE_ARGS)
    with engine:
        yield engine


@pytest.fixture(scope="session")
def engine(vllm_engine: weft.Engine) -> weft.Engine:
    """A test's engine, whose process table must be empty again after the test. A module may have another one."""
    return vllm_engine


@pytest.fixture(autouse=True)
def _check_that_the_table_is_empty(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails if a program outlives the test. A module's own `engine` is checked, too."""
    engine = request.getfixturevalue("engine") if "engine" in request.fixturenames else None
    yield
    if engine is not None and engine.is_alive:
        engine.table.check_integrity()
        assert len(engine.table) == 0
        assert engine.sessions == {}
